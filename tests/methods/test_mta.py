"""MTA against its definition, written one number at a time, and what its mode and inlierness promise."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from usetta import methods
from usetta.methods.mta import mode_of_views
from usetta.methods.recipe import run

Vector = list[float]


def episode(views: int, classes: int, seed: int, images: int = 2, spread: float = 0.8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, 12, generator=generator, dtype=torch.float64)
    features = centre + spread * torch.randn(images, views, 12, generator=generator, dtype=torch.float64)
    text = torch.randn(classes, 12, generator=generator, dtype=torch.float64)
    return normalize(features, dim=-1), normalize(text, dim=-1)


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def distance(a: Vector, b: Vector) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def softmax(logits: Vector) -> Vector:
    powers = [math.exp(z - max(logits)) for z in logits]
    return [power / sum(powers) for power in powers]


def naive_mta(
    features: Tensor, text: Tensor, scale: float, bandwidth: float = 0.3, lambda_y: float = 0.2, lambda_q: float = 4.0
) -> dict[str, Any]:
    """MTA of one image, with its loops and its early exits."""
    f, t = features.double().tolist(), text.double().tolist()
    n, dim = len(f), len(f[0])
    probs = [softmax([scale * dot(view, row) for row in t]) for view in f]
    k = max(1, int(bandwidth * (n - 1)))
    h_squared = []
    for p in range(n):
        nearest = sorted(distance(f[p], f[q]) for q in range(n) if q != p)[:k]
        h_squared.append(max(1e-7, 0.5 * sum(d * d for d in nearest) / k))
    affinity = [[dot(probs[p], probs[q]) for q in range(n)] for p in range(n)]

    def density(m: Vector) -> Vector:
        return [math.exp(-(distance(f[p], m) ** 2) / (2 * h_squared[p])) for p in range(n)]

    y, m, iterations = [1 / n] * n, f[0], 0
    for _ in range(5):
        d = density(m)
        for _ in range(5):
            iterations += 1
            old, y = y, softmax([(d[p] + lambda_q * dot(affinity[p], y)) / lambda_y for p in range(n)])
            if distance(old, y) < 1e-6:
                break
        for _ in range(5):
            iterations += 1
            d = density(m)
            a = [d[p] * y[p] for p in range(n)]
            mean = [sum(a[p] * f[p][i] for p in range(n)) / sum(a) for i in range(dim)]
            old, m = m, [x / math.sqrt(dot(mean, mean)) for x in mean]
            if distance(old, m) < 1e-6:
                break
    return {"probs": softmax([scale * dot(m, row) for row in t]), "y": y, "m": m, "iterations": iterations}


@pytest.mark.parametrize("views", [2, 3, 7, 64])
@pytest.mark.parametrize("classes", [1, 2, 3, 37, 200])
def test_mta_is_its_definition(views: int, classes: int) -> None:
    features, text = episode(views, classes, seed=views + classes)
    exact = run(methods.get("mta"), features, text, 20.0)
    single = run(methods.get("mta"), features.float(), text.float(), 20.0)
    for i, image in enumerate(features):
        naive = naive_mta(image, text, 20.0)
        assert exact.probs[i].tolist() == pytest.approx(naive["probs"], abs=1e-10)
        assert exact.weights[i].tolist() == pytest.approx(naive["y"], abs=1e-10)
        naive = naive_mta(image.float(), text.float(), 20.0)
        assert single.probs[i].tolist() == pytest.approx(naive["probs"], abs=1e-5)
        assert single.weights[i].tolist() == pytest.approx(naive["y"], abs=1e-5)


def test_bandwidth_and_lambdas_are_options() -> None:
    features, text = episode(20, 5, seed=2)
    options = {"bandwidth": 0.6, "lambda_y": 0.5, "lambda_q": 1.0}
    result, usual = (run(methods.get("mta", **changed), features, text, 20.0) for changed in (options, {}))
    for i, image in enumerate(features):
        assert result.weights[i].tolist() == pytest.approx(naive_mta(image, text, 20.0, **options)["y"], abs=1e-10)
    for name, value in options.items():
        assert (
            run(methods.get("mta", **{name: value}), features, text, 20.0).weights - usual.weights
        ).abs().max() > 1e-4


def test_images_of_a_batch_stop_by_themselves() -> None:
    features, text = episode(9, 5, seed=0, images=4)
    features[1] = normalize(features[1, :1] + 1e-4 * features[1], dim=-1)  # converges at once
    iterations = {naive_mta(image, text, 20.0)["iterations"] for image in features}
    assert len(iterations) > 1, "the images must differ in when they stop, or this test shows nothing"
    together = run(methods.get("mta"), features, text, 20.0)
    for i in range(4):
        assert together.probs[i].tolist() == pytest.approx(naive_mta(features[i], text, 20.0)["probs"], abs=1e-10)
        alone = run(methods.get("mta"), features[i : i + 1], text, 20.0)
        torch.testing.assert_close(together.probs[i], alone.probs[0], atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 64), st.integers(1, 40), st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_inlierness_sums_to_one_the_mode_has_unit_length_and_the_order_is_nothing(
    views: int, classes: int, seed: int, random: Any
) -> None:
    features, text = episode(views, classes, seed)
    y, coefficients = mode_of_views(features, (20 * features @ text.T).softmax(dim=-1))
    torch.testing.assert_close(y.sum(dim=1), torch.ones(2, dtype=torch.float64))
    mode = (coefficients[:, None] @ features)[:, 0]
    torch.testing.assert_close(mode.norm(dim=1), torch.ones(2, dtype=torch.float64))
    assert (y >= 0).all()
    assert (coefficients >= 0).all()
    order = [0, *random.sample(range(1, views), views - 1)]
    one, other = (run(methods.get("mta"), f, text, 20.0) for f in (features, features[:, order]))
    torch.testing.assert_close(one.probs, other.probs, atol=1e-7, rtol=0)
    torch.testing.assert_close(one.weights[:, order], other.weights, atol=1e-7, rtol=0)


def test_views_that_coincide_have_no_bandwidth_and_do_no_harm() -> None:
    features, text = episode(8, 5, seed=1)
    features[0] = features[0, 0]
    features[1, 3:] = features[1, 3]
    for f, t in ((features, text), (features.float(), text.float())):
        result = run(methods.get("mta"), f, t, 20.0)
        torch.testing.assert_close(result.probs[0], result.weak_probs[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(result.weights[0], torch.full_like(result.weights[0], 1 / 8))
        assert result.probs[1].tolist() == pytest.approx(naive_mta(features[1], text, 20.0)["probs"], abs=1e-5)
        assert result.probs.isfinite().all()


def test_a_view_of_something_else_is_left_out() -> None:
    features, text = episode(20, 4, seed=3, spread=0.2)
    features[:, 5] = -features[:, 0]
    result = run(methods.get("mta"), features, text, 100.0)
    assert (result.weights[:, 5] < 0.01 * result.weights.amax(dim=1)).all()
