"""Answers for images that wait together, by the one thread that owns the models.

Views of all images go through the image tower together, whoever sent them, and once for all methods that are asked
about; images with the same classes and the same method go through the recipe together. An image's answer does not
depend on its company but for rounding, and what fails in company is tried again alone, so that one request cannot spoil
another.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from usetta.classifier import Classifier
from usetta.episode import Episode, check, encode, encode_together, encode_with_hidden
from usetta.methods.recipe import Recipe
from usetta.models import Model
from usetta.prediction import Prediction
from usetta.serve.prompt_cache import PromptCache, PromptKey

T = TypeVar("T")


class RefusedError(ValueError):
    """The library says no to what was asked, in words that are for the caller."""


@dataclass(frozen=True)
class Question:
    """What is asked about an image."""

    wording: PromptKey
    recipes: tuple[Recipe, ...]
    """Methods that answer, no two alike."""
    views: int = 64
    augmix: bool = False
    seed: int = 0

    @property
    def weak_only(self) -> bool:
        """Whether no method looks at more than the weak view."""
        return all(recipe.weak_only for recipe in self.recipes)

    @property
    def needs_hidden(self) -> bool:
        """Whether a method tunes the image tower."""
        return any(recipe.needs_hidden for recipe in self.recipes)


@dataclass(eq=False)
class Job:
    """An image that waits for the model."""

    question: Question
    source: str
    pixels: Tensor
    """Its views (N, 3, S, S)."""
    answer: Future[list[Prediction]] = field(default_factory=Future)
    """One for each method."""


@dataclass(eq=False)
class _Seen:
    """A job whose words are known, and then its features."""

    job: Job
    classifier: Classifier
    episode: Episode | None = None
    answers: dict[Recipe, Prediction] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Part:
    """What one of its methods has to do."""

    seen: _Seen
    episode: Episode
    recipe: Recipe


def solve(jobs: Sequence[Job], models: Mapping[str, Model], texts: PromptCache) -> None:
    """Give every job its answer or its error."""
    seen: list[_Seen] = []

    def read(some: Sequence[Job]) -> None:
        seen.extend(_read(job, models, texts) for job in some)

    for job in jobs:
        _attempt([job], read, lambda job: job)
    for some in _alike(seen, _tower):
        _attempt(some, lambda some: _encode(some, models), lambda each: each.job)
    parts = (
        _Part(each, each.episode, recipe)
        for each in seen
        if each.episode is not None
        for recipe in each.job.question.recipes
    )
    for part in _alike(parts, _recipe):
        _attempt(part, _answer, lambda each: each.seen.job)


def _read(job: Job, models: Mapping[str, Model], texts: PromptCache) -> _Seen:
    wording = job.question.wording
    try:
        classifier = texts.classifier(wording)
        for recipe in job.question.recipes:
            check(recipe, models[wording.model], classifier._prompts, job.question.views)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return _Seen(job, classifier)


def _encode(seen: Sequence[_Seen], models: Mapping[str, Model]) -> None:
    """Views of several images together through the tower of their model."""
    model = models[seen[0].job.question.wording.model]
    pixels = [each.job.pixels for each in seen]
    if seen[0].job.question.needs_hidden:
        for each in seen:
            features, states = encode_with_hidden(model, each.job.pixels)
            each.episode = Episode(features, hidden=states)
        return
    if getattr(model, "device", torch.device("cpu")).type == "cpu":
        found = [encode(model, own) for own in pixels]  # by itself, so that its features are those of `Classifier`
    else:
        found = encode_together(model, pixels)
    for each, features in zip(seen, found, strict=True):
        each.episode = Episode(features)


def _answer(parts: Sequence[_Part]) -> None:
    """Images with the same classes and recipe through the recipe."""
    sources, episodes = [each.seen.job.source for each in parts], [each.episode for each in parts]
    try:
        answers = parts[0].seen.classifier._answer(sources, episodes, parts[0].recipe)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    for part, answer in zip(parts, answers, strict=True):
        seen, wanted = part.seen, part.seen.job.question.recipes
        seen.answers[part.recipe] = answer
        if len(seen.answers) == len(wanted):
            seen.job.answer.set_result([seen.answers[recipe] for recipe in wanted])


def _tower(seen: _Seen) -> Hashable:
    question, pixels = seen.job.question, seen.job.pixels
    return question.wording.model, pixels.dtype, question.needs_hidden


def _recipe(part: _Part) -> Hashable:
    return id(part.seen.classifier), part.recipe, len(part.seen.job.pixels)


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
            if not job(items[0]).answer.done():  # another of its methods may have failed before
                job(items[0]).answer.set_exception(error)
        else:
            for item in items:
                _attempt([item], work, job)
