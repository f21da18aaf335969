"""The paper's figures from a run of one's own.

A figure shows what the run has. A figure of means shows those that can be had, and if none can, the datasets that are
there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from usetta.evaluate.store import ShownViews, Store
from usetta.images import ImageError
from usetta.report.items import BETAS, GAMMAS, STEPS, PaperItem, gamma, steps
from usetta.report.measured import MEANS, Measured, papers_title
from usetta.report.tables import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from usetta.report.figures import FigureImage
    from usetta.report.run_images import Album

_WITHOUT_BARS = ("figure-4", "figure-5")

Numbers = dict[str, dict[str, float | None]]


@dataclass(frozen=True)
class Figures:
    """A figure of the paper, as far as it can be had from a run."""

    figures: "Mapping[str, Figure]"
    """By name for a file; empty if the run has nothing for it."""
    notes: tuple[str, ...]
    """What is missing."""


def as_figures(item: PaperItem, store: Store) -> Figures:
    """A figure of the paper with the numbers of a run."""
    if item.name not in _DRAWN:
        raise ValueError(f"{item.name} is not a figure")
    found = Measured(store, ("top1", "skip_ratio"), item.datasets, item.methods)
    notes = _missing(item, found)
    if not found.datasets:
        return Figures({}, tuple(notes))
    found.datasets.sort(key=item.datasets.index)  # as the paper shows them
    figure, more = _DRAWN[item.name](found, store)
    name = item.name if len(item.models) == 1 else f"{item.name}-{found.model}"
    return Figures({name: figure} if figure is not None else {}, (*notes, *more))


def _missing(item: PaperItem, found: Measured) -> list[str]:
    absent = [papers_title(name) for name in item.datasets if name not in found.datasets]
    notes = [f"no results yet: {', '.join(absent)}"] if absent else []
    for method in item.methods:
        sets = [found.title(name) for name in found.datasets if (name, method) not in found.answers]
        notes += [f"no results yet of {method} on {', '.join(sets)}"] if sets else []
    return [*notes, *found.footnotes(None if item.name in _WITHOUT_BARS else "error bars: standard deviation")]


Drawn = tuple["Figure | None", tuple[str, ...]]
"""A figure, if there is anything to draw, and what to tell about it."""


def _gains(found: Measured, _store: Store) -> Drawn:
    from usetta.report import figures

    if "clip" not in found.methods or len(found.methods) < 2:
        return None, ()
    value, std = _by_dataset(found, {method: method for method in found.methods})
    return figures.gains(value, std=std), ()


def _beta(found: Measured, _store: Store) -> Drawn:
    from usetta.report import figures

    value, std = _by_mean(found, BETAS, ("in&o", "fgvc", "avg"))
    return figures.beta_strategies(value, std=std), ()


def _gamma(found: Measured, _store: Store) -> Drawn:
    from usetta.report import figures

    value, std = _by_mean(found, {str(each): gamma(each) for each in GAMMAS}, ("in&o", "fgvc"))
    numbers, errors = ({float(name): row for name, row in table.items()} for table in (value, std))
    return figures.gamma_sweep(numbers, std=errors), ()


def _skips(found: Measured, _store: Store) -> Drawn:
    from usetta.report import figures

    ratio, before, after = (
        {found.title(name): found.cell(method, name, metric).value for name in found.datasets}
        for method, metric in (("use", "skip_ratio"), ("use:skip=false", "top1"), ("use", "top1"))
    )
    return figures.skips(ratio, before, after, named=("without skipping", "with skipping")), ()


def _steps(found: Measured, _store: Store) -> Drawn:
    from usetta.report import figures

    cells = {
        found.title(name): {
            method: {count: found.cell(steps(method, count), name, "top1") for count in STEPS}
            for method in ("tpt", "use")
        }
        for name in found.datasets
    }
    value, std = (
        {
            title: {method: {count: getattr(cell, of) for count, cell in row.items()} for method, row in rows.items()}
            for title, rows in cells.items()
        }
        for of in ("value", "std")
    )
    return figures.steps(value, std=std), ()


def _views(found: Measured, store: Store) -> Drawn:
    from usetta.report import figures
    from usetta.report.run_images import Album

    album, shown, notes = Album(store), [], []
    for dataset in found.datasets:
        try:
            shown.append(_image(found, store, album, dataset))
        except ImageError as error:
            notes.append(f"{found.title(dataset)}: {error}")
    return figures.view_grid(shown) if shown else None, tuple(notes)


_DRAWN: dict[str, Callable[[Measured, Store], Drawn]] = {
    "figure-2": _gains,
    "figure-3": _beta,
    "figure-4": _skips,
    "figure-5": _views,
    "figure-6": _steps,
    "figure-7": _gamma,
}


def _by_mean(found: Measured, names: Mapping[str, str], means: Sequence[str]) -> tuple[Numbers, Numbers]:
    """Accuracies and deviations of methods under other names, by mean, or by dataset if no mean can be had."""
    cells = {
        name: {MEANS[mean]: found.mean(method, mean, "top1") for mean in means}
        for name, method in names.items()
        if method in found.methods
    }
    had = [
        mean for mean in (MEANS[each] for each in means) if any(row[mean].value is not None for row in cells.values())
    ]
    if not had:
        return _by_dataset(found, {name: method for name, method in names.items() if method in found.methods})
    return _split({name: {mean: row[mean] for mean in had} for name, row in cells.items()})


def _by_dataset(found: Measured, names: Mapping[str, str]) -> tuple[Numbers, Numbers]:
    return _split(
        {
            name: {found.title(dataset): found.cell(method, dataset, "top1") for dataset in found.datasets}
            for name, method in names.items()
        }
    )


def _split(cells: Mapping[str, Mapping[str, Cell]]) -> tuple[Numbers, Numbers]:
    """Values and standard deviations."""
    value = {name: {column: cell.value for column, cell in row.items()} for name, row in cells.items()}
    return value, {name: {column: cell.std for column, cell in row.items()} for name, row in cells.items()}


def _image(found: Measured, store: Store, album: "Album", dataset: str) -> "FigureImage":
    """An image of a dataset that shows what the paper wants to show, or the first one."""
    from usetta.report import figures

    seed, label, seen = _telling(store, dataset, _places(found, store, dataset))
    views = album.show(dataset, seen.image, seed).views
    return figures.FigureImage(
        album.class_name(dataset, label),
        [
            figures.FigureView(np.asarray(image), album.class_name(dataset, view.label), view.entropy)
            for view, image in views
        ],
    )


def _places(found: Measured, store: Store, dataset: str) -> Iterable[tuple[int, str, int]]:
    """Seed, image and label of every image of a dataset."""
    method = next(method for method in found.methods if (dataset, method) in found.answers)
    seed = min(found.answers[dataset, method])
    columns = store.columns(("image", "label"), {"dataset": dataset, "seed": seed, "method": method})
    return ((seed, image, label) for image, label in zip(columns["image"], columns["label"], strict=True))


def _telling(store: Store, dataset: str, places: Iterable[tuple[int, str, int]]) -> tuple[int, int, ShownViews]:
    """The first image whose weak view is right, though less confident than a strong view that is wrong."""
    first = None
    for seed, image, label in places:
        seen = store.seen(dataset, image, seed)
        if seen is None or len(seen.views) < 2:
            continue
        first = first or (seed, label, seen)
        weak, *strong = seen.views
        if weak.label == label and any(view.label != label and view.entropy < weak.entropy for view in strong):
            return seed, label, seen
    if first is None:
        raise ImageError(dataset, "no strong views of its images were written down")
    return first
