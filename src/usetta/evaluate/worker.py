"""The work of a run: images of a dataset through the pipeline and the methods to rows of the store.

A work item holds names and numbers, a few hundred bytes, so that it can travel to another machine; it brings the ids
and labels of its own images, so nobody but the driver needs the list of a dataset. A worker holds nothing that belongs
to a run as a whole, so it can stand in any process.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple, Self

from torch import Tensor

from usetta.adaptive import least_views
from usetta.data import Dataset
from usetta.episode import Episode
from usetta.evaluate.metrics import columns
from usetta.evaluate.store import NO_ORDER, FailedImage, ResultRow, ShownViews, ViewRecord
from usetta.images import ImageError
from usetta.methods.recipe import Recipe, Result
from usetta.models import Model
from usetta.pipeline import ImageRequest, Pipeline
from usetta.stream_memory import StreamMemory
from usetta.text_head import TextHead
from usetta.views import ViewRecipe

_SHOWN = 3
"""Strong views of an image that are recorded for reports."""
_STREAM_BATCH = 64
"""Images that go through a memory together. Rounding depends on it, so it is the same wherever a stream runs."""


@dataclass(frozen=True, eq=False)
class DatasetJob:
    """A dataset and what is to be measured on it."""

    dataset: Dataset
    recipes: Mapping[str, Recipe]
    """By the name of the method."""
    views: ViewRecipe
    """Of its images; the seed is the work item's."""
    templates: Sequence[str]
    context: Tensor | None = None
    adaptive: float | None = None
    """If images get no more views than they need: answers in a hundred that this may change."""
    ood_of: str = ""
    """The dataset whose classes these are, if the images are of none of them."""

    @property
    def needs_reward(self) -> bool:
        """Whether a method learns from rewards."""
        return any(recipe.needs_reward for recipe in self.recipes.values())

    def head(self, model: Model, reward_model: Model | None) -> TextHead:
        """The text side of the classifier for this dataset."""
        return TextHead(self.dataset.classes, model, self.templates, self.context, reward_model)

    def check(self, model: Model, reward_model: Model | None) -> None:
        """Refuse recipes that cannot run, before any image is read."""
        head = self.head(model, reward_model)
        for recipe in self.recipes.values():
            head.check(recipe, self.views.views)

    def without_images(self) -> Self:
        """As it travels: work items bring their images, of which a dataset must have one."""
        ids, labels = self.dataset.ids[:1], self.dataset.labels and self.dataset.labels[:1]
        return replace(self, dataset=replace(self.dataset, ids=ids, labels=labels, root=self.dataset.root.absolute()))


class WorkImage(NamedTuple):
    """An image and the methods whose answers are missing."""

    id: str
    label: int
    methods: tuple[str, ...]


@dataclass(frozen=True)
class WorkItem:
    """Images of a dataset that are worked on together, and written to the store together or not at all."""

    dataset: str
    seed: int
    images: tuple[WorkImage, ...]
    order_seed: int = NO_ORDER
    """If it has one, the images are a whole stream in its order."""

    @property
    def is_stream(self) -> bool:
        return self.order_seed != NO_ORDER

    @property
    def key(self) -> tuple[str, int, int, tuple[str, ...]]:
        """No two items of a run have an image under the same seeds in common."""
        return self.dataset, self.seed, self.order_seed, tuple(image.id for image in self.images)

    def parts(self) -> list[Self]:
        """Its images, one by one; a stream is one."""
        if self.is_stream:
            return [self]
        return [replace(self, images=(image,)) for image in self.images]


@dataclass
class Outcome:
    """What came of a work item."""

    rows: list[ResultRow] = field(default_factory=list)
    shown: list[ShownViews] = field(default_factory=list)
    failed: list[FailedImage] = field(default_factory=list)
    encoded: int = 0
    """Images that went through the image tower; the features of the others were in the cache."""


