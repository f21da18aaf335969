"""The figures in the report of a run: what of a store goes into which figure, and its words for those who see none.

A figure that the run has no data for is None.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from usetta.evaluate.store import Store
from usetta.images import ImageError
from usetta.report import figures
from usetta.report.html import drawn
from usetta.report.measured import Measured
from usetta.report.run_images import Album
from usetta.report.style import DPI
from usetta.report.tables import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Item = TypeVar("Item")

METRICS = ("top1", "skip_ratio", "seconds_per_image")
"""What must have been measured for these figures."""


@dataclass(frozen=True)
class Illustration:
    """A figure as part of a page."""

    address: str
    width: int
    """In pixels of the page."""
    alt: str


def gains(found: Measured, against: str) -> Illustration | None:
    """How many points better the methods are than one of them."""
    if against not in found.methods or len(found.methods) < 2:
        return None
    cells = {method: _cells(found, method, "top1") for method in found.methods}
    accuracy, std = (
        {method: {title: getattr(cell, name) for title, cell in row.items()} for method, row in cells.items()}
        for name in ("value", "std")
    )
    alt = f"Bars: gain over {against} in points of accuracy, for each dataset and method. The table has the numbers."
    return _illustration(figures.gains(accuracy, against, std=std), alt)


def reliability(store: Store, found: Measured) -> Illustration:
    """How often the methods are right when they are so and so sure, on all datasets together."""
    confidence: dict[str, list[float]] = {method: [] for method in found.methods}
    right: dict[str, list[bool]] = {method: [] for method in found.methods}
    for method, columns in _columns(store, found, ("label", "prediction", "confidence")):
        confidence[method] += columns["confidence"]
        right[method] += np.equal(columns["label"], columns["prediction"]).tolist()
    alt = "For each method, bars of accuracy by confidence against the diagonal on which both would be the same."
    return _illustration(figures.reliability(confidence, right), alt)


def skips(store: Store, found: Measured) -> tuple[str, Illustration] | None:
    """The last method that left some images alone: how many, and its accuracy before and after tuning the others."""
    shares = {method: _cells(found, method, "skip_ratio") for method in found.methods}
    skipping = [method for method, row in shares.items() if any(cell.value for cell in row.values())]
    if not skipping:
        return None
    method = skipping[-1]
    ratio = {title: cell.value for title, cell in shares[method].items()}
    after = {title: cell.value for title, cell in _cells(found, method, "top1").items()}
    before = {}
    for dataset, title in titles(found).items():
        columns = store.columns(("label", "before"), {"dataset": dataset, "method": method})
        if columns["label"]:
            before[title] = 100 * float(np.mean(np.equal(columns["label"], columns["before"])))
    alt = f"For each dataset, the share of images that {method} skipped, and its accuracy before and after tuning."
    return method, _illustration(figures.skips(ratio, before, after), alt)


def cost(found: Measured) -> Illustration | None:
    """Accuracy against time, both as means over the datasets that every method has."""
    accuracy, seconds = mean_over_datasets(found, "top1"), mean_over_datasets(found, "seconds_per_image")
    if len(accuracy) < 2:
        return None
    alt = "Points: accuracy of each method against the seconds that it needs for an image."
    return _illustration(figures.cost(seconds, accuracy), alt)


def typical_views(store: Store, found: Measured, album: Album, most: int = 4) -> Illustration | None:
    """Some images with their views, spread over the datasets, whatever the answers were."""
    images = []
    for dataset, image, label, seed in islice(_spread(store, found, most), most):
        try:
            shown = album.show(dataset, image, seed)
        except ImageError:
            continue
        views = [
            figures.FigureView(np.asarray(pixels), album.class_name(dataset, view.label), view.entropy)
            for view, pixels in shown.views
        ]
        if views:
            images.append(figures.FigureImage(album.class_name(dataset, label), views))
    if not images:
        return None
    told = "; ".join(f"{each.label}: {', '.join(view.label for view in each.views)}" for each in images)
    alt = f"Rows of views. What each image shows, and what its views are taken for: {told}."
    return _illustration(figures.view_grid(images), alt, images=True)


def _spread(store: Store, found: Measured, most: int) -> Iterator[tuple[str, str, int, int]]:
    """Dataset, image, label and seed of `most` images or a few more."""
    datasets = _evenly(found.datasets, most)
    for dataset in datasets:
        method = next(method for method in reversed(found.methods) if (dataset, method) in found.answers)
        seed = min(found.answers[dataset, method])
        there = store.columns(("image", "label"), {"dataset": dataset, "seed": seed, "method": method})
        images = list(zip(there["image"], there["label"], strict=True))
        for image, label in _evenly(images, -(-most // len(datasets))):
            yield dataset, image, label, seed


def _evenly(items: Sequence[Item], most: int) -> list[Item]:
    n = min(most, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * n)] for i in range(n)]


def mean_over_datasets(found: Measured, metric: str) -> dict[str, float]:
    """The mean of a metric by method, over the datasets that every method has."""
    common = [d for d in found.datasets if all((d, method) in found.answers for method in found.methods)]
    if not common:
        return {}
    cells = {method: [found.cell(method, dataset, metric) for dataset in common] for method in found.methods}
    return {
        method: float(np.mean([cell.value for cell in row if cell.value is not None])) for method, row in cells.items()
    }


def titles(found: Measured) -> dict[str, str]:
    """What the datasets are called; by their names where two have the same title."""
    named = {dataset: found.title(dataset) for dataset in found.datasets}
    told = list(named.values())
    return {dataset: title if told.count(title) == 1 else dataset for dataset, title in named.items()}


def _cells(found: Measured, method: str, metric: str) -> dict[str, Cell]:
    """By title of the dataset."""
    return {title: found.cell(method, dataset, metric) for dataset, title in titles(found).items()}


def _columns(store: Store, found: Measured, names: Sequence[str]) -> Iterator[tuple[str, dict[str, list[Any]]]]:
    for (dataset, method), by_seed in found.answers.items():
        for seed in by_seed:
            yield method, store.columns(names, {"dataset": dataset, "seed": seed, "method": method})


def _illustration(figure: "Figure", alt: str, *, images: bool = False) -> Illustration:
    return Illustration(drawn(figure, images=images), round(DPI * float(figure.get_figwidth())), alt)
