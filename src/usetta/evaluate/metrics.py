"""How good are the answers? Metrics on plain NumPy arrays, from a few numbers per image.

No metric needs the probabilities of all classes. These columns, one value per image, are enough (`columns` makes the
first seven from probabilities; without a true class, its label is −1):

    label             the true class                            prediction        the answered class
    confidence        the answered class's probability          true_probability  the true class's probability
    rank              classes ranked before the true one        sum_of_squares    Σ_c p_c², for the Brier score
    entropy           of the probabilities, in nats             energy            logsumexp of the logits behind them
    skipped           whether tuning was left out               seconds           time the image took

A column is (..., n): n images, behind any leading axes such as one per seed; a metric takes the last axis away.
Shares are in percent, as in the paper's tables. Without images a metric is NaN, never an error.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

IMAGENET = ("imagenet", "imagenet-a", "imagenet-v2", "imagenet-r", "imagenet-sketch")
FINE_GRAINED = (
    *("dtd", "flowers102", "caltech101", "aircraft", "pets"),
    *("ucf101", "cars", "eurosat", "sun397", "food101"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "in&o": IMAGENET,
    "ood": IMAGENET[1:],
    "fgvc": FINE_GRAINED,
    "avg": ("in&o", "fgvc"),
}
"""The paper's means and their parts. `avg` is the mean of two means, so a fine-grained dataset counts less in it."""


def members_of(column: str) -> list[str]:
    """The datasets behind a mean, or behind a mean of means; a dataset stands for itself."""
    return [name for member in GROUPS[column] for name in members_of(member)] if column in GROUPS else [column]


_SMALLEST = float(np.finfo(np.float32).tiny)
"""Columns are kept in single precision; a probability that vanished there counts as its smallest normal number."""


def columns(probs: ArrayLike, labels: ArrayLike) -> dict[str, NDArray[Any]]:
    """The columns that follow from probabilities (..., n, C) and labels (..., n)."""
    p, label = np.asarray(probs, dtype=np.float64), np.asarray(labels)
    prediction = p.argmax(axis=-1)
    label = np.broadcast_to(label, prediction.shape)
    true = np.take_along_axis(p, label[..., None], axis=-1) * (label[..., None] >= 0)
    # Among equals the class that is listed first comes first, as in argmax: rank 0 means that the answer is right.
    before = (p > true) | ((p == true) & (np.arange(p.shape[-1]) < label[..., None]))
    return {
        "label": label,
        "prediction": prediction,
        "confidence": p.max(axis=-1),
        "true_probability": true[..., 0],
        "rank": before.sum(axis=-1),
        "sum_of_squares": (p**2).sum(axis=-1),
        "entropy": -(p * np.log(np.maximum(p, _SMALLEST))).sum(axis=-1),
    }


def top1(label: ArrayLike, prediction: ArrayLike) -> Floats:
    """Accuracy in percent."""
    return 100 * _mean(np.equal(label, prediction))


def top5(rank: ArrayLike) -> Floats:
    """Percent of images whose true class is among the five most probable."""
    return 100 * _mean(np.less(rank, 5))


def ece(label: ArrayLike, prediction: ArrayLike, confidence: ArrayLike, bins: int = 15) -> Floats:
    """Expected calibration error in percent: how far confidence is from accuracy, over bins of equal width.

    A bin includes its lower edge but not its upper one; the last includes 1.
    """
    probs = _probability(confidence, "confidence")
    gap = np.equal(label, prediction) - probs
    bin_of = confidence_bins(probs, bins)
    # |accuracy − confidence| of a bin, weighted with its share of the images, is |Σ gap| / n.
    gaps = [np.abs(_mean(np.where(bin_of == b, gap, 0.0))) for b in range(bins)]
    return 100 * np.asarray(np.sum(gaps, axis=0))


def confidence_bins(confidence: Floats, bins: int) -> NDArray[np.int64]:
    """The bin of each confidence in 0..1, as `ece` counts them."""
    return np.minimum((confidence * bins).astype(np.int64), bins - 1)


