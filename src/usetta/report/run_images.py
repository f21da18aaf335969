"""The images of a run: those whose answers a method changed, and any of them opened again with its views.

Of the changed images, those come first whose true class gained or lost the most probability. An image that several
seeds changed in the same direction is listed once, under the seed that changed it the most.

A run keeps no pixels. Images are opened again where they were, and their views made again from the same draws, which
depend only on the seed and the image: so these are exactly the views that the answers came from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from usetta.data.packed import open_below
from usetta.evaluate.store import Store, ViewRecord
from usetta.images import ImageError, open_image
from usetta.report.explain import LabelledView, ViewGridRow
from usetta.views import ViewRecipe
from usetta.views.show import view_image


class MethodAnswer(NamedTuple):
    """A method's answer for an image."""

    prediction: int
    confidence: float
    true_probability: float


_ANSWER_COLUMNS = ("image", "label", *MethodAnswer._fields)


@dataclass(frozen=True)
class AnswerChange:
    """An image, and the answers of two methods for it under one seed."""

    dataset: str
    image: str
    seed: int
    label: int
    before: MethodAnswer
    after: MethodAnswer

    @property
    def was_right(self) -> bool:
        return self.before.prediction == self.label

    @property
    def is_right(self) -> bool:
        return self.after.prediction == self.label

    @property
    def size(self) -> float:
        """How much probability the true class gained, or lost if the answer is wrong now."""
        gain = self.after.true_probability - self.before.true_probability
        return gain if self.is_right else -gain


@dataclass(frozen=True)
class ChangeGroup:
    """Answers that changed in one direction: their number, and the images that changed the most."""

    answers: int = 0
    largest: tuple[AnswerChange, ...] = ()

    def extended(self, changes: list[AnswerChange], limit: int) -> "ChangeGroup":
        by_image: dict[tuple[str, str], AnswerChange] = {}
        for change in (*self.largest, *changes):
            key = change.dataset, change.image
            if key not in by_image or change.size > by_image[key].size:
                by_image[key] = change
        ordered = nsmallest(limit, by_image.values(), key=lambda change: (-change.size, change.dataset, change.image))
        return ChangeGroup(self.answers + len(changes), tuple(ordered))


@dataclass(frozen=True)
class AnswerChanges:
    """What a method changed in the answers of the baseline."""

    baseline: str
    method: str
    compared: int
    """Answers that both gave: one for every image and seed."""
    to_right: ChangeGroup
    to_wrong: ChangeGroup


def find_changes(store: Store, baseline: str, method: str, limit: int) -> AnswerChanges:
    """What `method` changed in the answers of `baseline`, with at most `limit` images in each direction."""
    compared, to_right, to_wrong = 0, ChangeGroup(), ChangeGroup()
    for pairs in _answer_pairs(store, baseline, method):
        compared += len(pairs)
        changed = [pair for pair in pairs if pair.was_right != pair.is_right]
        to_right = to_right.extended([pair for pair in changed if pair.is_right], limit)
        to_wrong = to_wrong.extended([pair for pair in changed if not pair.is_right], limit)
    return AnswerChanges(baseline, method, compared, to_right, to_wrong)


def _answer_pairs(store: Store, baseline: str, method: str) -> Iterator[list[AnswerChange]]:
    """Images that both methods answered, changed or not: one list for every dataset and seed, to bound memory."""
    groups = {(dataset, seed, name) for dataset, seed, name, _ in store.groups()}
    for dataset, seed in sorted({(dataset, seed) for dataset, seed, _ in groups}):
        if {(dataset, seed, baseline), (dataset, seed, method)} <= groups:
            before, after = (_answers(store, dataset, seed, name) for name in (baseline, method))
            yield [
                AnswerChange(dataset, image, seed, label, answer, after[image][1])
                for image, (label, answer) in before.items()
                if image in after
            ]


def _answers(store: Store, dataset: str, seed: int, method: str) -> dict[str, tuple[int, MethodAnswer]]:
    """Label and answer by image."""
    columns = store.columns(_ANSWER_COLUMNS, {"dataset": dataset, "seed": seed, "method": method})
    rows: Iterable[tuple[Any, ...]] = zip(*columns.values(), strict=True)
    return {image: (label, MethodAnswer(*answer)) for image, label, *answer in rows}


@dataclass(frozen=True)
class ImageWithViews:
    """An image with the views of it that were recorded."""

    image: Image.Image
    views: tuple[tuple[ViewRecord, Image.Image], ...]
    """The record of a view, and the view itself; the weak one first."""


class RunImages:
    """Opens the images of a run again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roots = store.facts("root")
        self._datasets = store.facts("dataset")
        self._views = store.facts("run").get("views", {})
        self._classes = store.facts("classes")

    def class_name(self, dataset: str, label: int) -> str:
        """The name of a class."""
        names = self._classes.get(dataset, ())
        return str(names[label]) if label < len(names) else f"class {label}"

    def open(self, dataset: str, image_id: str, seed: int) -> ImageWithViews:
        """The image and its recorded views; `ImageError` gives the reason if it cannot be shown."""
        if dataset not in self._roots:
            raise ImageError(image_id, "the run does not record where its images are")
        image = open_image(open_below(Path(self._roots[dataset]), image_id), for_benchmark=True)
        seen = self._store.shown_views(dataset, image_id, seed)
        if seen is None or not self._views:
            return ImageWithViews(image, ())
        recipe = self._recipe(dataset, seed)
        return ImageWithViews(
            image, tuple((view, view_image(image, image_id, view.number, recipe)) for view in seen.views)
        )

    def grid_row(self, dataset: str, image_id: str, label: int, seed: int) -> ViewGridRow:
        """The image as a row of `view_grid`; it has no views if none were recorded."""
        views = [
            LabelledView(np.asarray(pixels), self.class_name(dataset, view.label), view.entropy)
            for view, pixels in self.open(dataset, image_id, seed).views
        ]
        return ViewGridRow(self.class_name(dataset, label), views)

    def _recipe(self, dataset: str, seed: int) -> ViewRecipe:
        return ViewRecipe(
            views=self._views["views"],
            size=self._views["size"],
            augmix=self._datasets[dataset]["augmix"],
            seed=seed,
            scale=tuple(self._views["scale"]),
            ratio=tuple(self._views["ratio"]),
            severity=self._views["severity"],
            resize_mode=self._views.get("resize_mode", "shortest"),
            interpolation=self._views.get("interpolation", "bicubic"),
        )
