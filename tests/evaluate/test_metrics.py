import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from usetta.evaluate import metrics


def random_answers(n: int, classes: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Probabilities (n, classes), some of them nearly confident, and labels (n,)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes)) * rng.choice([1.0, 10.0], size=(n, 1))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True), rng.integers(classes, size=n)


def naive(probs: NDArray[np.float64], labels: NDArray[np.int64]) -> dict[str, float]:
    """The metrics of probabilities (n, C), image by image."""
    n = len(labels)
    right = five = loglik = squares = 0.0
    answers: list[tuple[float, float]] = []
    bins: list[list[tuple[float, float]]] = [[] for _ in range(15)]
    finer: list[list[tuple[float, float]]] = [[] for _ in range(20)]
    for p, label in zip(probs.tolist(), labels.tolist(), strict=True):
        order = sorted(range(len(p)), key=lambda c: (-p[c], c))
        right += order[0] == label
        five += label in order[:5]
        loglik += math.log(p[label])
        squares += sum((p[c] - (c == label)) ** 2 for c in range(len(p)))
        answers.append((float(order[0] == label), p[order[0]]))
        bins[min(int(p[order[0]] * 15), 14)].append(answers[-1])
        finer[max(math.ceil(p[order[0]] * 20) - 1, 0)].append(answers[-1])
    ranked = sorted(answers, key=lambda answer: answer[1])
    size, more = divmod(n, 15)
    ends = np.cumsum([size + (b < more) for b in range(15)])
    equal = [ranked[end - size - (b < more) : end] for b, end in enumerate(ends)]
    risks = [100 * (1 - sum(hit for hit, _ in ranked[n - k :]) / k) for k in range(1, n + 1)]

    def error(bins: list[list[tuple[float, float]]]) -> float:
        return 100 * sum(abs(sum(hit - sure for hit, sure in b)) / n for b in bins)

    return {
        "top1": 100 * right / n,
        "top5": 100 * five / n,
        "ece": error(bins),
        "ece20": error(finer),
        "aece": error(equal),
        "aurc": sum(risks) / n,
        "acc80": 100 - risks[math.ceil(0.8 * n) - 1],
        "nll": -loglik / n,
        "brier": squares / n,
    }


@pytest.mark.parametrize("classes", [2, 3, 7, 40])
def test_metrics_from_columns_equal_a_loop_over_images_and_classes(classes: int) -> None:
    probs, labels = random_answers(200, classes, seed=classes)
    assert metrics.measure(metrics.columns(probs, labels)) == pytest.approx(naive(probs, labels), rel=1e-12)


def test_leading_axes_are_kept() -> None:
    runs = [random_answers(50, 6, seed=seed) for seed in range(3)]
    labels = runs[0][1]
    stacked = metrics.measure(metrics.columns(np.stack([probs for probs, _ in runs]), labels))
    for i, (probs, _) in enumerate(runs):
        assert {name: values[i] for name, values in stacked.items()} == pytest.approx(naive(probs, labels), rel=1e-12)


def test_only_the_columns_that_a_metric_needs_are_asked_for() -> None:
    assert metrics.measure({"label": [1, 2], "prediction": [1, 0]}) == {"top1": 50.0}
    assert metrics.measure({"skipped": [True, True, False, True], "seconds": [0.5, 1.5, 1.0, 1.0]}) == {
        "skip_ratio": 75.0,
        "seconds_per_image": 1.0,
    }
    assert metrics.top5([0, 4, 5, 999]) == 50.0


def test_calibration_of_a_known_example() -> None:
    # Bin 14 holds 0.95 (right) and 1.0 (wrong): |1 − 1.95| / 4; bin 7 holds 0.5 twice (one right): 0.
    assert metrics.ece([0, 0, 0, 0], [0, 1, 0, 1], [0.95, 1.0, 0.5, 0.5]) == pytest.approx(100 * 0.95 / 4)
    # 0.6 is the lower edge of bin 9, so 0.59 does not share its bin and the two gaps do not cancel.
    assert metrics.ece([0, 0], [0, 1], [0.6, 0.59]) == pytest.approx(100 * (0.4 + 0.59) / 2)
    assert metrics.ece([0, 0], [0, 1], [0.6, 0.59], bins=1) == pytest.approx(100 * 0.19 / 2)