class EvalWorker:
    """Does work items with one pipeline. `batch_size` images go through a method together."""

    def __init__(self, pipeline: Pipeline, jobs: Mapping[str, DatasetJob], batch_size: int | None = None) -> None:
        self._pipeline = pipeline
        self._jobs = jobs
        self._batch_size = batch_size or pipeline.images_at_once
        self._heads: OrderedDict[str, TextHead] = OrderedDict()

    def run(self, items: Iterable[WorkItem]) -> Generator[Outcome, None, None]:
        """The outcomes of work items, in order. Items are taken ahead of their outcomes."""
        taken: deque[WorkItem] = deque()

        def requests() -> Iterator[ImageRequest]:
            for item in items:
                taken.append(item)
                yield from self._requests(item)

        with closing(self._pipeline.stream(requests())) as outcomes:
            for first in outcomes:
                item = taken.popleft()
                rest = islice(outcomes, len(item.images) - 1)
                yield (
                    self._finish_stream(item, chain([first], rest))
                    if item.is_stream
                    else self._finish(item, [first, *rest])
                )

    def _requests(self, item: WorkItem) -> Iterator[ImageRequest]:
        job = self._jobs[item.dataset]
        recipes = _recipes(job, item).values()
        all_views = replace(job.views, seed=item.seed)
        views = replace(all_views, views=1) if all(recipe.weak_only for recipe in recipes) else all_views
        adaptive = job.adaptive is not None and views.views > 1
        how = {"most": views.views, "least": least_views(*recipes), "accepted": job.adaptive}
        for image in item.images:
            yield ImageRequest(
                job.dataset.source(image.id),
                views,
                id=image.id,
                settled=(lambda features: self._head(job).is_settled(features, **how)) if adaptive else None,
                hidden=any(recipe.needs_hidden for recipe in recipes),
                reward=any(recipe.needs_reward for recipe in recipes),
                for_benchmark=True,
                part_of=None if adaptive else all_views,
            )

    def _head(self, job: DatasetJob) -> TextHead:
        """The prompts of a dataset. They take up to a gigabyte if they are tuned, so only the latest are kept."""
        name = job.dataset.name
        if name not in self._heads:
            kept = 0 if job.adaptive is None else 1  # adaptive images of the next dataset need its prompts already
            while len(self._heads) > kept:
                self._heads.popitem(last=False)
            self._heads[name] = job.head(self._pipeline.model, self._pipeline.reward_model)
        self._heads.move_to_end(name)
        return self._heads[name]

    def _finish_stream(self, item: WorkItem, outcomes: Iterator[Episode | ImageError]) -> Outcome:
        """The answers of methods with a memory, which starts empty, in the order of the images."""
        job, outcome, length = self._jobs[item.dataset], Outcome(), len(item.images)
        head, recipes = self._head(job), _recipes(job, item)
        memories = {name: StreamMemory(recipe, head.model, head.classes) for name, recipe in recipes.items()}
        shown: dict[str, ShownViews] = {}
        for first in range(0, length, _STREAM_BATCH):
            places = range(first, min(first + _STREAM_BATCH, length))
            episodes: dict[int, Episode] = {}
            for place, episode in zip(places, outcomes, strict=False):
                if isinstance(episode, ImageError):
                    outcome.failed.append(FailedImage(item.dataset, item.images[place].id, episode.reason))
                else:
                    episodes[place] = episode
                    outcome.encoded += episode.encoded
            for name, recipe in recipes.items():
                started = time.perf_counter()
                results = head.answer(recipe, list(episodes.values()), memories[name], length)
                seconds = (time.perf_counter() - started) / max(1, len(episodes))
                for (place, episode), result in zip(episodes.items(), results, strict=True):
                    image = item.images[place]
                    row = _row(item, image, name, recipe, result, episode, seconds)
                    outcome.rows.append(replace(row, order_seed=item.order_seed, position=place))
                    if image.id not in shown or len(result.entropies) > 1:
                        shown[image.id] = _shown_views(item, image, result)
        outcome.shown = list(shown.values())
        return outcome

    def _finish(self, item: WorkItem, outcomes: Sequence[Episode | ImageError]) -> Outcome:
        job = self._jobs[item.dataset]
        outcome = Outcome()
        episodes: dict[WorkImage, Episode] = {}
        for image, episode in zip(item.images, outcomes, strict=True):
            if isinstance(episode, ImageError):
                outcome.failed.append(FailedImage(item.dataset, image.id, episode.reason))
            else:
                episodes[image] = episode
                outcome.encoded += episode.encoded
        shown: dict[str, ShownViews] = {}
        recipes = _recipes(job, item)
        together = list(episodes)
        for first in range(0, len(together), self._batch_size):
            head = self._head(job)
            with head.prompts.steps.kept():
                for name, recipe in recipes.items():
                    images = [im for im in together[first : first + self._batch_size] if name in im.methods]
                    if not images:
                        continue
                    saved, started = head.prompts.steps.seconds_saved, time.perf_counter()
                    results = head.answer(recipe, [episodes[image] for image in images])
                    # As if the method were alone: what it shares with others is in the time of each of them.
                    taken = time.perf_counter() - started + head.prompts.steps.seconds_saved - saved
                    for image, result in zip(images, results, strict=True):
                        row = _row(item, image, name, recipe, result, episodes[image], taken / len(images))
                        outcome.rows.append(row)
                        shown[image.id] = _shown_views(item, image, result)
        outcome.shown = list(shown.values())
        return outcome


def _recipes(job: DatasetJob, item: WorkItem) -> dict[str, Recipe]:
    """Of all methods whose answers are wanted for any image of the item."""
    wanted = {name for image in item.images for name in image.methods}
    return {name: recipe for name, recipe in job.recipes.items() if name in wanted}


def _row(
    item: WorkItem, image: WorkImage, name: str, recipe: Recipe, result: Result, episode: Episode, seconds: float
) -> ResultRow:
    metrics = columns(result.probs.double().numpy(), image.label)
    views, energy = 1 if recipe.weak_only else len(episode), float(result.energy)
    return ResultRow(
        dataset=item.dataset,
        image=image.id,
        seed=item.seed,
        method=name,
        **{column: value.item() for column, value in metrics.items()},
        delta=None if recipe.weak_only else float(result.delta),
        beta=1.0 if recipe.weak_only else float(result.beta),
        before=int(result.before.argmax()) if recipe.tunes or recipe.remembers else None,
        skipped=bool(result.skipped) if recipe.tunes else None,
        views=views,
        seconds=episode.seconds * views / len(episode) + seconds,  # a method pays for the views that it looks at
        energy=None if math.isnan(energy) else energy,
    )


def _shown_views(item: WorkItem, image: WorkImage, result: Result) -> ShownViews:
    """The weak view and the most confident strong views of an image; of equally confident ones the first."""
    ranked = 1 + result.entropies[1:].argsort(stable=True)[:_SHOWN]
    records = (ViewRecord(n, int(result.view_labels[n]), float(result.entropies[n])) for n in (0, *ranked.tolist()))
    return ShownViews(item.dataset, image.id, item.seed, tuple(records))
