"""An answer as HTML: probabilities side by side, what each method did, and the views by how confident they are.

Templates escape every value, and names also braces and dollars: Gradio's HTML component has a template language.
"""

import base64
import io
import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from usetta import methods
from usetta.methods.recipe import Recipe
from usetta.prediction import Explanation, Prediction
from usetta.serve.page.compare import Comparison

TITLES = {"clip": "Zero-shot", "se": "SE", "use": "USE"}
_COLOURS = ("#8a8f98", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7a5195")
"""Okabe and Ito's, which people with any kind of colour vision can tell apart; grey is zero-shot's."""
_TOP = 6
_THUMBNAIL = 160


def title(method: str) -> str:
    """A method as people call it."""
    head, colon, settings = method.partition(":")
    return TITLES.get(head, head.upper()) + colon + settings


def welcome(pace: float | None) -> str:
    """What stands there before the first answer; `pace` is the time for a view in seconds."""
    return _render("welcome.html", titles=TITLES, pace=_pace(pace))


def problem(message: str) -> str:
    """A sentence instead of an answer."""
    sentence = message[:1].upper() + message[1:]
    return _render("problem.html", message=sentence if sentence.endswith((".", "?", "!")) else sentence + ".")


def answer(comparison: Comparison, pace: float | None) -> str:
    """The whole answer, the files to download included."""
    told = [_Told.of(each, place) for place, each in enumerate(comparison.explanations)]
    first = comparison.explanations[0]
    richest = max(comparison.explanations, key=_richness)
    return _render(
        "answer.html",
        pace=_pace(pace),
        model=comparison.model,
        told=told,
        same=len({each.label for each in told}) == 1,
        rows=_rows(told),
        scales=_scales(told),
        views=_views(first, told),
        doubt=float(np.log(len(first.prediction.classes))),
        json=_data_url("application/json", json.dumps(comparison.as_dict(), indent=1, ensure_ascii=False).encode()),
        figure=_data_url("image/jpeg", _figure(richest)),
        figure_of=title(richest.method),
    )


@dataclass(frozen=True)
class _Told:
    """What one method said, as the page tells it."""

    title: str
    colour: str
    prediction: Prediction
    recipe: Recipe

    @classmethod
    def of(cls, explanation: Explanation, place: int) -> "_Told":
        colour = _COLOURS[place % len(_COLOURS)]
        return cls(title(explanation.method), colour, explanation.prediction, methods.get(explanation.method))

    @property
    def label(self) -> str:
        return self.prediction.label

    @property
    def marks(self) -> frozenset[int]:
        """The strong views that count in the answer, or that it was tuned on where every view or none counts."""
        answer = self.prediction
        counting = {int(view) for view in np.flatnonzero(answer.weights[1:] > 0) + 1}
        if answer.beta is None or not counting:
            return frozenset(view for view in answer.tuned_on if view > 0)
        return frozenset(counting)

    @property
    def scale(self) -> "_Scale | None":
        """Where β lies between what it can be, if it follows from the image."""
        answer, gamma = self.prediction, self.recipe.gamma
        if self.recipe.readout != "se" or answer.beta is None or answer.delta is None:
            return None
        return _Scale(0.5 - gamma / 2, 0.5 + gamma / 2, answer.beta, answer.delta)

    @property
    def changes(self) -> list[tuple[str, float, float]]:
        """Classes with their probabilities before and after tuning, the likeliest three."""
        answer = self.prediction
        if answer.before is None or answer.skipped:
            return []
        order = np.argsort(-np.maximum(answer.before, answer.probs), kind="stable")[:3]
        return [(answer.classes[i], float(answer.before[i]), float(answer.probs[i])) for i in order]


@dataclass(frozen=True)
class _Scale:
    least: float
    most: float
    beta: float
    delta: float

    @property
    def place(self) -> float:
        """Percent of the way from the least to the most."""
        width = self.most - self.least
        return 50.0 if width <= 0 else 100 * min(1.0, max(0.0, (self.beta - self.least) / width))


def _rows(told: list[_Told]) -> list[tuple[str, list[float]]]:
    """The classes that any method finds likely, with the probability that each gives it."""
    probs = np.stack([each.prediction.probs for each in told])
    order = np.argsort(-probs.max(axis=0), kind="stable")[:_TOP]
    return [(told[0].prediction.classes[i], [float(p) for p in probs[:, i]]) for i in order]


def _scales(told: list[_Told]) -> list[tuple[_Scale, list[str]]]:
    """Weights of the weak view, each with the methods that give it."""
    found: dict[_Scale, list[str]] = {}
    for each in told:
        if each.scale is not None:
            found.setdefault(each.scale, []).append(each.title)
    return list(found.items())


def _views(explanation: Explanation, told: list[_Told]) -> list[dict[str, Any]]:
    """The weak view, then the strong ones, most confident first."""
    found = explanation.prediction
    order = [0, *(1 + int(view) for view in np.argsort(found.entropies[1:], kind="stable"))]
    return [
        {
            "weak": view == 0,
            "image": _thumbnail(explanation.views[view]),
            "label": found.view_labels[view],
            "entropy": float(found.entropies[view]),
            "marks": [each for each in told if view in each.marks],
        }
        for view in order
    ]


def _richness(explanation: Explanation) -> tuple[bool, bool, bool]:
    """Of methods, the figure is of the one with most to tell: tuned before not tuned, views before none."""
    answer = explanation.prediction
    return answer.before is not None, answer.beta != 1, explanation.method == "use"


def _figure(explanation: Explanation) -> bytes:
    buffer = io.BytesIO()
    explanation.figure().savefig(buffer, format="jpeg", pil_kwargs={"quality": 88})
    return buffer.getvalue()


def _thumbnail(view: Any) -> Markup:
    buffer = io.BytesIO()
    image = Image.fromarray(view)
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    image.save(buffer, "JPEG", quality=80)
    return _data_url("image/jpeg", buffer.getvalue())


def _data_url(kind: str, content: bytes) -> Markup:
    return Markup(f"data:{kind};base64,{base64.b64encode(content).decode()}")  # noqa: S704 - base64 has nothing to escape


def _pace(seconds_per_view: float | None) -> str:
    return "" if seconds_per_view is None else f"{seconds_per_view:.3f}"


def _render(name: str, **values: Any) -> str:
    return _templates().get_template(name).render(values)


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("usetta.serve.page", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    templates.filters["name"] = _name
    templates.filters["percent"] = _percent
    return templates


def _percent(p: float) -> str:
    if 0 < p < 0.0005:
        return "<0.1 %"
    return f"{100 * p:.1f} %" if 0 < p < 0.1 or 0.9 < p < 0.9995 else f"{100 * p:.0f} %"


def _name(text: str) -> Markup:
    """A name that somebody typed, in its own direction of writing."""
    escaped = str(Markup.escape(text))
    for character in "${}`\\":
        escaped = escaped.replace(character, f"&#{ord(character)};")
    return Markup(f"<bdi>{escaped}</bdi>")  # noqa: S704 - escaped above