def test_equal_probabilities_rank_in_the_order_of_the_classes() -> None:
    stored = metrics.columns([[0.25] * 4, [0.25] * 4, [0.4, 0.2, 0.0, 0.4]], [0, 2, 3])
    assert stored["prediction"].tolist() == [0, 0, 0]
    assert stored["rank"].tolist() == [0, 2, 1]


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 1000))
def test_rank_zero_and_a_right_answer_are_the_same(n: int, classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    probs = rng.integers(1, 4, size=(n, classes)).astype(float)  # many ties
    stored = metrics.columns(probs / probs.sum(axis=1, keepdims=True), rng.integers(classes, size=n))
    assert ((stored["rank"] == 0) == (stored["prediction"] == stored["label"])).all()


def test_without_images_metrics_are_nan() -> None:
    result = metrics.measure(metrics.columns(np.zeros((0, 3)), np.zeros(0, dtype=int)) | {"skipped": [], "seconds": []})
    assert set(result) == set(metrics.METRICS)
    assert all(np.isnan(value) for value in result.values())
    assert np.isnan(metrics.top1(np.zeros((2, 0)), np.zeros((2, 0)))).tolist() == [True, True]
    assert math.isnan(metrics.accuracy_difference([], []).low)
    assert metrics.mcnemar([], []) == 1.0


def test_with_one_class_every_answer_is_right_and_confident() -> None:
    result = metrics.measure(metrics.columns(np.ones((4, 1)), [0, 0, 0, 0]))
    perfect = {"top1": 100.0, "top5": 100.0, "acc80": 100.0}
    assert result == perfect | dict.fromkeys(("ece", "ece20", "aece", "aurc", "nll", "brier"), 0.0)


def test_confident_and_wrong_is_the_worst_and_stays_finite() -> None:
    result = metrics.measure(metrics.columns([[1.0, 0.0], [1.0, 0.0]], [1, 1]))
    assert (result["top1"], result["ece"], result["brier"]) == (0.0, 100.0, 2.0)
    assert result["nll"] == pytest.approx(-math.log(np.finfo(np.float32).tiny))


def test_a_confidence_of_zero_or_a_rounding_above_one_falls_into_the_outer_bins() -> None:
    assert metrics.ece([0, 0], [1, 0], [0.0, np.float32(1.0000001)]) == 0.0


@pytest.mark.parametrize("bad", [1.1, -0.1, math.nan])
def test_what_is_no_probability_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1"):
        metrics.ece([0, 0], [0, 0], [0.5, bad])
    with pytest.raises(ValueError, match="true_probability must lie between 0 and 1"):
        metrics.nll([bad])


def test_the_deviation_over_seeds_is_the_populations_unless_asked_otherwise() -> None:
    assert metrics.over_seeds([60.0, 61.0]) == metrics.Spread(60.5, 0.5, 2)
    assert metrics.over_seeds([60.0, 61.0], sample=True).std == pytest.approx(math.sqrt(0.5))
    assert metrics.over_seeds([60.0]) == metrics.Spread(60.0, None, 1)
    with pytest.raises(ValueError, match="at least one"):
        metrics.over_seeds([])


def test_group_means_of_the_papers_zero_shot_row() -> None:
    imagenet = dict(zip(metrics.IMAGENET, [66.72, 47.83, 60.94, 73.99, 46.10], strict=True))
    fine = dict(
        zip(
            metrics.FINE_GRAINED,
            [44.33, 67.32, 93.95, 23.85, 88.20, 65.19, 65.56, 42.05, 62.58, 83.66],
            strict=True,
        )
    )
    means = metrics.group_means(imagenet | fine)
    assert means == pytest.approx({"in&o": 59.116, "ood": 57.215, "fgvc": 63.669, "avg": 61.3925})


def test_a_mean_with_a_missing_dataset_is_undefined() -> None:
    imagenet: dict[str, float | None] = dict.fromkeys(metrics.IMAGENET, 50.0)
    assert metrics.group_means(imagenet) == {"in&o": 50.0, "ood": 50.0, "fgvc": None, "avg": None}
    assert metrics.group_means(imagenet | {"imagenet": None}) == {"in&o": None, "ood": 50.0, "fgvc": None, "avg": None}
    assert metrics.group_means(imagenet | {"imagenet-r": math.nan})["ood"] is None
    assert metrics.group_means({"in&o": 50.0, "fgvc": 60.0})["avg"] == 55.0


def pairs(both: int, ours: int, theirs: int, neither: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Right-or-wrong answers of two methods with these counts of agreement."""
    counts = [both, ours, theirs, neither]
    return np.repeat([1, 1, 0, 0], counts), np.repeat([1, 0, 1, 0], counts)


def test_the_bootstrap_interval_has_the_spread_of_drawing_images_one_by_one() -> None:
    right, other = pairs(60, 20, 8, 12)
    result = metrics.accuracy_difference(right, other)
    rng = np.random.default_rng(1)
    drawn = [100 * (right - other)[rng.integers(100, size=100)].mean() for _ in range(10_000)]
    assert result.estimate == pytest.approx(12.0)
    assert (result.low, result.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]).tolist(), abs=1.01)
    assert result == metrics.accuracy_difference(right, other)
    wider = metrics.accuracy_difference(right, other, level=0.99)
    assert wider.low < result.low < result.high < wider.high


def test_repeating_a_run_with_the_same_answers_does_not_narrow_the_interval() -> None:
    right, other = pairs(60, 20, 8, 12)
    once = metrics.accuracy_difference(right, other)
    repeated = metrics.accuracy_difference(np.stack([right] * 8), np.stack([other] * 8))
    assert (repeated.estimate, repeated.low, repeated.high) == pytest.approx((once.estimate, once.low, once.high))
    mixed = metrics.accuracy_difference(np.stack([right, other]), other)
    assert mixed.estimate == pytest.approx(once.estimate / 2)


def test_the_interval_holds_the_true_difference_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for trial in range(300):
        right, other = rng.random(400) < 0.70, rng.random(400) < 0.65
        result = metrics.accuracy_difference(right, other, resamples=2000, seed=trial)
        held += result.low <= 5.0 <= result.high
    assert 0.91 <= held / 300 <= 0.985


def test_equal_methods_have_an_interval_of_no_width() -> None:
    right = [1, 0, 1, 1]
    assert metrics.accuracy_difference(right, right) == metrics.Interval(0.0, 0.0, 0.0)
    assert metrics.mcnemar(right, right) == 1.0


def test_methods_must_have_answered_the_same_images() -> None:
    with pytest.raises(ValueError, match=r"same images, not \(1, 2\) and \(1, 3\)"):
        metrics.accuracy_difference([1, 0], [1, 0, 1])
    with pytest.raises(ValueError, match="one run of each method"):
        metrics.mcnemar([[1, 0]], [[1, 1]])


def naive_mcnemar(ours: int, theirs: int) -> float:
    n = ours + theirs
    chance = [math.comb(n, k) / 2**n for k in range(n + 1)]
    return min(1.0, sum(chance[: min(ours, theirs) + 1]) + sum(chance[max(ours, theirs) :]))


@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (1, 0), (5, 5), (10, 2), (2, 10), (40, 41), (30, 12)])
def test_mcnemar_equals_the_sum_of_both_tails(ours: int, theirs: int) -> None:
    assert metrics.mcnemar(*pairs(100, ours, theirs, 50)) == pytest.approx(naive_mcnemar(ours, theirs), rel=1e-12)


def test_mcnemar_of_many_images_neither_overflows_nor_stops_at_zero_too_early() -> None:
    assert metrics.mcnemar(*pairs(0, 1000, 0, 0)) == 2.0**-999
    assert 0.99 < metrics.mcnemar(*pairs(0, 5000, 5001, 0)) <= 1.0


def test_scikit_learn_agrees() -> None:
    reference = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    calibration = pytest.importorskip("sklearn.calibration", reason="scikit-learn is not installed")
    probs, labels = random_answers(500, 12)
    stored = metrics.columns(probs, labels)
    result = metrics.measure(stored)
    assert result["top1"] == pytest.approx(100 * reference.accuracy_score(labels, probs.argmax(axis=1)))
    assert result["top5"] == pytest.approx(100 * reference.top_k_accuracy_score(labels, probs, k=5, labels=range(12)))
    kept = np.maximum(stored["true_probability"], np.finfo(np.float64).eps)  # scikit-learn clips earlier than we do
    assert metrics.nll(kept) == pytest.approx(reference.log_loss(labels, probs, labels=range(12)))
    hit, sure = stored["prediction"] == labels, stored["confidence"]
    accuracy, confidence = calibration.calibration_curve(hit, sure, n_bins=15)
    sizes = np.histogram(sure, bins=15, range=(0, 1))[0]
    expected = (np.abs(accuracy - confidence) * sizes[sizes > 0]).sum() / 500
    assert result["ece"] == pytest.approx(100 * expected)
    binary, truth = random_answers(300, 2)
    score = metrics.brier(*(metrics.columns(binary, truth)[name] for name in ("true_probability", "sum_of_squares")))
    assert score == pytest.approx(2 * reference.brier_score_loss(truth, binary[:, 1]))


def test_scipy_agrees() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    right, other = pairs(600, 120, 80, 200)
    expected = stats.bootstrap(
        (right, other),
        lambda a, b, axis: 100 * (a.mean(axis=axis) - b.mean(axis=axis)),
        paired=True,
        vectorized=True,
        method="percentile",
        batch=1000,
        random_state=0,
    ).confidence_interval
    result = metrics.accuracy_difference(right, other)
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), abs=0.15)
    for ours, theirs in [(120, 80), (3, 17), (50, 49)]:
        expected = stats.binomtest(ours, ours + theirs).pvalue
        assert metrics.mcnemar(*pairs(10, ours, theirs, 10)) == pytest.approx(expected, rel=1e-9)


def test_metrics_need_no_torch() -> None:
    code = "import sys, usetta.evaluate.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metrics_of_trust_by_hand() -> None:
    label, prediction = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 1])
    confidence = np.array([0.9, 0.8, 0.6, 0.7])
    stored = label, prediction, confidence
    # Most confident first: right, right, wrong, wrong.
    assert metrics.risk_coverage(*stored) == pytest.approx([0, 0, 100 / 3, 50])
    assert metrics.aurc(*stored) == pytest.approx((100 / 3 + 50) / 4)
    assert metrics.selective_accuracy(*stored, coverage=0.5) == 100
    assert metrics.adaptive_ece(*stored, bins=2) == pytest.approx(100 * (0.3 + 1.3) / 4)
    # 0.05 and 0.1 share no bin: upper edges are included.
    assert metrics.ece20([0, 0], [0, 1], [0.05, 0.1]) == pytest.approx(100 * (0.95 + 0.1) / 2)
    assert metrics.changed([[1, 2, 3], [1, 2, 4], [1, 0, 4]]) == pytest.approx(100 * (1 + 2 + 1) / 9)


def test_scores_of_images_of_other_classes_by_counting_pairs() -> None:
    rng = np.random.default_rng(0)
    known, other = rng.integers(0, 9, 40) / 4, rng.integers(-3, 6, 30) / 4
    pairs = [(k > o) + (k == o) / 2 for k in known for o in other]
    assert metrics.auroc(known, other) == pytest.approx(100 * np.mean(pairs))
    thresholds = [t for t in known if (known >= t).mean() >= 0.95]
    assert metrics.fpr95(known, other) == pytest.approx(100 * (other >= max(thresholds)).mean())


def test_the_interval_of_a_difference_of_accuracies_is_that_of_the_older_function() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 400)
    ours, theirs = ({"label": label, "prediction": rng.integers(0, 3, 400)} for _ in range(2))
    new = metrics.metric_difference("top1", ours, theirs, resamples=4000)
    old = metrics.accuracy_difference(*(columns["prediction"] == label for columns in (ours, theirs)))
    assert new.estimate == pytest.approx(old.estimate)
    assert (new.low, new.high) == pytest.approx((old.low, old.high), abs=0.5)


def test_without_images_there_is_no_number() -> None:
    columns = {"label": np.empty((1, 0)), "prediction": np.empty((1, 0))}
    interval = metrics.metric_difference("top1", columns, columns)
    assert np.isnan([interval.estimate, interval.low, interval.high]).all()
    for score in (metrics.auroc, metrics.fpr95):
        assert np.isnan(score([], [0.5]))
        assert np.isnan(score([0.5], []))


def test_methods_are_compared_on_the_same_images_only() -> None:
    three, two = ({"label": np.zeros(n), "prediction": np.zeros(n)} for n in (3, 2))
    with pytest.raises(ValueError, match="must have answered the same images"):
        metrics.metric_difference("top1", three, two)
    with pytest.raises(ValueError, match="must have answered the same images"):
        metrics.ood_difference(metrics.auroc, ([0.5, 0.6], [0.1]), ([0.5, 0.6], [0.1, 0.2]))


def test_the_interval_of_a_difference_in_detection_has_the_difference_in_it() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = ((rng.normal(shift, 1, 200), rng.normal(0, 1, 150)) for shift in (1.5, 0.5))
    interval = metrics.ood_difference(metrics.auroc, ours, theirs, resamples=200)
    assert interval.estimate == pytest.approx(metrics.auroc(*ours) - metrics.auroc(*theirs))
    assert 0 < interval.low < interval.estimate < interval.high
    same = metrics.ood_difference(metrics.fpr95, ours, ours, resamples=20)
    assert (same.estimate, same.low, same.high) == (0, 0, 0), "images are resampled together"