def ece20(label: ArrayLike, prediction: ArrayLike, confidence: ArrayLike) -> Floats:
    """The same over 20 bins that include their upper edge, as O-TPT and others compute it."""
    probs = _probability(confidence, "confidence")
    gap = np.equal(label, prediction) - probs
    bin_of = np.maximum(np.ceil(probs * 20).astype(np.int64) - 1, 0)
    gaps = [np.abs(_mean(np.where(bin_of == b, gap, 0.0))) for b in range(20)]
    return 100 * np.asarray(np.sum(gaps, axis=0))


def adaptive_ece(label: ArrayLike, prediction: ArrayLike, confidence: ArrayLike, bins: int = 15) -> Floats:
    """Calibration error in percent over bins of equally many images."""
    probs = _probability(confidence, "confidence")
    gap = np.take_along_axis(np.equal(label, prediction) - probs, np.argsort(probs, axis=-1, kind="stable"), axis=-1)
    parts = np.array_split(gap, bins, axis=-1)
    n = gap.shape[-1]
    gaps = [np.abs(part.sum(axis=-1)) / n for part in parts] if n else [np.full(gap.shape[:-1], np.nan)]
    return 100 * np.asarray(np.sum(gaps, axis=0))


def risk_coverage(label: ArrayLike, prediction: ArrayLike, confidence: ArrayLike) -> Floats:
    """Percent of wrong answers (..., n) among the 1, 2, … n most confident; of equally confident ones the first."""
    probs = _probability(confidence, "confidence")
    wrong = np.not_equal(label, prediction)
    ranked = np.take_along_axis(wrong, np.argsort(-probs, axis=-1, kind="stable"), axis=-1)
    risk: Floats = 100 * np.cumsum(ranked, axis=-1) / np.arange(1, ranked.shape[-1] + 1)
    return risk


def aurc(label: ArrayLike, prediction: ArrayLike, confidence: ArrayLike) -> Floats:
    """Area under the risk–coverage curve in percent: the mean risk over all coverages."""
    return _mean(risk_coverage(label, prediction, confidence))


def selective_accuracy(label: ArrayLike, prediction: ArrayLike, confidence: ArrayLike, coverage: float = 0.8) -> Floats:
    """Accuracy in percent of the most confident 80 % of the answers."""
    risk = risk_coverage(label, prediction, confidence)
    n = risk.shape[-1]
    return 100 - risk[..., math.ceil(coverage * n) - 1] if n else np.full(risk.shape[:-1], np.nan)


def auroc(known: ArrayLike, other: ArrayLike) -> float:
    """Percent of pairs in which an image of the classes has the higher score, ties counting half."""
    inside, outside = np.sort(np.asarray(known, dtype=np.float64)), np.asarray(other, dtype=np.float64)
    if not len(inside) or not len(outside):
        return math.nan
    below = np.searchsorted(inside, outside, side="left")
    ties = np.searchsorted(inside, outside, side="right") - below
    return float(100 * (1 - (below + ties / 2).mean() / len(inside)))


def fpr95(known: ArrayLike, other: ArrayLike) -> float:
    """Percent of images of other classes that pass a threshold which 95 % of the images of the classes pass."""
    inside, outside = np.sort(np.asarray(known, dtype=np.float64)), np.asarray(other, dtype=np.float64)
    if not len(inside) or not len(outside):
        return math.nan
    threshold = inside[len(inside) - math.ceil(0.95 * len(inside))]
    return float(100 * (outside >= threshold).mean())


OOD_SCORES: dict[str, tuple[str, int]] = {"msp": ("confidence", 1), "entropy": ("entropy", -1), "energy": ("energy", 1)}
"""Scores that are high for images of the classes: a column and its sign."""


def changed(predictions: ArrayLike) -> float:
    """Percent of answers that differ between two runs, the mean over all pairs of runs (runs, n)."""
    answers = np.asarray(predictions)
    pairs = [(a, b) for a in range(len(answers)) for b in range(a)]
    if not pairs or not answers.shape[-1]:
        return math.nan
    return float(100 * np.mean([(answers[a] != answers[b]).mean() for a, b in pairs]))


