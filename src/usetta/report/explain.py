"""The figure of `usetta explain`: what the views saw, which ones counted, and what that did to the answer."""

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from usetta.classifier import Explanation, Prediction

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
CHOSEN, WEAK, ZERO_SHOT, METHOD, OTHER = "#009E73", "#0072B2", "#999999", "#D55E00", "#bbbbbb"
_COLUMNS = 8


def draw(explanation: "Explanation", shown: int) -> Figure:
    """A figure: above, the weak view and the probabilities; below, the `shown` most certain strong views."""
    answer = explanation.prediction
    strong = 1 + np.argsort(answer.entropies[1:], kind="stable")[:shown]
    rows = -(-len(strong) // _COLUMNS)
    figure = Figure(figsize=(14, 4.2 + 2.1 * rows), dpi=110, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[4.2, 2.1 * rows])  # type: ignore[misc]

    picture, bars, ranks = above.subplots(1, 3, width_ratios=[1.0, 1.5, 1.3])
    _show(picture, explanation.views[0], WEAK, 3)
    picture.set_title("weak view: the picture itself", fontsize=11, color=WEAK)
    picture.set_xlabel(_caption(answer, 0), fontsize=10)
    _draw_bars(bars, answer, explanation.method)
    _draw_ranks(ranks, answer)

    below.suptitle(
        f"the {len(strong)} most certain of {len(answer.entropies) - 1} strong views; "
        f"framed: the {len(answer.chosen)} that count",
        fontsize=11,
    )
    for axes in (grid := below.subplots(rows, _COLUMNS, squeeze=False)).flat:
        axes.axis("off")
    for axes, view in zip(grid.flat, strong, strict=False):
        chosen = view in answer.chosen
        _show(axes, explanation.views[view], CHOSEN if chosen else OTHER, 4 if chosen else 1)
        axes.set_xlabel(_caption(answer, view), fontsize=8, color="black" if chosen else "#555555")
    return figure


def _show(axes: Any, view: Any, colour: str, line: float) -> None:
    axes.axis("on")
    axes.imshow(view)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=colour, linewidth=line)


def _caption(answer: "Prediction", view: int) -> str:
    label = textwrap.shorten(answer.view_labels[view], 24, placeholder="…")
    return f"{label}\nentropy {answer.entropies[view]:.2f}"


def _draw_bars(axes: Any, answer: "Prediction", method: str, top: int = 5) -> None:
    """The classes that either answer finds likely, zero-shot beside the method."""
    order = np.argsort(-np.maximum(answer.probs, answer.zero_shot), kind="stable")[:top][::-1]
    places = np.arange(len(order))
    series = [(0.2, answer.zero_shot, "zero-shot", ZERO_SHOT)]
    if method != "clip":
        series.append((-0.2, answer.probs, method.upper(), METHOD))
    for offset, probs, name, colour in series:
        bars = axes.barh(places + offset, probs[order], height=0.38, color=colour, label=name)
        axes.bar_label(bars, labels=[f"{p:.0%}" for p in probs[order]], padding=3, fontsize=9)
    axes.set_yticks(places, [textwrap.shorten(answer.classes[i], 28, placeholder="…") for i in order])
    axes.set(xlim=(0, 1.12), xticks=[0, 0.5, 1], xticklabels=["0", "50 %", "100 %"])
    axes.set_title(f"answer: {textwrap.shorten(answer.label, 32, placeholder='…')}", fontsize=11)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_ranks(axes: Any, answer: "Prediction") -> None:
    """All views by entropy: where the weak one stands decides its weight."""
    order = np.argsort(answer.entropies, kind="stable")
    colours = [WEAK if v == 0 else CHOSEN if v in answer.chosen else OTHER for v in order]
    axes.bar(np.arange(len(order)), answer.entropies[order], color=colours, width=0.9)
    axes.set(xlabel="views, most certain first", ylabel="entropy (nats)", xticks=[])
    weight = f"weight of the weak view: β = {answer.beta:.2f}"
    rank = "" if answer.delta is None else f"\nmore certain than {answer.delta:.0%} of the strong views"
    axes.set_title(weight + rank, fontsize=11)
    for colour, name in ((WEAK, "weak view"), (CHOSEN, "strong views that count"), (OTHER, "other strong views")):
        axes.bar(0, 0, color=colour, label=name)
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
