"""Figures of views: why an image got its answer (`usetta explain`), and a grid of several images with their views.

In the figure of `usetta explain`, a frame marks the strong views that count in the answer. Where none does, because the
weak view answers alone, or where all do, because each has a weight of its own, it marks those that the prompt was tuned
on.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from usetta.rejection import NONE_OF_THESE
from usetta.report import style
from usetta.report.tables import format_number

if TYPE_CHECKING:
    from usetta.prediction import Explanation, Prediction

COUNTS, TUNED_ON, WEAK, OTHER = style.GREEN, style.PURPLE, style.BLUE, "#bbbbbb"
ZERO_SHOT, BEFORE, METHOD = style.GREY, style.ORANGE, style.VERMILION
_COLUMNS = 8


@dataclass(frozen=True)
class _ViewMarks:
    """The strong views that are framed, and why."""

    views: frozenset[int]
    colour: str
    legend: str
    sentence: str

    @classmethod
    def of(cls, answer: "Prediction", shown: set[int]) -> "_ViewMarks":
        counting = {view for view in range(1, len(answer.weights)) if answer.weights[view] > 0}
        tuned_on = {view for view in answer.tuned_on if view > 0}
        if counting and answer.beta is not None:
            confident = {1 + int(v) for v in np.argsort(answer.entropies[1:], kind="stable")[: len(counting)]}
            also = ", in tuning and in the answer" if counting == tuned_on else ""
            if counting != confident:
                also = ", chosen after tuning"
            sentence = f"framed: {_count(counting & shown, counting)} that count{also}"
            return cls(frozenset(counting), COUNTS, "strong views that count", sentence)
        who = "every view counts by its weight" if counting else "the weak view answers alone"
        if not tuned_on:
            return cls(frozenset(), OTHER, "strong views", who)
        beside = " with the weak view" if 0 in answer.tuned_on else ""
        sentence = f"framed: {_count(tuned_on & shown, tuned_on)} that the prompt was tuned on{beside}; {who}"
        return cls(frozenset(tuned_on), TUNED_ON, "strong views tuned on", sentence)

    def of_view(self, view: int) -> str:
        return WEAK if view == 0 else self.colour if view in self.views else OTHER


@dataclass(frozen=True)
class LabelledView:
    """A view of an image, with the class that the model gives it."""

    image: NDArray[np.uint8]
    """(H, W, 3)"""
    label: str
    entropy: float


@dataclass(frozen=True)
class ViewGridRow:
    """An image and some of its views."""

    label: str
    """The true class."""
    views: Sequence[LabelledView]
    """The weak one, then strong ones, the most confident first."""


def draw(explanation: "Explanation", shown: int) -> Figure:
    """A figure: above, the weak view and the probabilities; below, the `shown` most confident strong views."""
    answer = explanation.prediction
    strong = [1 + int(view) for view in np.argsort(answer.entropies[1:], kind="stable")[:shown]]
    marks = _ViewMarks.of(answer, set(strong))
    rows = -(-len(strong) // _COLUMNS)
    heights = [4.4, 2.1 * rows] if rows else [4.4]
    figure = Figure(figsize=(14, sum(heights)), dpi=110, layout="constrained")
    above, *below = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat

    image, bars, ranks = above.subplots(1, 3, width_ratios=[1.0, 1.4, 1.3])
    _show(image, explanation.views[0], WEAK, 3)
    image.set_title("weak view: the image itself", fontsize=11, color=WEAK)
    image.set_xlabel(_caption(answer, 0), fontsize=10)
    _draw_bars(bars, answer, explanation.method)
    _draw_ranks(ranks, answer, marks)
    if below:
        _draw_views(below[0], explanation, strong, marks)
    return figure


def view_grid(rows: Sequence[ViewGridRow]) -> Figure:
    """A row for each image: its weak view and strong ones, with the label that each alone gets and its entropy."""
    if not rows:
        raise ValueError("no images to show")
    for i, row in enumerate(rows):
        if not len(row.views):
            raise ValueError(f"image {i + 1} ({row.label}) has no views")
    columns = max(len(row.views) for row in rows)
    side = min(2.1, (style.WIDTH - 0.5) / columns)
    figure = style.new_figure(0.5 + side * columns, 0.3 + (side + 0.6) * len(rows), "compressed")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    width = style.POINTS * (side - 0.15)
    for panels, row in zip(grid, rows, strict=True):
        for axes, view in zip(panels, row.views, strict=False):
            right = view.label == row.label
            _show(axes, view.image, style.GREEN if right else style.VERMILION, 4)
            # A sign as well as a colour, for people who cannot distinguish the colours.
            caption = style.wrap(f"{'✓' if right else '✗'} {view.label}", width)
            entropy = f"entropy {format_number(view.entropy, 2)}"
            axes.set_xlabel(f"{caption}\n{entropy}", fontsize=style.SMALL, parse_math=False)
        for axes in panels[len(row.views) :]:
            axes.axis("off")
        label = style.wrap(f"true: {row.label}", width, style.MEDIUM)
        panels[0].set_ylabel(label, fontsize=style.MEDIUM, parse_math=False)
    for i, axes in enumerate(grid[0]):
        axes.set_title("weak view" if i == 0 else f"strong view {i}", fontsize=style.MEDIUM)
    return style.finish(figure)


def _draw_views(part: Any, explanation: "Explanation", strong: list[int], marks: _ViewMarks) -> None:
    answer = explanation.prediction
    when = " before tuning" if answer.tuned_on else ""
    most = f"the {len(strong)} most confident of {len(answer.entropies) - 1} strong views{when}"
    part.suptitle(f"{most}; {marks.sentence}", fontsize=11)
    for axes in (grid := part.subplots(-(-len(strong) // _COLUMNS), _COLUMNS, squeeze=False)).flat:
        axes.axis("off")
    for axes, view in zip(grid.flat, strong, strict=False):
        marked = view in marks.views
        _show(axes, explanation.views[view], marks.of_view(view), 4 if marked else 1)
        axes.set_xlabel(_caption(answer, view), fontsize=8, color="black" if marked else "#555555")


def _show(axes: Any, view: Any, colour: str, frame: float) -> None:
    axes.axis("on")
    axes.imshow(view)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=colour, linewidth=frame)


def _caption(answer: "Prediction", view: int) -> str:
    weight = f", weight {answer.weights[view]:.1%}" if answer.beta is None else ""
    return f"{_plain(answer.view_labels[view], 24)}\nentropy {answer.entropies[view]:.2f}{weight}"


def _draw_bars(axes: Any, answer: "Prediction", method: str, top: int = 5) -> None:
    """The classes that any of the answers finds likely: zero-shot, before tuning, and the method's own."""
    series = _series(answer, method)
    order = np.argsort(-np.max([probs for probs, _, _ in series], axis=0), kind="stable")[:top][::-1]
    places = np.arange(len(order))
    height = 0.8 / len(series)
    for i, (probs, name, colour) in enumerate(series):
        offset = height * ((len(series) - 1) / 2 - i)
        bars = axes.barh(places + offset, probs[order], height=0.95 * height, color=colour, label=name)
        axes.bar_label(bars, labels=[f"{p:.0%}" for p in probs[order]], padding=3, fontsize=9)
    axes.set_yticks(places, [_plain(answer.classes[i], 24) for i in order])
    axes.set(xlim=(0, 1.12), xticks=[0, 0.5, 1], xticklabels=["0", "50 %", "100 %"])
    title = f"answer: {f'{NONE_OF_THESE}, closest: ' if answer.rejected else ''}{_plain(answer.label, 40)}"
    if answer.skipped is not None:
        title += "\n" + _plain(textwrap.fill(answer.reason, 64, max_lines=2, placeholder=" …"), 130)
    axes.set_title(title, fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=len(series), fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _series(answer: "Prediction", method: str) -> list[tuple[Any, str, str]]:
    """Probabilities (C,), name and colour of each answer; equal ones are shown once."""
    head, colon, settings = method.partition(":")
    name = _plain(head.upper() + colon + settings, 22)
    zero_shot = (answer.zero_shot, "zero-shot", ZERO_SHOT)
    if answer.before is None or answer.skipped:
        return [zero_shot] if answer.beta == 1 else [zero_shot, (answer.probs, name, METHOD)]
    after = (answer.probs, f"{name}, tuned", METHOD)
    if np.allclose(answer.before, answer.zero_shot, atol=1e-6):
        return [(answer.zero_shot, "zero-shot (before tuning)", ZERO_SHOT), after]
    return [zero_shot, (answer.before, "before tuning", BEFORE), after]


def _draw_ranks(axes: Any, answer: "Prediction", marks: _ViewMarks) -> None:
    """All views by entropy, since the weak view's rank decides its weight; or their weights, where they have some."""
    order = np.argsort(answer.entropies, kind="stable")
    weighted = answer.beta is None  # every view has a weight of its own, so β and the entropy rank mean nothing
    heights = answer.weights if weighted else answer.entropies
    axes.bar(np.arange(len(order)), heights[order], color=[marks.of_view(view) for view in order], width=0.9)
    axes.set(xlabel="views, most confident first", xticks=[])
    axes.set_ylabel("weight in the answer" if weighted else "entropy (nats)")
    axes.set_ylim(0, 1.35 * float(heights.max()) or 1)  # leaves space for the legend
    if weighted:
        title = f"weight of the weak view: {answer.weights[0]:.1%}\nthe mean of all views: {1 / len(order):.1%}"
    elif answer.beta == 1 or answer.delta is None:
        title = "the weak view answers alone"
    else:
        as_shown = np.isclose(answer.delta, (answer.entropies[1:] > answer.entropies[0]).mean())
        than = f"more confident than {answer.delta:.0%} of the"
        rank = f"{than} strong views" if as_shown else f"after tuning {than} rest"
        title = f"weight of the weak view: β = {answer.beta:.2f}\n{rank}"
    axes.set_title(title, fontsize=11)
    kinds = {"weak view": WEAK, marks.legend: marks.colour}
    if marks.views:
        kinds["other strong views"] = OTHER
    for name, colour in kinds.items():
        axes.bar(0, 0, color=colour, label=name)
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _count(shown: set[int], marked: set[int]) -> str:
    return f"the {len(shown)}" if shown == marked else f"{len(shown)} of the {len(marked)}"


def _plain(text: str, length: int) -> str:
    """`text`, cut to `length`; a dollar stays one where matplotlib would begin a formula."""
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.replace("$", r"\$")
