"""Losses against their definitions, their gradients against the closed forms, and both where numbers are extreme."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from usetta.methods.losses import (
    LOSSES,
    dispersion,
    gradient,
    marginal_entropy,
    orthogonality,
    pointwise_entropy,
    reverse_cross_entropy,
    takes_rewards,
    weighted_entropy,
)

LABELLED = [name for name, loss in LOSSES.items() if not takes_rewards(loss)]
"""Losses with a pseudo-label; the one with rewards is tested with RLCF."""
LOGITS = st.builds(
    lambda images, views, classes, scale, seed: (
        scale * torch.randn(images, views, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 40),
    st.sampled_from([0.1, 1.0, 10.0]),
    st.integers(0, 2**32 - 1),
)


def label_for(logits: Tensor) -> Tensor:
    """A pseudo-label (B, C) that is not the mean of the views."""
    return (logits[:, 0] + logits[:, -1].roll(1, dims=-1)).softmax(dim=-1)


def as_rows(logits: Tensor) -> list[list[float]]:
    """The predictions of the views of one image, by the definition of softmax."""
    rows = []
    for z in logits.tolist():
        exponentials = [math.exp(x - max(z)) for x in z]
        rows.append([e / sum(exponentials) for e in exponentials])
    return rows


def entropy(p: list[float]) -> float:
    return -sum(x * math.log(x) for x in p if x > 0)


@settings(deadline=None, max_examples=30)
@given(LOGITS)
def test_losses_are_what_their_formulas_say(logits: Tensor) -> None:
    q = label_for(logits)
    values = {name: LOSSES[name](logits, q) for name in LABELLED}
    for i in range(len(logits)):
        p = as_rows(logits[i])
        mean = [sum(column) / len(p) for column in zip(*p, strict=True)]
        log_q = q[i].log().tolist()
        assert values["mem"][i].item() == pytest.approx(entropy(mean), abs=1e-12)
        assert values["pointwise"][i].item() == pytest.approx(sum(map(entropy, p)) / len(p), abs=1e-12)
        assert values["rce"][i].item() == pytest.approx(
            -sum(m * log for m, log in zip(mean, log_q, strict=True)), abs=1e-11
        )


@settings(deadline=None, max_examples=30)
@given(LOGITS)
def test_marginal_entropy_is_reverse_cross_entropy_less_the_divergence(logits: Tensor) -> None:
    """The paper's decomposition, which holds with a minus sign: MEM = RCE − KL(p̄ ‖ q)."""
    mean, q = logits.softmax(dim=-1).mean(dim=1), label_for(logits)
    divergence = (mean * (mean.log() - q.log())).sum(dim=-1)
    torch.testing.assert_close(
        marginal_entropy(logits), reverse_cross_entropy(logits, q) - divergence, atol=1e-11, rtol=0
    )


@settings(deadline=None, max_examples=30)
@given(LOGITS)
def test_gradients_have_their_closed_forms(logits: Tensor) -> None:
    p, q = logits.softmax(dim=-1), label_for(logits)
    views = logits.shape[1]

    def reverse(log_q: Tensor) -> Tensor:
        log_q = log_q[:, None]
        return -p / views * (log_q - (p * log_q).sum(dim=-1, keepdim=True))

    own_entropy = -(p * p.log()).sum(dim=-1, keepdim=True)
    expected = {
        "rce": reverse(q.log()),
        "mem": reverse(p.mean(dim=1).log()),
        "pointwise": -p / views * (p.log() + own_entropy),
    }
    for name, closed in expected.items():
        actual = gradient(lambda z, loss=LOSSES[name]: loss(z, q), logits)
        torch.testing.assert_close(actual, closed, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 40), st.integers(2, 30), st.integers(0, 2**32 - 1))
