"""The work of a run: images of a dataset through views, tower and methods to rows of the store.

Threads read, decode and augment the next images while the tower encodes this one; how far ahead they may be is
bounded, so memory does not grow with the number of images. Tasks come and outcomes go in order. A worker holds
nothing that belongs to a run as a whole, so it can stand in any process.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from usetta.data import Dataset
from usetta.episode import Episode, answer, encode, encode_together, encode_with_hidden
from usetta.evaluate.features import FeatureCache, feature_key
from usetta.evaluate.metrics import columns
from usetta.evaluate.store import FailedImage, ResultRow, ShownViews, ViewRecord
from usetta.images import ImageError, file_digest, open_image
from usetta.methods.recipe import Recipe, Result
from usetta.models import Model
from usetta.models.base import require_last_blocks
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

_SHOWN = 3
"""Strong views of an image that are written down for reports."""

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True, eq=False)
class Subject:
    """A dataset, ready to be worked on."""

    dataset: Dataset
    views: ViewRecipe
    """Of its images; the seed is the task's."""
    recipes: Mapping[str, Recipe]
    """By the name of the method."""
    prompts: ClassPrompts
    words: ClassPrompts | None = None
    """The prompts as the reward model reads them, where a method asks one."""


@dataclass(frozen=True, eq=False)
class Task:
    """Images that go through the methods together."""

    subject: Subject
    seed: int
    missing: Mapping[int, tuple[str, ...]]
    """The methods whose answers are wanted, by number of the image in the dataset."""

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Of all methods whose answers are wanted for any of the images."""
        wanted = {name for names in self.missing.values() for name in names}
        return {name: recipe for name, recipe in self.subject.recipes.items() if name in wanted}

    @property
    def views(self) -> ViewRecipe:
        """Of all images alike; strong views are made only if a method looks at them."""
        recipe = replace(self.subject.views, seed=self.seed)
        return replace(recipe, views=1) if all(each.weak_only for each in self.recipes.values()) else recipe

    @property
    def cached_views(self) -> list[ViewRecipe]:
        """Those whose features begin with those of `views`: the weak view is encoded by itself, whatever follows."""
        return list(dict.fromkeys((replace(self.subject.views, seed=self.seed), self.views)))

    @property
    def needs_hidden(self) -> bool:
        """Whether a method runs the last blocks of the tower again."""
        return any(recipe.needs_hidden for recipe in self.recipes.values())

    @property
    def needs_judge(self) -> bool:
        """Whether a method learns from rewards."""
        return any(recipe.loss == "reward" for recipe in self.recipes.values())


@dataclass
class Outcome:
    """What became of a task."""

    rows: list[ResultRow] = field(default_factory=list)
    seen: list[ShownViews] = field(default_factory=list)
    bad: list[FailedImage] = field(default_factory=list)
    encoded: int = 0
    """Images that went through the tower; the others had features in the cache."""


@dataclass
class _Prepared:
    """An image as a thread leaves it to the tower: features from the cache, or pixels, or what is wrong with it."""

    task: Task
    image: int
    seconds: float = 0.0
    pixels: Tensor | None = None
    features: list[Tensor | None] = field(default_factory=list)
    """From the cache, by tower."""
    keys: list[bytes] = field(default_factory=list)
    error: ImageError | None = None


class EvalWorker:
    """Does tasks with one model, and a judge for methods that learn from rewards."""

    def __init__(
        self, model: Model, *, judge: Model | None = None, cache: FeatureCache | None = None, threads: int = 2
    ) -> None:
        self._model = model
        self._judge = judge
        self._cache = cache
        self._threads = threads
        self._device = getattr(model, "device", torch.device("cpu"))

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome, None, None]:
        """The outcomes of tasks, in order."""
        images = ((task, image) for task in tasks for image in task.missing)
        with closing(_ahead(lambda each: self._prepare(*each), images, self._threads)) as prepared:
            for task, members in groupby(prepared, key=lambda each: each.task):
                yield self._finish(task, members)

    def _prepare(self, task: Task, image: int) -> _Prepared:
        started = time.perf_counter()
        found = _Prepared(task, image)
        item = task.subject.dataset[image]
        views = task.views
        try:
            if self._cache:
                digest = file_digest(item.path)
                for tower in self._towers(task):
                    keys = [feature_key(tower.fingerprint, each.key, item.id, digest) for each in task.cached_views]
                    found.keys.append(keys[-1])
                    found.features.append(self._cached(keys, views.views))
            if not found.features or any(each is None for each in found.features) or task.needs_hidden:
                found.pixels = make_views(open_image(item.path, for_benchmark=True), item.id, views)
        except ImageError as error:
            found.error = error
        found.seconds = time.perf_counter() - started
        return found

    def _finish(self, task: Task, members: Iterable[_Prepared]) -> Outcome:
        outcome = Outcome()
        episodes: dict[int, Episode] = {}
        seconds: dict[int, float] = {}
        new: dict[bytes, Tensor] = {}
        dataset = task.subject.dataset
        for some in self._groups(members):
            started = time.perf_counter()
            readable = [each for each in some if each.error is None]
            episodes |= zip((each.image for each in readable), self._encode(readable, new), strict=True)
            own = (time.perf_counter() - started) / max(len(readable), 1)
            for each in some:
                if each.error:
                    outcome.bad.append(FailedImage(dataset.name, dataset.ids[each.image], each.error.reason))
                else:
                    seconds[each.image] = each.seconds + own
                    outcome.encoded += each.pixels is not None
        if self._cache and new:
            self._cache.put(new)
        seen: dict[str, ShownViews] = {}
        for name, recipe in task.recipes.items():
            images = [image for image in episodes if name in task.missing[image]]
            if images:
                started = time.perf_counter()
                chosen = [episodes[image] for image in images]
                result = answer(recipe, chosen, self._model, task.subject.prompts, task.subject.words)
                own = (time.perf_counter() - started) / len(images)
                looked_at = 1 / len(chosen[0].features) if recipe.weak_only else 1  # the weak view's part of them all
                times = [seconds[image] * looked_at + own for image in images]
                outcome.rows += _rows(task, name, recipe, images, result, times)
                seen |= {each.image: each for each in _seen(task, images, result)}
        outcome.seen = list(seen.values())
        return outcome

    def _groups(self, members: Iterable[_Prepared]) -> Iterator[list[_Prepared]]:
        """Images that go through the tower together: on a GPU those of a task, to fill its batches.

        On a CPU a batch is less than an image's views, so each goes by itself, as soon as its views are there.
        """
        if self._device.type == "cpu":
            yield from ([each] for each in members)
        else:
            yield list(members)

    def _encode(self, prepared: Sequence[_Prepared], new: dict[bytes, Tensor]) -> list[Episode]:
        """The episodes of images of a task; what the cache does not have yet is added to `new`."""
        if not prepared:
            return []
        task = prepared[0].task
        towers = self._towers(task)
        states: dict[int, Tensor] = {}
        for each in prepared:
            each.features = each.features or [None] * len(towers)
        for i, tower in enumerate(towers):
            lacking = [each for each in prepared if each.features[i] is None]
            for each, fresh in zip(lacking, self._look(i, tower, lacking, states), strict=True):
                each.features[i] = fresh
                if each.keys:
                    new[each.keys[i]] = fresh.cpu()
        return [self._episode(each, states) for each in prepared]

    def _look(
        self, place: int, tower: Model, prepared: Sequence[_Prepared], states: dict[int, Tensor]
    ) -> Iterator[Tensor]:
        """Features of images by a tower, and of the first tower its hidden states if a method needs them."""
        pixels = [each.pixels for each in prepared if each.pixels is not None]
        if place == 0 and any(each.task.needs_hidden for each in prepared):
            for each, own in zip(prepared, pixels, strict=True):
                features, states[each.image] = encode_with_hidden(tower, own)
                yield features
        elif len(pixels) == 1:
            yield encode(tower, pixels[0])
        elif pixels:
            yield from encode_together(tower, pixels)

    def _episode(self, prepared: _Prepared, states: Mapping[int, Tensor]) -> Episode:
        hidden = states.get(prepared.image)
        if prepared.task.needs_hidden and hidden is None:
            assert prepared.pixels is not None
            hidden = require_last_blocks(self._model).hidden_states(prepared.pixels)
        features = [each.to(self._device) for each in prepared.features if each is not None]
        return Episode(features[0], features[1] if len(features) > 1 else None, hidden)

    def _cached(self, keys: Iterable[bytes], views: int) -> Tensor | None:
        """The features of so many views, from the first of the keys that there is."""
        assert self._cache is not None
        found = next((each for key in keys if (each := self._cache.get(key)) is not None), None)
        return None if found is None else found[:views]

    def _towers(self, task: Task) -> list[Model]:
        return [self._model, self._judge] if self._judge and task.needs_judge else [self._model]


def _ahead(function: Callable[[Given], Found], items: Iterable[Given], threads: int) -> Generator[Found, None, None]:
    """`function` of each item, in order, by threads that are at most two items each ahead of the caller."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="usetta-views")
    waiting: deque[Future[Found]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _rows(
    task: Task, name: str, recipe: Recipe, images: Sequence[int], result: Result, seconds: Sequence[float]
) -> Iterator[ResultRow]:
    dataset = task.subject.dataset
    assert dataset.labels is not None
    probs = result.probs.double().cpu().numpy()
    found: dict[str, list[Any]] = {
        column: values.tolist() for column, values in columns(probs, [dataset.labels[i] for i in images]).items()
    }
    before, skipped = result.before.argmax(dim=-1).tolist(), result.skipped.tolist()
    delta, beta = result.delta.tolist(), result.beta.tolist()
    for i, image in enumerate(images):
        yield ResultRow(
            dataset=dataset.name,
            image=dataset.ids[image],
            seed=task.seed,
            method=name,
            **{column: values[i] for column, values in found.items()},
            delta=None if recipe.weak_only else delta[i],
            beta=1.0 if recipe.weak_only else beta[i],
            before=before[i] if recipe.tunes else None,
            skipped=skipped[i] if recipe.tunes else None,
            seconds=seconds[i],
        )


def _seen(task: Task, images: Sequence[int], result: Result) -> Iterator[ShownViews]:
    """The weak view and the most confident strong views of images, of equals the first."""
    dataset = task.subject.dataset
    entropies, labels = result.entropies.cpu(), result.view_labels.cpu()
    order = 1 + entropies[:, 1:].argsort(dim=-1, stable=True)[:, :_SHOWN]
    for i, image in enumerate(images):
        views = tuple(ViewRecord(n, int(labels[i, n]), float(entropies[i, n])) for n in (0, *order[i].tolist()))
        yield ShownViews(dataset.name, dataset.ids[image], task.seed, views)
