"""Figures of the benchmark: from numbers by name to a matplotlib `Figure`, which `style.save` writes as PNG and SVG.

Accuracies and shares are in percent, as `usetta.evaluate.metrics` returns them. What is missing (an absent key, None,
NaN) leaves a gap. `std`, wherever it is accepted, has the shape of the accuracies and becomes error bars.

Datasets differ by tens of points, values of a setting by tenths. So a sweep has a panel for each dataset with its own
range; but all panels span equally many points, so that curves can be compared across panels.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from usetta.evaluate.metrics import Interval, confidence_bins, ece
from usetta.report import style
from usetta.report.style import MEDIUM, POINTS, SMALL, WIDTH, Floats, fit, number, series_styles
from usetta.report.tables import MINUS, format_difference, format_number

ByName = Mapping[str, float | None]
Table = Mapping[str, ByName]

_ACCURACY = "accuracy, %"
_STRATEGIES = {"uniform": "uniform", "adaptive": "se"}
"""Values of β that are methods as well, and are drawn like them."""


def gains(gain: Mapping[str, Mapping[str, Interval]], baseline: str = "clip") -> Figure:
    """How many points each method gains over the baseline: points with their intervals, by dataset.

    gain[method][dataset]. Many methods on many datasets take a second row.
    """
    methods, datasets = _outer(gain, "methods"), _inner(gain.values(), "datasets")
    estimate, low, high = (
        _grid(
            {name: {key: getattr(one, bound) for key, one in row.items()} for name, row in gain.items()},
            methods,
            datasets,
        )
        for bound in ("estimate", "low", "high")
    )
    slots = len(methods) + 1
    rows = math.ceil(len(datasets) * slots * 9 / 820)  # a point has at least nine pixels
    per_row = math.ceil(len(datasets) / rows)
    width = min(WIDTH, max(4.5, 1 + 0.55 * per_row * slots))
    spread = max(per_row, (width - 0.9) / (0.8 * slots))  # nor does it have more than 0.8 inches
    slot = (width - 0.9) * POINTS / (spread * slots)
    figure = style.new_figure(width, 0.5 + 3.1 * rows)
    panels = list(figure.subplots(rows, 1, squeeze=False, sharey=True).flat)
    parts = [slice(row * per_row, (row + 1) * per_row) for row in range(rows)]
    styles = series_styles(methods)
    for axes, part in zip(panels, parts, strict=True):
        axes.axhline(0, color="black", linewidth=0.8)
        for i, method in enumerate(methods):
            places = np.arange(len(datasets[part]), dtype=np.float64) + (i - (len(methods) - 1) / 2) / slots
            axes.plot(places, estimate[i, part], **styles[method].line(), linestyle="none")
            bounds = np.stack([estimate[i, part] - low[i, part], high[i, part] - estimate[i, part]])
            _error_bars(axes, places, estimate[i, part], bounds, styles[method].colour)
            if slot >= 36:
                _write_gains(axes, places, estimate[i, part], high[i, part])
        axes.set_xlim((per_row - 1 - spread) / 2, (per_row - 1 + spread) / 2)
        axes.margins(y=0.08)
        axes.yaxis.set_major_formatter(FuncFormatter(_gain_tick))
        axes.set_ylabel(f"gain over {fit(baseline, 110, MEDIUM)}, points", fontsize=MEDIUM, parse_math=False)
        style.plain(axes)
    style.name_ticks(panels, [datasets[part] for part in parts], slot * slots)
    style.legend(figure, [Line2D([], [], **styles[method].line(), linestyle="none") for method in methods], methods)
    return style.finish(figure)


def _gain_tick(value: float, _place: int | None) -> str:
    return f"{value:+g}".replace("-", MINUS) if value else "0"


def _write_gains(axes: Any, places: Floats, gain: Floats, high: Floats) -> None:
    """Each gain above its interval."""
    for place, value, end in zip(places, gain, np.fmax(gain, high), strict=True):
        if np.isfinite(value):
            alignment = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
            axes.annotate(format_difference(value, 2), (place, end), (0, 6), fontsize=SMALL, **alignment)


def beta_strategies(accuracy: Table, *, std: Table | None = None) -> Figure:
    """Ways to weigh the weak view against the strong ones; a panel for each dataset or mean.

    accuracy[strategy][dataset]; a strategy is a fixed β (`0.5`, `β = 0.5`), `uniform`, `adaptive`, or anything else.
    A line joins the fixed ones; a dotted one shows where they are better than the adaptive β.
    """
    strategies, groups = _outer(accuracy, "strategies"), _inner(accuracy.values(), "datasets")
    values, error = _grid(accuracy, strategies, groups), _grid(std or {}, strategies, groups)
    fixed = np.array([_is_number(strategy.rpartition("=")[2]) for strategy in strategies])
    others = {int(i): _STRATEGIES.get(strategies[i], strategies[i]) for i in np.flatnonzero(~fixed)}
    styles = series_styles(others.values())
    places = np.arange(len(strategies), dtype=np.float64)
    figure, panels = _panels(groups, 2.5)
    for axes, value, err in zip(panels, values.T, error.T, strict=True):
        axes.plot(places[fixed], value[fixed], color="black", linewidth=1.2, marker="o", markersize=5)
        for i, method in others.items():
            axes.plot(places[i], value[i], **styles[method].line(8), linestyle="none")
            if strategies[i] == "adaptive" and np.isfinite(value[i]):
                axes.axhline(value[i], color=styles[method].colour, linestyle=":", linewidth=1.2, zorder=1)
        _error_bars(axes, places, value, err)
        axes.set_xlim(-0.5, len(strategies) - 0.5)
    style.name_ticks(panels, [strategies] * len(panels), _panel_width(len(panels)) / len(strategies), longest=80)
    _equal_spans(panels, list(values.T), list(error.T))
    figure.supxlabel("weight of the weak view, β", fontsize=MEDIUM)
    figure.supylabel(_ACCURACY, fontsize=MEDIUM)
    return style.finish(figure)


def gamma_sweep(
    accuracy: Mapping[float, ByName],
    *,
    std: Mapping[float, ByName] | None = None,
    default: float = 0.4,
    method: str = "use",
) -> Figure:
    """Accuracy over γ; a panel for each dataset or mean. The default γ is filled and has a dotted line.

    accuracy[γ][dataset], of `method`, which only chooses colour and marker.
    """
    gammas = sorted(_outer(accuracy, "values of γ"))
    groups = _inner((accuracy[gamma] for gamma in gammas), "datasets")
    values, error = _grid(accuracy, gammas, groups), _grid(std or {}, gammas, groups)
    series = series_styles([method])[method]
    figure, panels = _panels(groups, 2.3)
    for axes, value, err in zip(panels, values.T, error.T, strict=True):
        axes.axvline(default, color=style.DIM, linestyle=":", linewidth=1.2, zorder=1)
        axes.plot(gammas, value, **series.line(), linewidth=1.5, markerfacecolor="white")
        if default in gammas:
            axes.plot(default, value[gammas.index(default)], **series.line())
        _error_bars(axes, gammas, value, err)
        _places(axes, gammas)
    _equal_spans(panels, list(values.T), list(error.T))
    figure.supxlabel(f"γ (dotted: the default, {default:g})", fontsize=MEDIUM)
    figure.supylabel(_ACCURACY, fontsize=MEDIUM)
    return style.finish(figure)


def steps(
    accuracy: Mapping[str, Mapping[str, Mapping[int, float | None]]],
    *,
    std: Mapping[str, Mapping[str, Mapping[int, float | None]]] | None = None,
) -> Figure:
    """Accuracy over the number of tuning steps: a panel for each dataset, a line for each method.

    accuracy[dataset][method][steps]
    """
    datasets, methods = _outer(accuracy, "datasets"), _inner(accuracy.values(), "methods")
    counts = sorted(
        _inner((of_method for rows in accuracy.values() for of_method in rows.values()), "numbers of steps")
    )
    styles = series_styles(methods)
    figure, panels = _panels(datasets, 2.3)
    values = [_grid(accuracy[dataset], methods, counts) for dataset in datasets]
    errors = [_grid((std or {}).get(dataset, {}), methods, counts) for dataset in datasets]
    for axes, value, error in zip(panels, values, errors, strict=True):
        for i, method in enumerate(methods):
            axes.plot(counts, value[i], **styles[method].line(), linewidth=1.5)
            _error_bars(axes, counts, value[i], error[i], styles[method].colour)
        _places(axes, counts)
    _equal_spans(panels, values, errors)
    figure.supxlabel("steps", fontsize=MEDIUM)
    figure.supylabel(_ACCURACY, fontsize=MEDIUM)
    style.legend(figure, [Line2D([], [], **styles[method].line()) for method in methods], methods)
    return style.finish(figure)


def skips(
    ratio: ByName, before: ByName, after: ByName, *, named: tuple[str, str] = ("before tuning", "after tuning")
) -> Figure:
    """By dataset, the share of images that were not tuned on, and the accuracy before and after; all in percent.

    `named`: what the two accuracies are called; the paper's figure compares tuning on every image with skipping some.
    """
    datasets = _inner((ratio, before, after), "datasets")
    columns = [np.array([number(of.get(dataset)) for dataset in datasets]) for of in (ratio, before, after)]
    figure = style.new_figure(WIDTH, 1.4 + 0.36 * len(datasets))
    axes, beside = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    places = np.arange(len(datasets), dtype=np.float64)
    share: dict[str, Any] = {"facecolor": style.SKY, "alpha": 0.5}
    marks: tuple[dict[str, Any], ...] = (
        {"color": style.DIM, "marker": "o", "markerfacecolor": "white", "linestyle": "none", "markersize": 7},
        {"color": style.VERMILION, "marker": "D", "markeredgecolor": "white", "linestyle": "none", "markersize": 7},
    )
    known = np.isfinite(columns[0])
    axes.barh(places[known], columns[0][known], 0.62, **share)
    for values, shift, mark in zip(columns[1:], (-0.13, 0.13), marks, strict=True):
        axes.plot(values, places + shift, **mark, clip_on=False)  # at 100 % a marker reaches beyond the axes
    axes.set_yticks(places, [fit(name, 130) for name in datasets], fontsize=SMALL, parse_math=False)
    axes.set(xlim=(0, 100), ylim=(len(datasets) - 0.5, -0.5))
    axes.set_xlabel("share of images, %", fontsize=MEDIUM)
    style.plain(axes, "x")
    axes.tick_params(axis="y", length=0)
    beside.axis("off")
    kinds = (("skipped", 1, "black", "normal"), (named[0], 2, style.DIM, "normal"), (named[1], 2, "black", "bold"))
    for x, (heading, digits, colour, weight), values in zip((0.15, 0.5, 0.85), kinds, columns, strict=True):
        font = {"fontsize": SMALL, "color": colour, "ha": "center", "parse_math": False}
        beside.text(x, -0.55, style.wrap(heading, 52), **font, va="bottom")
        for place, value in zip(places, values, strict=True):
            beside.text(x, place, format_number(value, digits), **font, va="center", weight=weight)
    handles = [Patch(**share), *(Line2D([], [], **mark) for mark in marks)]
    style.legend(figure, handles, ["images skipped", *(f"accuracy {name}" for name in named)])
    return style.finish(figure)


def reliability(confidence: Mapping[str, ArrayLike], right: Mapping[str, ArrayLike], bins: int = 15) -> Figure:
    """Reliability diagrams: accuracy by confidence, a panel for each method; below, the number of images in each bin.

    Confidence in 0..1 and whether the answer was right, both (n,) by method. The hatched gap between accuracy and mean
    confidence, weighted by the share of the images, adds up to the expected calibration error (ECE).
    """
    methods = _inner((confidence, right), "methods")
    if bins < 1:
        raise ValueError(f"there must be at least one bin, not {bins}")
    columns = min(3, len(methods))
    rows = math.ceil(len(methods) / columns)
    figure = style.new_figure(WIDTH * (0.1 + 0.3 * columns), 0.8 + 3.5 * rows)
    grid = figure.subplots(2 * rows, columns, squeeze=False, height_ratios=[3, 1] * rows)
    styles = series_styles(methods)
    for i in range(rows * columns):
        above, below = grid[2 * (i // columns) : 2 * (i // columns) + 2, i % columns]
        if i < len(methods):
            name = methods[i]
            probs, hits = _answers(name, confidence.get(name, ()), right.get(name, ()))
            _reliability(above, below, probs, hits, bins, styles[name].colour)
            above.set_title(fit(name, 90, MEDIUM), fontsize=MEDIUM, loc="left", parse_math=False)
            below.set_xlabel("confidence, %", fontsize=MEDIUM)
            if i % columns == 0:
                above.set_ylabel(_ACCURACY, fontsize=MEDIUM)
                below.set_ylabel("images", fontsize=MEDIUM)
        else:
            above.remove()
            below.remove()
    gap = Patch(facecolor="none", edgecolor="#333333", hatch="////")
    diagonal = Line2D([], [], color="black", linestyle="--", linewidth=1)
    names = ["accuracy", "gap to the mean confidence", "perfect calibration"]
    style.legend(figure, [Patch(facecolor="#bbbbbb"), gap, diagonal], names)
    return style.finish(figure)


def _answers(name: str, confidence: ArrayLike, right: ArrayLike) -> tuple[Floats, Floats]:
    """Both columns of a method, without the images where one is missing."""
    probs, hits = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if not probs.size or not hits.size:
        return np.empty(0), np.empty(0)
    if probs.ndim != 1 or probs.shape != hits.shape:
        raise ValueError(f"{name}: confidence {probs.shape} and right {hits.shape} must have one value for each image")
    known = np.isfinite(probs) & np.isfinite(hits)
    return probs[known], hits[known]


def _reliability(above: Any, below: Any, probs: Floats, hits: Floats, bins: int, colour: str) -> None:
    error = float(ece(hits, np.ones_like(hits), probs, bins))
    bin_of = confidence_bins(probs, bins)
    counts = np.bincount(bin_of, minlength=bins)
    filled = np.flatnonzero(counts)
    width = 100 / bins
    middles = width * (filled + 0.5)
    accuracy, mean = (100 * np.bincount(bin_of, of, minlength=bins)[filled] / counts[filled] for of in (hits, probs))
    above.bar(middles, accuracy, width, color=colour, edgecolor="white", linewidth=0.6)
    above.bar(
        middles, np.abs(accuracy - mean), 0.86 * width, bottom=np.minimum(accuracy, mean),
        facecolor="none", edgecolor="#333333", hatch="////", linewidth=0.8,
    )  # fmt: skip
    above.plot([0, 100], [0, 100], color="black", linestyle="--", linewidth=1)
    below.bar(width * (np.arange(bins) + 0.5), counts, width, color=colour, edgecolor="white", linewidth=0.6)
    for axes in (above, below):
        style.plain(axes)
        axes.set(xlim=(0, 100), xticks=[0, 25, 50, 75, 100])
    above.set(ylim=(0, 100), yticks=[0, 25, 50, 75, 100])
    above.tick_params(labelbottom=False)
    above.set_title(f"ECE {error:.2f} %" if len(probs) else "no images", fontsize=SMALL, loc="right")
    below.set_ylim(0, max(1, 1.05 * counts.max()))
    below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def cost(seconds: ByName, accuracy: ByName) -> Figure:
    """Accuracy against seconds per image, by method; the axis is logarithmic if some take over ten times longer."""
    return against_accuracy(seconds, accuracy, "seconds per image", may_be_logarithmic=True)


def against_accuracy(values: ByName, accuracy: ByName, title: str, *, may_be_logarithmic: bool = False) -> Figure:
    """A point for each method: what `values` has for it, and its accuracy."""
    methods = [method for method in values if method in accuracy]
    if not methods:
        raise ValueError(f"no method with both {title} and an accuracy")
    figure = style.new_figure(WIDTH, 4.6)
    axes = figure.subplots()
    x, y = (np.array([number(of[method]) for method in methods]) for of in (values, accuracy))
    known = np.isfinite(x) & np.isfinite(y)
    styles = series_styles(methods)
    for i in np.flatnonzero(known):
        axes.plot(x[i], y[i], **styles[methods[i]].line(8), linestyle="none", clip_on=False)
    axes.set_xlabel(title, fontsize=MEDIUM)
    axes.set_ylabel(_ACCURACY, fontsize=MEDIUM)
    style.plain(axes, "both")
    if may_be_logarithmic and known.any() and 0 < 10 * x[known].min() < x[known].max():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(0.12)
    style.finish(figure)
    style.label_points(axes, x[known], y[known], [fit(methods[i], 130) for i in np.flatnonzero(known)])
    return figure


def _outer(table: Mapping[Any, Any], what: str) -> list[Any]:
    if not table:
        raise ValueError(f"no {what} to show")
    return list(table)


def _inner(tables: Iterable[Mapping[Any, Any]], what: str) -> list[Any]:
    """All keys, in the order in which they are met."""
    return _outer({key: None for table in tables for key in table}, what)


def _grid(table: Mapping[Any, Mapping[Any, float | None]], rows: Sequence[Any], columns: Sequence[Any]) -> Floats:
    """(rows, columns), NaN where there is no number."""
    return np.array([[number(table.get(row, {}).get(column)) for column in columns] for row in rows])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _panels(names: Sequence[str], height: float) -> tuple[Figure, list[Any]]:
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = style.new_figure(_panels_width(columns), 0.6 + height * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        style.plain(axes)
        title = fit(name, 0.75 * _panel_width(len(names)), MEDIUM)
        axes.set_title(title, fontsize=MEDIUM, parse_math=False)
    for axes in list(grid.flat)[len(names) :]:
        axes.remove()
    return figure, list(grid.flat)[: len(names)]


def _panels_width(columns: int) -> float:
    return WIDTH * (0.0, 0.5, 0.75, 1.0)[columns]


def _panel_width(count: int) -> float:
    """In points, without the numbers of the axis."""
    columns = min(3, count)
    return POINTS * ((_panels_width(columns) - 0.4) / columns - 0.5)


def _equal_spans(panels: Sequence[Any], values: Sequence[Floats], errors: Sequence[Floats]) -> None:
    """Center every panel on its values and error bars, and let all panels span equally many points."""
    lows = [value - np.nan_to_num(error) for value, error in zip(values, errors, strict=True)]
    highs = [value + np.nan_to_num(error) for value, error in zip(values, errors, strict=True)]
    ranges = [
        (float(np.nanmin(low)), float(np.nanmax(high))) if np.isfinite(low).any() else (math.nan, math.nan)
        for low, high in zip(lows, highs, strict=True)
    ]
    span = max([high - low for low, high in ranges if high > low], default=0.0)
    half = 0.65 * max(span, 0.5)  # at least half a point, or noise would fill a panel
    for axes, (low, high) in zip(panels, ranges, strict=True):
        middle = (low + high) / 2
        if math.isfinite(middle):
            axes.set_ylim(middle - half, middle + half)
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        else:
            axes.set_yticks([])


def _error_bars(axes: Any, x: ArrayLike, y: Floats, error: Floats, colour: str = "black") -> None:
    """Around `y` (n,); `error` is (n,), or (2, n) for what is below and above."""
    known = np.isfinite(y) & np.isfinite(error).reshape(-1, len(y)).all(axis=0)
    if known.any():
        bars = {"ecolor": colour, "elinewidth": 1, "capsize": 2, "zorder": 2.5}
        axes.errorbar(np.asarray(x)[known], y[known], error[..., known], fmt="none", **bars)


def _places(axes: Any, places: Sequence[float]) -> None:
    """The x axis around the places, with a number at each, unless they are too close to be read."""
    span = places[-1] - places[0] or 1
    axes.set_xlim(places[0] - 0.08 * span, places[-1] + 0.08 * span)
    if min(np.diff(places), default=span) >= 0.1 * span:
        axes.set_xticks(places, [f"{place:g}" for place in places])