def test_dispersion_and_its_gradient_have_their_closed_forms(classes: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    text = normalize(torch.randn(2, classes, dim, generator=generator, dtype=torch.float64), dim=-1)
    away = text - text.mean(dim=1, keepdim=True)
    distances = away.square().sum(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(dispersion(text), distances.mean(dim=(1, 2)))
    direction = away / distances
    expected = (direction - direction.mean(dim=1, keepdim=True)) / classes
    torch.testing.assert_close(gradient(dispersion, text), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "views",
    [
        [[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0]],
        [[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]],
        [[1e30, -1e30, 0.0], [1e30, -1e30, 0.0]],
        [[-1e30, -1e30, 0.0], [1e30, 1e30, 0.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        [[88.0, 0.0, -88.0], [104.0, 0.0, 0.0]],
    ],
)
@pytest.mark.parametrize("label", [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1e-44, 1e-310], [1 / 3, 1 / 3, 1 / 3]])
@pytest.mark.parametrize("name", LABELLED)
def test_extreme_logits_and_labels_have_finite_losses_and_gradients(
    name: str, label: list[float], views: list[list[float]], dtype: torch.dtype
) -> None:
    logits, q = torch.tensor([views], dtype=dtype), torch.tensor([label], dtype=dtype)
    loss = LOSSES[name](logits, q)
    assert torch.isfinite(loss).all()
    assert loss >= 0
    assert torch.isfinite(gradient(lambda z: LOSSES[name](z, q), logits)).all()


def test_a_label_that_rules_a_class_out_pushes_views_off_it() -> None:
    logits = torch.tensor([[[2.0, 1.0], [0.0, 1.0]]])
    grad = gradient(lambda z: reverse_cross_entropy(z, torch.tensor([[1.0, 0.0]])), logits)
    assert (grad[..., 0] < 0).all()
    assert (grad[..., 1] > 0).all()


def test_the_label_is_a_constant() -> None:
    """Also one that comes from the same logits; with the views' own mean the gradient would cancel either way."""
    logits = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q = label_for(logits)
    (actual,) = torch.autograd.grad(reverse_cross_entropy(logits, q).sum(), logits)
    torch.testing.assert_close(actual, gradient(lambda z: reverse_cross_entropy(z, q.detach()), logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [1, 2, 3, 37])
def test_equal_classes_are_not_dispersed_and_pull_nowhere(classes: int, dtype: torch.dtype) -> None:
    one = normalize(torch.randn(2, 1, 24, generator=torch.Generator().manual_seed(0), dtype=dtype), dim=-1)
    text = one.expand(-1, classes, -1)
    rounding = 0 if classes == 1 else 4 * torch.finfo(dtype).eps
    assert (dispersion(text) <= rounding).all()
    assert (gradient(dispersion, text).abs() <= rounding).all()


def test_gradients_are_found_where_the_caller_wants_none() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = gradient(pointwise_entropy, logits)
    with torch.no_grad():
        actual = gradient(pointwise_entropy, logits)
    assert torch.equal(actual, expected)
    assert not actual.requires_grad
    assert not logits.requires_grad


def test_the_margin_scales_the_weights() -> None:
    logits = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ratio = weighted_entropy(logits, margin=1.4) / weighted_entropy(logits)
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.e))


def test_orthogonality_is_the_published_reflection_of_the_rows_of_the_gram_matrix() -> None:
    text = normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1)
    leaf = text.clone().requires_grad_()
    distances = []
    for i, row in enumerate(leaf @ leaf.T):
        axis = torch.eye(5, dtype=text.dtype)[i]
        v = row - row.norm() * axis
        v = v / v.norm()
        reflected = row - 2 * (v @ row) * v
        distances.append((reflected - axis).norm())
    expected = torch.stack(distances).mean()
    torch.testing.assert_close(orthogonality(text), expected.detach())
    torch.testing.assert_close(gradient(orthogonality, text), torch.autograd.grad(expected, leaf)[0])
    assert float(orthogonality(torch.eye(4))) == 0
