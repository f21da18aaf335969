import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usetta.methods.select import confident_strong, entropy, keep_count, most_confident


@pytest.mark.parametrize(
    ("views", "rho", "kept"), [(63, 0.1, 6), (64, 0.1, 6), (64, 0.3, 19), (63, 0.3, 18), (1, 0.1, 1)]
)
def test_int_cuts_off_and_at_least_one_view_stays(views: int, rho: float, kept: int) -> None:
    assert keep_count(views, rho) == kept


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -1000.0, -1000.0]])
    expected = [math.log(4), 0.0, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert entropy(logits).tolist() == pytest.approx(expected, abs=1e-6)


def test_equal_entropies_keep_the_order_of_the_views() -> None:
    assert most_confident(torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.2]]), 3).tolist() == [[4, 1, 2]]


def test_the_weak_view_never_competes() -> None:
    entropies = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    assert confident_strong(entropies, rho=0.7).tolist() == [[2, 3]]


@given(st.integers(2, 128), st.floats(0.01, 1.0), st.integers(0, 2**32 - 1))
def test_the_chosen_are_strong_distinct_and_the_most_confident(views: int, rho: float, seed: int) -> None:
    entropies = torch.rand(3, views, generator=torch.Generator().manual_seed(seed))
    for row, chosen in zip(entropies, confident_strong(entropies, rho).tolist(), strict=True):
        assert len(set(chosen)) == len(chosen) == keep_count(views - 1, rho)
        assert 0 not in chosen
        left_out = [row[i].item() for i in range(1, views) if i not in chosen]
        assert max(row[chosen].tolist()) <= min(left_out, default=math.inf)