def nll(true_probability: ArrayLike) -> Floats:
    """Negative log-likelihood of the true class, in nats."""
    return _mean(-np.log(np.clip(_probability(true_probability, "true_probability"), _SMALLEST, 1.0)))


def brier(true_probability: ArrayLike, sum_of_squares: ArrayLike) -> Floats:
    """Brier score over all classes, Σ_c (p_c − [c is true])² = 1 − 2 p_true + Σ_c p_c²: 0 is perfect, 2 the worst."""
    true = _probability(true_probability, "true_probability")
    return _mean(1 - 2 * true + _probability(sum_of_squares, "sum_of_squares"))


def skip_ratio(skipped: ArrayLike) -> Floats:
    """Percent of images that were not tuned on because their views already agreed."""
    return 100 * _mean(np.asarray(skipped, dtype=bool))


def seconds_per_image(seconds: ArrayLike) -> Floats:
    """Mean time of an image."""
    return _mean(np.asarray(seconds))


METRICS: dict[str, tuple[Callable[..., Floats], tuple[str, ...]]] = {
    "top1": (top1, ("label", "prediction")),
    "top5": (top5, ("rank",)),
    "ece": (ece, ("label", "prediction", "confidence")),
    "ece20": (ece20, ("label", "prediction", "confidence")),
    "aece": (adaptive_ece, ("label", "prediction", "confidence")),
    "aurc": (aurc, ("label", "prediction", "confidence")),
    "acc80": (selective_accuracy, ("label", "prediction", "confidence")),
    "nll": (nll, ("true_probability",)),
    "brier": (brier, ("true_probability", "sum_of_squares")),
    "skip_ratio": (skip_ratio, ("skipped",)),
    "seconds_per_image": (seconds_per_image, ("seconds",)),
}
"""Every metric with the columns it needs."""


def measure(stored: Mapping[str, ArrayLike]) -> dict[str, Floats]:
    """All metrics whose columns are `stored`."""
    return {
        name: metric(*(stored[column] for column in needed))
        for name, (metric, needed) in METRICS.items()
        if all(column in stored for column in needed)
    }


