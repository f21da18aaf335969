"""The paper's figures with the numbers of a run.

A figure shows what the run has. A figure of means shows the means that the run can fill, and if it can fill none, the
datasets that it has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from matplotlib.figure import Figure

from usetta.evaluate.metrics import Interval
from usetta.evaluate.store import ShownViews, Store
from usetta.images import ImageError
from usetta.report import explain, figures
from usetta.report.measured import MEANS, RunMetrics
from usetta.report.reproduce import BETAS, GAMMAS, STEPS, PaperItem, gamma_method, steps_method
from usetta.report.run_images import RunImages
from usetta.report.tables import Cell

_WITHOUT_ERROR_BARS = ("figure-4", "figure-5")

Numbers = dict[str, dict[str, float | None]]
Drawn = tuple[Figure | None, tuple[str, ...]]
"""A figure, if there is anything to draw, and notes on it."""


@dataclass(frozen=True)
class PaperFigures:
    """A figure of the paper, as far as a run has the numbers for it."""

    figures: Mapping[str, Figure]
    """By the name of a file; empty if the run has nothing to show."""
    notes: tuple[str, ...]
    """What is missing."""


def as_figures(item: PaperItem, store: Store) -> PaperFigures:
    """A figure of the paper with the numbers of a run."""
    if item.name not in _DRAW:
        raise ValueError(f"{item.name} is not a figure")
    run = RunMetrics(store, ("top1", "skip_ratio"), item.datasets, item.methods)
    spread = None if item.name in _WITHOUT_ERROR_BARS else "error bars: standard deviation"
    notes = (*run.missing_notes(item.datasets, item.methods), *run.footnotes(spread))
    if not run.datasets:
        return PaperFigures({}, notes)
    run.datasets.sort(key=item.datasets.index)  # as the paper shows them
    figure, more = _DRAW[item.name](run, store)
    name = item.name if len(item.models) == 1 else f"{item.name}-{run.model}"
    return PaperFigures({name: figure} if figure is not None else {}, (*notes, *more))


def _gains(run: RunMetrics, _store: Store) -> Drawn:
    gain: dict[str, dict[str, Interval]] = {}
    for method, dataset in product([method for method in run.methods if method != "clip"], run.datasets):
        ours, clip = (run.cell(name, dataset, "top1") for name in (method, "clip"))
        if ours.value is not None and clip.value is not None:
            points, std = ours.value - clip.value, ours.std or 0.0
            gain.setdefault(method, {})[run.title(dataset)] = Interval(points, points - std, points + std)
    return figures.gains(gain) if gain else None, ()


def _betas(run: RunMetrics, _store: Store) -> Drawn:
    value, std = _by_mean(run, BETAS, ("in&o", "fgvc", "avg"))
    return figures.beta_strategies(value, std=std), ()


def _gammas(run: RunMetrics, _store: Store) -> Drawn:
    value, std = _by_mean(run, {str(gamma): gamma_method(gamma) for gamma in GAMMAS}, ("in&o", "fgvc"))
    numbers, errors = ({float(name): row for name, row in table.items()} for table in (value, std))
    return figures.gamma_sweep(numbers, std=errors), ()


def _skips(run: RunMetrics, _store: Store) -> Drawn:
    ratio, before, after = (
        {run.title(name): run.cell(method, name, metric).value for name in run.datasets}
        for method, metric in (("use", "skip_ratio"), ("use:skip=false", "top1"), ("use", "top1"))
    )
    return figures.skips(ratio, before, after, named=("without skipping", "with skipping")), ()


def _steps(run: RunMetrics, _store: Store) -> Drawn:
    value: dict[str, dict[str, dict[int, float | None]]] = {}
    std: dict[str, dict[str, dict[int, float | None]]] = {}
    for name in run.datasets:
        for method in ("tpt", "use"):
            cells = {count: run.cell(steps_method(method, count), name, "top1") for count in STEPS}
            value.setdefault(run.title(name), {})[method] = {count: cell.value for count, cell in cells.items()}
            std.setdefault(run.title(name), {})[method] = {count: cell.std for count, cell in cells.items()}
    return figures.steps(value, std=std), ()


def _views(run: RunMetrics, store: Store) -> Drawn:
    images, rows, notes = RunImages(store), [], []
    for dataset in run.datasets:
        try:
            seed, label, seen = _instructive(store, dataset, _images_of(run, store, dataset))
            rows.append(images.grid_row(dataset, seen.image, label, seed))
        except ImageError as error:
            notes.append(f"{run.title(dataset)}: {error}")
    return explain.view_grid(rows) if rows else None, tuple(notes)


_DRAW: dict[str, Callable[[RunMetrics, Store], Drawn]] = {
    "figure-2": _gains,
    "figure-3": _betas,
    "figure-4": _skips,
    "figure-5": _views,
    "figure-6": _steps,
    "figure-7": _gammas,
}


def _by_mean(run: RunMetrics, names: Mapping[str, str], means: Sequence[str]) -> tuple[Numbers, Numbers]:
    """Accuracies and deviations of methods under other names: by mean, or by dataset if the run can fill no mean."""
    present = {name: method for name, method in names.items() if method in run.methods}
    cells = {name: {mean: run.mean(method, mean, "top1") for mean in means} for name, method in present.items()}
    filled = [mean for mean in means if any(row[mean].value is not None for row in cells.values())]
    if not filled:
        return _by_dataset(run, present)
    return _split({name: {MEANS[mean]: row[mean] for mean in filled} for name, row in cells.items()})


def _by_dataset(run: RunMetrics, names: Mapping[str, str]) -> tuple[Numbers, Numbers]:
    return _split(
        {
            name: {run.title(dataset): run.cell(method, dataset, "top1") for dataset in run.datasets}
            for name, method in names.items()
        }
    )


def _split(cells: Mapping[str, Mapping[str, Cell]]) -> tuple[Numbers, Numbers]:
    """Values and standard deviations."""
    value = {name: {column: cell.value for column, cell in row.items()} for name, row in cells.items()}
    return value, {name: {column: cell.std for column, cell in row.items()} for name, row in cells.items()}


def _images_of(run: RunMetrics, store: Store, dataset: str) -> Iterable[tuple[int, str, int]]:
    """Seed, image and label of every image of a dataset."""
    method = next(method for method in run.methods if (dataset, method) in run.by_seed)
    seed = min(run.by_seed[dataset, method])
    columns = store.columns(("image", "label"), {"dataset": dataset, "seed": seed, "method": method})
    return ((seed, image, label) for image, label in zip(columns["image"], columns["label"], strict=True))


def _instructive(store: Store, dataset: str, images: Iterable[tuple[int, str, int]]) -> tuple[int, int, ShownViews]:
    """The first image whose weak view is right, though less confident than a strong view that is wrong.

    That is the point of the paper's figure. If a dataset has none, its first image.
    """
    first = None
    for seed, image, label in images:
        seen = store.shown_views(dataset, image, seed)
        if seen is None or len(seen.views) < 2:
            continue
        first = first or (seed, label, seen)
        weak, *strong = seen.views
        if weak.label == label and any(view.label != label and view.entropy < weak.entropy for view in strong):
            return seed, label, seen
    if first is None:
        raise ImageError(dataset, "no strong views of its images were recorded")
    return first
