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

TITLES = {"clip": "Zero-shot", "se": "SE", "use": "USE"}
_COLOURS = ("#8a8f98", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7a5195")
"""Okabe and Ito's, which people with any kind of colour vision can distinguish; grey is zero-shot's."""
_TOP = 6
_THUMBNAIL = 160


@dataclass(frozen=True)
class PageComparison:
    """What several methods answer for one image."""

    model: str
    explanations: list[Explanation]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        first = self.explanations[0].prediction
        answers = [{"method": shown.method} | shown.prediction.to_dict(top=None) for shown in self.explanations]
        for answer in answers:
            del answer["source"]
        return {"source": first.source, "model": self.model, "classes": list(first.classes), "answers": answers}


def title(method: str) -> str:
    """A method as people call it."""
    head, colon, settings = method.partition(":")
    return TITLES.get(head, head.upper()) + colon + settings


def welcome(pace: float | None) -> str:
    """What the page shows before the first answer; `pace` is the time for a view in seconds."""
    return _render("welcome.html", titles=TITLES, pace=_pace(pace))


def problem(message: str) -> str:
    """A sentence instead of an answer."""
    sentence = message[:1].upper() + message[1:]
    return _render("problem.html", message=sentence if sentence.endswith((".", "?", "!")) else sentence + ".")


def answer(comparison: PageComparison, pace: float | None) -> str:
    """The whole answer, the files to download included."""
    answers = [_Answer.of(explanation, i) for i, explanation in enumerate(comparison.explanations)]
    first = comparison.explanations[0]
    richest = max(comparison.explanations, key=_richness)
    return _render(
        "answer.html",
        pace=_pace(pace),
        model=comparison.model,
        answers=answers,
        same=len({answer.label for answer in answers}) == 1,
        rows=_rows(answers),
        scales=_scales(answers),
        views=_views(first, answers),
        doubt=float(np.log(len(first.prediction.classes))),
        json=_data_url("application/json", json.dumps(comparison.as_dict(), indent=1, ensure_ascii=False).encode()),
        figure=_data_url("image/jpeg", _figure(richest)),
        figure_of=title(richest.method),
    )


@dataclass(frozen=True)
class _Answer:
    """The answer of one method, as the page shows it."""

    title: str
    colour: str
    prediction: Prediction
    recipe: Recipe

    @classmethod
    def of(cls, explanation: Explanation, number: int) -> "_Answer":
        colour = _COLOURS[number % len(_COLOURS)]
        return cls(title(explanation.method), colour, explanation.prediction, methods.get(explanation.method))

    @property
    def label(self) -> str:
        return self.prediction.label

    @property
    def marks(self) -> frozenset[int]:
        """The strong views that count in the answer, or that it was tuned on where every view or none counts."""
        prediction = self.prediction
        counting = {int(view) for view in np.flatnonzero(prediction.weights[1:] > 0) + 1}
        if prediction.beta is None or not counting:
            return frozenset(view for view in prediction.tuned_on if view > 0)
        return frozenset(counting)

    @property
    def scale(self) -> "_Scale | None":
        """Where β lies in its range, if it depends on the image."""
        prediction, gamma = self.prediction, self.recipe.gamma
        if self.recipe.readout != "se" or prediction.beta is None or prediction.delta is None:
            return None
        return _Scale(0.5 - gamma / 2, 0.5 + gamma / 2, prediction.beta, prediction.delta)

    @property
    def changes(self) -> list[tuple[str, float, float]]:
        """Classes with their probabilities before and after tuning, the likeliest three."""
        prediction = self.prediction
        if prediction.before is None or prediction.skipped:
            return []
        order = np.argsort(-np.maximum(prediction.before, prediction.probs), kind="stable")[:3]
        return [(prediction.classes[i], float(prediction.before[i]), float(prediction.probs[i])) for i in order]


@dataclass(frozen=True)
class _Scale:
    least: float
    most: float
    beta: float
    delta: float

    @property
    def position(self) -> float:
        """Percent of the way from the least to the most."""
        width = self.most - self.least
        return 50.0 if width <= 0 else 100 * min(1.0, max(0.0, (self.beta - self.least) / width))


def _rows(answers: list[_Answer]) -> list[tuple[str, list[float]]]:
    """The classes that any method finds likely, with the probability that each gives it."""
    probs = np.stack([answer.prediction.probs for answer in answers])
    order = np.argsort(-probs.max(axis=0), kind="stable")[:_TOP]
    return [(answers[0].prediction.classes[i], [float(p) for p in probs[:, i]]) for i in order]


def _scales(answers: list[_Answer]) -> list[tuple[_Scale, list[str]]]:
    """Weights of the weak view, each with the methods that give it."""
    scales: dict[_Scale, list[str]] = {}
    for answer in answers:
        if answer.scale is not None:
            scales.setdefault(answer.scale, []).append(answer.title)
    return list(scales.items())


def _views(explanation: Explanation, answers: list[_Answer]) -> list[dict[str, Any]]:
    """The weak view, then the strong ones, most confident first."""
    prediction = explanation.prediction
    order = [0, *(1 + int(view) for view in np.argsort(prediction.entropies[1:], kind="stable"))]
    return [
        {
            "weak": view == 0,
            "image": _thumbnail(explanation.views[view]),
            "label": prediction.view_labels[view],
            "entropy": float(prediction.entropies[view]),
            "marks": [answer for answer in answers if view in answer.marks],
        }
        for view in order
    ]


def _richness(explanation: Explanation) -> tuple[bool, bool, bool]:
    """The figure shows the method with most to explain: tuned before not tuned, views before none."""
    prediction = explanation.prediction
    return prediction.before is not None, prediction.beta != 1, explanation.method == "use"


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