def group_means(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The means of `GROUPS` from values by dataset; None where the value of a dataset is missing (None or NaN)."""
    known = {name: value for name, value in values.items() if value is not None and not math.isnan(value)}
    means: dict[str, float | None] = {}
    for group, members in GROUPS.items():
        parts = [known[member] for member in members if member in known]
        means[group] = mean = sum(parts) / len(parts) if len(parts) == len(members) else None
        if mean is not None:
            known[group] = mean  # GROUPS lists a mean of means after its parts
    return means


@dataclass(frozen=True)
class Spread:
    """A value over several runs."""

    mean: float
    std: float | None
    """None if the runs are too few to have one."""
    runs: int


def over_seeds(values: Sequence[float], *, sample: bool = False) -> Spread:
    """Mean and standard deviation over runs with different seeds.

    The population's deviation by default: the paper's numbers fit that of two runs. `sample` divides by one less.
    """
    runs = np.asarray(values, dtype=np.float64)
    if runs.ndim != 1 or not len(runs):
        raise ValueError(f"expected one value per seed, at least one, not an array of shape {runs.shape}")
    std = float(runs.std(ddof=1 if sample else 0)) if len(runs) > 1 else None
    return Spread(float(runs.mean()), std, len(runs))


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its confidence interval."""

    estimate: float
    low: float
    high: float


def accuracy_difference(
    right: ArrayLike, other: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """By how many points one method is more accurate than another on the same images, with a bootstrap interval.

    `right` and `other`: whether each answer was right, (n,) or (seeds, n). Images are resampled, never single runs:
    runs of one image are not independent. A resample only counts how often each value of the difference occurs, so
    it is drawn as such (multinomial), which gives the same distribution as drawing n images.
    """
    ours, theirs = (np.atleast_2d(np.asarray(hits, dtype=np.float64)) for hits in (right, other))
    if ours.ndim != 2 or ours.shape[-1] != theirs.shape[-1]:
        raise ValueError(f"both methods must have answered the same images, not {ours.shape} and {theirs.shape}")
    difference = ours.mean(axis=0) - theirs.mean(axis=0)
    n = len(difference)
    if not n:
        return Interval(math.nan, math.nan, math.nan)
    values, counts = np.unique(difference, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(n, counts / n, size=resamples)
    low, high = np.quantile(drawn @ values / n, [(1 - level) / 2, (1 + level) / 2])
    return Interval(100 * float(difference.mean()), 100 * float(low), 100 * float(high))


def metric_difference(
    name: str,
    ours: Mapping[str, ArrayLike],
    theirs: Mapping[str, ArrayLike],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """By how much a metric of one method differs from that of another on the same images, with a bootstrap interval.

    Columns are (runs, n), of equally many runs. Images are resampled, the same ones for both methods.
    """
    metric, needed = METRICS[name]
    both = [[np.atleast_2d(np.asarray(columns[column])) for column in needed] for columns in (ours, theirs)]
    n = both[0][0].shape[-1]
    if any(column.shape[-1] != n for columns in both for column in columns):
        raise ValueError("both methods must have answered the same images")
    if not n:
        return Interval(math.nan, math.nan, math.nan)

    def difference(images: NDArray[np.int64]) -> Floats:
        mine, other = (metric(*(column[:, images] for column in columns)).mean(axis=0) for columns in both)
        return np.asarray(mine - other)

    rng = np.random.default_rng(seed)
    at_once = max(1, 2**21 // (n * len(both[0][0])))  # arrays of a few tens of megabytes
    drawn = [
        difference(rng.integers(n, size=(min(at_once, resamples - first), n))) for first in range(0, resamples, at_once)
    ]
    low, high = np.quantile(np.concatenate(drawn), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(difference(np.arange(n)[None])[0]), float(low), float(high))


def ood_difference(
    score: Callable[[ArrayLike, ArrayLike], float],
    ours: tuple[ArrayLike, ArrayLike],
    theirs: tuple[ArrayLike, ArrayLike],
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """The same for `auroc` or `fpr95` of two methods, each by scores of images of the classes and of others."""
    pairs = [tuple(np.asarray(part, dtype=np.float64) for part in method) for method in (ours, theirs)]
    sizes = [len(part) for part in pairs[0]]
    if [len(part) for part in pairs[1]] != sizes:
        raise ValueError("both methods must have answered the same images")
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(resamples):
        chosen = [rng.integers(size, size=size) for size in sizes]
        mine, other = (score(*(part[images] for part, images in zip(pair, chosen, strict=True))) for pair in pairs)
        drawn.append(mine - other)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(score(*pairs[0]) - score(*pairs[1]), float(low), float(high))


def mcnemar(right: ArrayLike, other: ArrayLike) -> float:
    """Exact two-sided p-value of McNemar's test that two methods are equally accurate, from one run of each, (n,)."""
    ours, theirs = np.asarray(right, dtype=bool), np.asarray(other, dtype=bool)
    if ours.ndim != 1 or ours.shape != theirs.shape:
        raise ValueError(f"expected one run of each method on the same images, not {ours.shape} and {theirs.shape}")
    only_ours, only_theirs = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
    n, term, tail = only_ours + only_theirs, 1, 0
    for k in range(min(only_ours, only_theirs) + 1):  # in whole numbers: exact for any number of images
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << n))


def _mean(values: NDArray[Any]) -> Floats:
    if values.shape[-1]:
        return np.asarray(values.mean(axis=-1, dtype=np.float64))
    return np.full(values.shape[:-1], np.nan)


def _probability(values: ArrayLike, column: str) -> Floats:
    """`values` in double precision; rounding may put them a little outside of 0..1, a mistake much further."""
    probs = np.asarray(values, dtype=np.float64)
    if not ((probs >= -1e-5) & (probs <= 1 + 1e-5)).all():
        raise ValueError(f"{column} must lie between 0 and 1, but ranges from {probs.min()} to {probs.max()}")
    return np.clip(probs, 0.0, 1.0)
