"""When an answer is "none of these": its score lies below a threshold.

Three scores, each from 0 (a guess) to 1 (no doubt): `confidence`, the probability of the best class; `margin`, what it
is ahead of the second; `entropy`, 1 − H / ln C. A calibration (`usetta calibrate`) also holds a temperature T, by which
the confidence c of C classes becomes the share of answers that are right at it,

    c^(1/T) / (c^(1/T) + (C − 1)^(1 − 1/T) · (1 − c)^(1/T)),

which is a softmax at temperature T whose other classes share the rest evenly. More cannot be fitted on a run, which
keeps the confidence of each answer, not the probabilities of all classes.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

NONE_OF_THESE = "none of these"
"""What a rejected answer is called where there is room for a label only."""

Score = Literal["confidence", "entropy", "margin"]
_VERSION = 1


@dataclass(frozen=True)
class Rejection:
    """Answers with a score below `below` are rejected."""

    below: float
    by: Score = "confidence"
    temperature: float | None = None
    """Of a calibration; the score is then the calibrated confidence."""

    def __post_init__(self) -> None:
        if self.by not in get_args(Score):
            raise ValueError(f"reject must be one of {', '.join(get_args(Score))}, not {self.by!r}")
        if not 0 <= self.below <= 1:
            raise ValueError(f"reject_below must lie in 0..1, not {self.below}")
        if self.temperature is not None and self.by != "confidence":
            raise ValueError(f"a calibration is about the confidence: leave out reject={self.by!r}")

    def score(self, probs: NDArray[Any]) -> float:
        """The score of an answer with these probabilities (C,)."""
        if len(probs) == 1:
            return 1.0
        if self.by == "margin":
            second, best = np.sort(probs.astype(np.float64))[-2:]
            return float(best - second)
        if self.by == "entropy":
            likely = probs[probs > 0].astype(np.float64)
            return float(1 + (likely * np.log(likely)).sum() / np.log(len(probs)))
        if self.temperature is not None:
            return float(calibrated(probs.max(), len(probs), self.temperature))
        return float(probs.max())

    def rejects(self, probs: NDArray[Any]) -> bool:
        """Whether an answer with these probabilities (C,) is rejected."""
        return self.score(probs) < self.below


def calibrated(confidence: ArrayLike, classes: ArrayLike, temperature: float) -> NDArray[np.float64]:
    """The calibrated confidence of answers among so many `classes`."""
    return np.asarray(1 / (1 + np.exp(-_logit(confidence, classes, temperature))))


def _logit(confidence: ArrayLike, classes: ArrayLike, temperature: float) -> NDArray[np.float64]:
    c = np.clip(np.asarray(confidence, np.float64), 1e-12, 1 - 1e-12)
    others = np.maximum(np.asarray(classes, np.float64) - 1, 1)
    return np.asarray((np.log(c) - np.log1p(-c) + np.log(others)) / temperature - np.log(others))


@dataclass(frozen=True)
class Calibration:
    """What `usetta calibrate` has found out about a model and a method, as it is in its file."""

    model: str
    fingerprint: str
    method: str
    temperature: float
    reject_below: float
    accuracy: float
    """Share of right answers among those that are kept, on the images that it was fitted on."""
    kept: float
    """Share of the answers that are kept."""
    images: int

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps({"usetta_calibration": _VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read the file; what is none is a ValueError."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("usetta_calibration") != _VERSION:
                raise ValueError("it is of another version")
            return cls(**content)
        except OSError as error:
            raise ValueError(f"cannot read the calibration {os.fspath(path)}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not a calibration, which `usetta calibrate` writes ({error})"
            ) from None

    def rejection(self, model: str, fingerprint: str, method: str, below: float | None = None) -> Rejection:
        """The rejection for that model and method, which must be those that it was fitted on."""
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"the calibration was fitted on the model {self.model}, and {model} is another, or the same in another "
                "precision"
            )
        if method != self.method:
            raise ValueError(f"the calibration was fitted on the method {self.method}, not on {method}")
        return Rejection(self.reject_below if below is None else below, temperature=self.temperature)


def make_rejection(
    reject: Score | None,
    below: float | None,
    calibration: "Calibration | str | os.PathLike[str] | None",
    *,
    model: str,
    fingerprint: str,
    method: str,
) -> Rejection | None:
    """What the arguments of `Classifier` ask for; None if nothing is to be rejected."""
    if calibration is not None:
        if reject not in (None, "confidence"):
            raise ValueError(f"a calibration is about the confidence: leave out reject={reject!r}")
        known = calibration if isinstance(calibration, Calibration) else Calibration.load(calibration)
        return known.rejection(model, fingerprint, method, below)
    if below is None:
        if reject is not None:
            raise ValueError(f"reject={reject!r} needs reject_below, the score below which answers are rejected")
        return None
    return Rejection(below, reject or "confidence")


def fit(confidence: ArrayLike, right: ArrayLike, classes: ArrayLike, accuracy: float) -> tuple[float, float]:
    """The temperature and the lowest threshold at which the answers that are kept reach this accuracy.

    confidence, right, classes: (n,), of each answer its probability, whether it is right, among how many classes.
    """
    c, correct, among = (np.asarray(column, np.float64) for column in (confidence, right, classes))
    if not len(c):
        raise ValueError("there are no answers to fit on")

    def loss(inverse: float) -> float:
        """The mean negative log-likelihood that the answers are right or wrong."""
        return float(np.logaddexp(0, (1 - 2 * correct) * _logit(c, among, 1 / inverse)).mean())

    low, high = 0.05, 20.0  # of 1/T, in which the loss is convex: a ternary search finds its minimum
    while high - low > 1e-4 * low:
        third = (high - low) / 3
        low, high = (low, high - third) if loss(low + third) < loss(high - third) else (low + third, high)
    temperature = 2 / (low + high)
    score = calibrated(c, among, temperature)
    order = np.argsort(-score, kind="stable")
    reached = np.cumsum(correct[order]) / np.arange(1, len(c) + 1)
    # Answers with equal scores are kept or rejected together.
    last = np.append(score[order][1:] < score[order][:-1], True)
    enough = np.flatnonzero((reached >= accuracy) & last)
    if not len(enough):
        raise ValueError(
            f"no threshold keeps answers of which {accuracy:.0%} are right: at best it is "
            f"{reached[last].max():.0%}; ask for less with --accuracy"
        )
    best = int(enough[-1])
    return temperature, 0.0 if best == len(c) - 1 else float(score[order][best])
