"""What is known about one image: the prediction with its reasons, and an explanation that can be drawn."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from usetta.images import ImageSource
from usetta.rejection import NONE_OF_THESE, Rejection
from usetta.views import ViewRecipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ImageOrigin:
    """An image as it was given, and the recipe of its views."""

    source: ImageSource | Callable[[], ImageSource]
    views: ViewRecipe


@dataclass(frozen=True, repr=False)
class Prediction:
    """The answer for one image, and why."""

    source: str
    """Where the image came from: its path, or what kind of object it was."""
    classes: tuple[str, ...]
    probs: np.ndarray[Any, Any]
    """(C,): probability of each class, in the order of `classes`."""
    zero_shot: np.ndarray[Any, Any]
    """(C,): what the weak view alone says before anything is tuned, that is zero-shot CLIP."""
    before: np.ndarray[Any, Any] | None
    """(C,): what the method would have said without tuning; None where it tunes nothing."""
    skipped: bool | None
    """Whether tuning was left out because the views already agreed; None where the method tunes nothing."""
    tuned_on: tuple[int, ...]
    """The views that the loss looked at in the first step; none where nothing was tuned."""
    entropies: np.ndarray[Any, Any]
    """(N,): entropy in nats of each view's own prediction before tuning; view 0 is the weak one, the image itself."""
    view_labels: tuple[str, ...]
    """(N,): the class each view would choose by itself before tuning."""
    chosen: tuple[int, ...]
    """The most confident strong views, most confident first; `weights` says whether they count in the answer."""
    delta: float | None
    """Share of the strong views that are less confident than the weak one when β is set; None without strong views."""
    beta: float | None
    """Weight of the weak view against the chosen ones; None where views are weighed one by one, as R-TPT does."""
    weights: np.ndarray[Any, Any]
    """(N,): the weight of each view in the answer; they sum to 1."""
    warnings: tuple[str, ...] = ()
    """Why the answer should not be trusted, if there are reasons, see `usetta.answer_warnings`."""
    rejection: Rejection | None = None
    """When an answer counts as none of the classes; None if it never does."""
    remembered: int | None = None
    """Earlier images that the method had seen; None where it has no memory. Then `before` is its answer without one."""
    origin: ImageOrigin | None = field(default=None, compare=False)
    """What the views were made of, so that they can be shown."""

    def __repr__(self) -> str:
        """Short, since a notebook prints it: the best classes, and how they came about."""
        best = ", ".join(f"{label} {probability:.1%}" for label, probability in self.ranked(3))
        rejected = f"{NONE_OF_THESE}, closest: " if self.rejected else ""
        return f"<Prediction {self.source}: {rejected}{best}; {self.reason}>"

    def _repr_html_(self) -> str:
        from usetta.report.notebook import prediction_html

        return prediction_html(self)

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.classes[int(self.probs.argmax())]

    @property
    def confidence(self) -> float:
        """The probability of `label`."""
        return float(self.probs.max())

    @property
    def rejected(self) -> bool | None:
        """Whether the image is probably none of the classes, so that `label` is only the closest; None if not asked."""
        return None if self.rejection is None else self.rejection.rejects(self.probs)

    @property
    def calibrated(self) -> float | None:
        """The share of answers with this confidence that are right, by a calibration; None without one."""
        if self.rejection is None or self.rejection.temperature is None:
            return None
        return self.rejection.score(self.probs)

    @property
    def reason(self) -> str:
        """Why this answer, in one plain sentence."""
        if self.skipped:
            enough = "the views already agree" if len(self.weights) > 1 else "the original image alone is enough"
            return f"skipped: {enough}"
        if self.remembered is not None and self.before is not None:
            old = f"{self.classes[int(self.before.argmax())]} {float(self.before.max()):.1%}"
            return f"after {self.remembered} earlier images; without them: {old}"
        if self.before is not None:
            old = self.classes[int(self.before.argmax())]
            new = "" if old == self.label else f"{self.label} "
            return f"tuned: {old} {float(self.before.max()):.1%} -> {new}{self.confidence:.1%}"
        if self.beta is None:
            return f"{int((self.weights > 0).sum())} of {len(self.weights)} views count, each with a weight of its own"
        if self.beta == 1:
            return "zero-shot: the original image only"
        confident = (
            f"its {len(self.chosen)} most confident views" if len(self.chosen) > 1 else "its most confident view"
        )
        return f"the image itself counts {self.beta:.1%}, {confident} {1 - self.beta:.1%}"

    def ranked(self, top: int | None = None) -> list[tuple[str, float]]:
        """The classes by falling probability, at most `top` of them."""
        order = np.argsort(-self.probs, kind="stable")[:top]
        return [(self.classes[i], float(self.probs[i])) for i in order]

    def to_dict(self, top: int | None = 5) -> dict[str, Any]:
        """The answer as plain values, for JSON; `top` classes are ranked, all if it is None."""
        return {
            "source": self.source,
            "label": self.label,
            "probability": round(self.confidence, 6),
            "rejected": self.rejected,
            "calibrated": None if self.calibrated is None else round(self.calibrated, 6),
            "ranked": [{"label": label, "probability": round(p, 6)} for label, p in self.ranked(top)],
            "zero_shot": self._best(self.zero_shot),
            "why": {
                "reason": self.reason,
                "views": len(self.entropies),
                "skipped": self.skipped,
                "before": None if self.before is None else self._best(self.before),
                "tuned_on": list(self.tuned_on),
                "delta": None if self.delta is None else round(self.delta, 6),
                "beta": None if self.beta is None else round(self.beta, 6),
                "chosen_views": list(self.chosen),
                "chosen_labels": [self.view_labels[i] for i in self.chosen],
                "entropies": [round(float(h), 6) for h in self.entropies],
                "weights": [round(float(w), 6) for w in self.weights],
                "remembered": self.remembered,
            },
            "warnings": list(self.warnings),
        }

    def to_row(self) -> dict[str, Any]:
        """The answer as one row of a table: `pandas.DataFrame(p.to_row() for p in predictions)`."""
        zero_shot = self._best(self.zero_shot)
        return {
            "source": self.source,
            "label": self.label,
            "probability": self.confidence,
            "rejected": self.rejected,
            "calibrated": self.calibrated,
            "zero_shot_label": zero_shot["label"],
            "zero_shot_probability": float(self.zero_shot.max()),
            "views": len(self.entropies),
            "beta": self.beta,
            "delta": self.delta,
            "skipped": self.skipped,
            "warnings": "; ".join(self.warnings),
        }

    def _best(self, probs: np.ndarray[Any, Any]) -> dict[str, Any]:
        best = int(probs.argmax())
        return {"label": self.classes[best], "probability": round(float(probs[best]), 6)}


@dataclass(frozen=True, repr=False)
class Explanation:
    """A prediction together with the views it was made from."""

    prediction: Prediction
    method: str
    views: np.ndarray[Any, Any]
    """(N, S, S, 3), uint8: the views as images, the weak one first."""

    def __repr__(self) -> str:
        source, label = self.prediction.source, self.prediction.label
        return f"<Explanation of {source} by {self.method}: {label}, {len(self.views)} views>"

    def _repr_html_(self) -> str:
        from usetta.report.notebook import explanation_html

        return explanation_html(self)

    def figure(self, shown: int = 24) -> "Figure":
        """The weak view, the `shown` most confident strong views and the probabilities, as a matplotlib figure."""
        from usetta.report.explain import draw

        return draw(self, shown)

    def save(self, path: str | os.PathLike[str], shown: int = 24) -> None:
        """Write the figure to `path`; the suffix chooses the format (PNG, SVG, PDF, JPEG)."""
        self.figure(shown).savefig(path)


class Comparison(list[Explanation]):
    """What several methods say about one image; in a notebook they stand one below the other."""

    def _repr_html_(self) -> str:
        return "<hr>".join(explanation._repr_html_() for explanation in self)
