import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usetta.readout import RESCALINGS, blend, entropy_rank, weak_weight


def test_the_entropy_rank_counts_strictly_greater_views() -> None:
    entropies = torch.tensor([[1.0, 0.5, 1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 1.0, 1.0], [9.0, 1.0, 1.0, 1.0, 1.0]])
    assert entropy_rank(entropies).tolist() == [0.25, 1.0, 0.0]


@pytest.mark.parametrize(
    ("rescaling", "expected"),
    [
        ("linear", [0.3, 0.42, 0.5, 0.7]),
        ("root", [0.217157, 0.321115, 0.5, 0.782843]),
        ("square", [0.4, 0.484, 0.5, 0.6]),
    ],
)
def test_beta_for_known_ranks(rescaling: str, expected: list[float]) -> None:
    delta = torch.tensor([0.0, 0.3, 0.5, 1.0])
    assert weak_weight(delta, 0.4, rescaling).tolist() == pytest.approx(expected, abs=1e-6)


@given(st.floats(0, 1), st.floats(0, 1))
def test_beta_stays_in_its_range_and_grows_with_delta(delta: float, gamma: float) -> None:
    for rescaling in ("linear", "square"):
        beta = weak_weight(torch.tensor([delta], dtype=torch.float64), gamma, rescaling).item()
        assert 0.5 - gamma / 2 - 1e-12 <= beta <= 0.5 + gamma / 2 + 1e-12
    for rescaling in RESCALINGS:
        low, high = weak_weight(torch.tensor([0.0, delta], dtype=torch.float64), gamma, rescaling).tolist()
        assert low <= high + 1e-12


def test_blend_of_known_distributions() -> None:
    probs = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.2, 0.8]]])
    q = blend(probs, torch.tensor([[1, 2]]), torch.tensor([0.4]))
    assert q[0].tolist() == pytest.approx([0.4 + 0.6 * 0.25, 0.6 * 0.75])
