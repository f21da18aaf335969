"""Figures about trust and streams: from numbers by method to a matplotlib `Figure`, in the style of `figures`."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from usetta.evaluate.metrics import aurc, risk_coverage
from usetta.report import style
from usetta.report.figures import ByName, against_accuracy
from usetta.report.style import MEDIUM, WIDTH, fit, series_styles


def calibration(accuracy: ByName, ece: ByName) -> Figure:
    """Accuracy against expected calibration error, by method: the best are at the top left."""
    return against_accuracy(ece, accuracy, "expected calibration error (15 bins), %")


def risk_coverage_curves(confidence: Mapping[str, ArrayLike], right: Mapping[str, ArrayLike]) -> Figure:
    """Wrong answers among the most confident, by the share that is answered, a curve for each method."""
    figure = style.new_figure(WIDTH, 4.6)
    axes = figure.subplots()
    styles = series_styles(list(confidence))
    handles, names = [], []
    for method, probs in confidence.items():
        hits = np.asarray(right[method], dtype=np.float64)
        risk = risk_coverage(np.ones_like(hits), hits, probs)
        coverage = 100 * np.arange(1, len(risk) + 1) / max(1, len(risk))
        places = np.unique(np.linspace(0, max(0, len(risk) - 1), min(len(risk), 500)).astype(int))
        axes.plot(coverage[places], risk[places], **styles[method].line(5), linewidth=1.4, markevery=0.15)
        area = float(aurc(np.ones_like(hits), hits, probs))
        handles.append(Line2D([], [], **styles[method].line(5)))
        names.append(f"{method} ({area:.1f})")
    axes.set(xlim=(0, 100))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("coverage: share of the images that is answered, %", fontsize=MEDIUM)
    axes.set_ylabel("wrong answers, %", fontsize=MEDIUM)
    style.plain(axes)
    style.legend(figure, handles, names)
    return style.finish(figure)


def over_the_stream(right: Mapping[str, ArrayLike], window: int) -> Figure:
    """Accuracy of the last `window` images at each place of the stream, by method: right (orders, n) in that order."""
    figure = style.new_figure(WIDTH, 4.6)
    axes = figure.subplots()
    styles = series_styles(list(right))
    for method, hits in right.items():
        mean = np.atleast_2d(np.asarray(hits, dtype=np.float64)).mean(axis=0)
        total = np.concatenate([[0.0], mean.cumsum()])
        width = max(1, min(window, len(mean)))
        smooth = 100 * (total[width:] - total[:-width]) / width
        places = np.arange(width, len(mean) + 1)
        axes.plot(places, smooth, **styles[method].line(5), linewidth=1.4, markevery=0.15)
    axes.set_xlabel("images so far", fontsize=MEDIUM)
    axes.set_ylabel(f"accuracy of the last {window} images, %", fontsize=MEDIUM)
    style.plain(axes)
    style.legend(figure, [Line2D([], [], **styles[method].line(5)) for method in right], list(right))
    return style.finish(figure)


def order_sensitivity(accuracy: Mapping[str, ArrayLike]) -> Figure:
    """Accuracy in each order of the stream, by method: a point for an order, a bar for their mean."""
    figure = style.new_figure(WIDTH, 0.9 + 0.35 * len(accuracy))
    axes = figure.subplots()
    styles = series_styles(list(accuracy))
    for place, (method, values) in enumerate(accuracy.items()):
        points = np.asarray(values, dtype=np.float64)
        axes.plot(points, np.full(len(points), place), **styles[method].line(6), linestyle="none", alpha=0.7)
        axes.plot([points.mean()] * 2, [place - 0.3, place + 0.3], color="black", linewidth=1.2)
    axes.set_yticks(range(len(accuracy)), [fit(method, 130) for method in accuracy])
    axes.set_ylim(len(accuracy) - 0.5, -0.5)
    axes.set_xlabel("accuracy, %, a point for each order and the mean", fontsize=MEDIUM)
    style.plain(axes, "x")
    return style.finish(figure)
