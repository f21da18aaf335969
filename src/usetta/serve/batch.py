"""Answers for pictures that wait together, by the one thread that owns the models.

Views of all pictures go through the image tower as one row, whoever sent them; pictures with the same classes and the
same method go through the recipe together. A picture's answer does not depend on its company but for rounding, and
what fails in company is tried again alone, so that one request cannot spoil another.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from usetta.classifier import Classifier, Prediction
from usetta.episode import Episode, check, encode_with_hidden
from usetta.models import Model
from usetta.recipe import Recipe
from usetta.serve.texts import Texts, Wording

T = TypeVar("T")


class RefusedError(ValueError):
    """The library says no to what was asked, in words that are for the caller."""


@dataclass(frozen=True)
class Question:
    """What is asked about a picture."""

    wording: Wording
    recipe: Recipe
    views: int = 64
    augmix: bool = False
    seed: int = 0


@dataclass(eq=False)
class Job:
    """A picture that waits for the model."""

    question: Question
    source: str
    pixels: Tensor
    """Its views (N, 3, S, S)."""
    answer: Future[Prediction] = field(default_factory=Future)


@dataclass(eq=False)
class _Seen:
    """A job whose words are known, and then its features."""

    job: Job
    classifier: Classifier
    episode: Episode | None = None


def solve(jobs: Sequence[Job], models: Mapping[str, Model], texts: Texts) -> None:
    """Give every job its answer or its error."""
    seen: list[_Seen] = []

    def read(some: Sequence[Job]) -> None:
        seen.extend(_read(job, models, texts) for job in some)

    for job in jobs:
        _attempt([job], read, lambda job: job)
    for some in _alike(seen, _tower):
        _attempt(some, lambda some: _encode(some, models), lambda each: each.job)
    for some in _alike((each for each in seen if each.episode is not None), _recipe):
        _attempt(some, _answer, lambda each: each.job)


def _read(job: Job, models: Mapping[str, Model], texts: Texts) -> _Seen:
    wording, recipe = job.question.wording, job.question.recipe
    try:
        classifier = texts.classifier(wording)
        check(recipe, models[wording.model], classifier._prompts, job.question.views)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return _Seen(job, classifier)


def _encode(seen: Sequence[_Seen], models: Mapping[str, Model]) -> None:
    """Views of several pictures in one row through the tower of their model."""
    model = models[seen[0].job.question.wording.model]
    pixels = torch.cat([each.job.pixels for each in seen])
    counts = [len(each.job.pixels) for each in seen]
    if seen[0].job.question.recipe.needs_hidden:
        features, states = encode_with_hidden(model, pixels)
        parts = zip(seen, torch.split(features, counts), torch.split(states, counts), strict=True)
        for each, own, hidden in parts:
            each.episode = Episode(own, hidden=hidden)
        return
    for each, own in zip(seen, torch.split(model.encode_images(pixels), counts), strict=True):
        each.episode = Episode(own)


def _answer(seen: Sequence[_Seen]) -> None:
    """Pictures with the same classes and recipe through the recipe."""
    episodes = [each.episode for each in seen if each.episode is not None]
    recipe = seen[0].job.question.recipe
    try:
        answers = seen[0].classifier._answer([each.job.source for each in seen], episodes, recipe)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    for each, answer in zip(seen, answers, strict=True):
        each.job.answer.set_result(answer)


def _tower(seen: _Seen) -> Hashable:
    question, pixels = seen.job.question, seen.job.pixels
    return question.wording.model, pixels.dtype, question.recipe.needs_hidden


def _recipe(seen: _Seen) -> Hashable:
    return id(seen.classifier), seen.job.question.recipe, len(seen.job.pixels)


def _alike(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _attempt(items: Sequence[T], work: Callable[[Sequence[T]], None], job: Callable[[T], Job]) -> None:
    """Do `work` on all `items`, or if that fails on each alone; who fails alone gets the error."""
    try:
        work(items)
    except Exception as error:  # noqa: BLE001 - whatever it is belongs to a request, and the worker must go on
        if len(items) == 1:
            job(items[0]).answer.set_exception(error)
        else:
            for item in items:
                _attempt([item], work, job)
