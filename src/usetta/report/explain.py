"""The figure of `usetta explain`: what the views saw, which ones counted, and what that did to the answer.

A frame marks the strong views that count in the answer. Where none does, because the weak view answers alone, or where
all do, because each has a weight of its own, it marks those that the prompt was tuned on.
"""

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from usetta.prediction import Explanation, Prediction

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COUNTS, TUNED_ON, WEAK, OTHER = "#009E73", "#CC79A7", "#0072B2", "#bbbbbb"
ZERO_SHOT, BEFORE, METHOD = "#999999", "#E69F00", "#D55E00"
_COLUMNS = 8


@dataclass(frozen=True)
class _ViewMarks:
    """The strong views that stand out, and what for."""

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
            sentence = f"framed: {_some(counting & shown, counting)} that count{also}"
            return cls(frozenset(counting), COUNTS, "strong views that count", sentence)
        who = "every view counts by its weight" if counting else "the weak view answers alone"
        if not tuned_on:
            return cls(frozenset(), OTHER, "strong views", who)
        beside = " with the weak view" if 0 in answer.tuned_on else ""
        sentence = f"framed: {_some(tuned_on & shown, tuned_on)} that the prompt was tuned on{beside}; {who}"
        return cls(frozenset(tuned_on), TUNED_ON, "strong views tuned on", sentence)

    def of_view(self, view: int) -> str:
        return WEAK if view == 0 else self.colour if view in self.views else OTHER


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


def _show(axes: Any, view: Any, colour: str, line: float) -> None:
    axes.axis("on")
    axes.imshow(view)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=colour, linewidth=line)


def _caption(answer: "Prediction", view: int) -> str:
    weight = f", weight {answer.weights[view]:.1%}" if answer.beta is None else ""
    return f"{_plain(answer.view_labels[view], 24)}\nentropy {answer.entropies[view]:.2f}{weight}"


def _draw_bars(axes: Any, answer: "Prediction", method: str, top: int = 5) -> None:
    """The classes that any of the answers finds likely: zero-shot, before tuning, and what the method says."""
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
    title = f"answer: {_plain(answer.label, 40)}"
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
    """All views by entropy, where the weak one stands decides its weight; or the weights that do not follow from it."""
    order = np.argsort(answer.entropies, kind="stable")
    each_its_own = answer.beta is None
    heights = answer.weights if each_its_own else answer.entropies
    axes.bar(np.arange(len(order)), heights[order], color=[marks.of_view(view) for view in order], width=0.9)
    axes.set(xlabel="views, most confident first", xticks=[])
    axes.set_ylabel("weight in the answer" if each_its_own else "entropy (nats)")
    axes.set_ylim(0, 1.35 * float(heights.max()) or 1)  # room for the legend
    if each_its_own:
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


def _some(some: set[int], everything: set[int]) -> str:
    return f"the {len(some)}" if some == everything else f"{len(some)} of the {len(everything)}"


def _plain(text: str, length: int) -> str:
    """`text`, cut to `length`; a dollar stays one where matplotlib would begin a formula."""
    short = text if len(text) <= length else text[: length - 1] + "…"
    return short.replace("$", r"\$")
