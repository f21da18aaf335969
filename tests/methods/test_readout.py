import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from usetta import methods
from usetta.methods.readout import (
    READOUTS,
    RESCALINGS,
    blend_weights,
    entropy_rank,
    mean_of_views,
    reliability_weights,
    weak_weight,
)
from usetta.methods.recipe import Recipe, run
from usetta.methods.stats import view_stats


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
    weights = blend_weights(torch.tensor([0.4]), torch.tensor([[2, 1]]), views=4)
    assert weights[0].tolist() == pytest.approx([0.4, 0.3, 0.3, 0.0])
    assert mean_of_views(probs, weights)[0].tolist() == pytest.approx([0.4 + 0.6 * 0.25, 0.6 * 0.75])


def test_a_wide_root_does_not_leave_the_unit_interval() -> None:
    assert weak_weight(torch.tensor([0.0, 1.0]), gamma=1.0, rescaling="root").tolist() == [0.0, 1.0]


def naive_reliability(features: torch.Tensor, neighbours: int = 20, temperature: float = 0.01) -> list[float]:
    """R-TPT's weights of one image, number by number."""
    scores = []
    for i, view in enumerate(features):
        others = sorted((float(view @ other) for j, other in enumerate(features) if j != i), reverse=True)
        scores.append(sum(others[:neighbours]) / len(others[:neighbours]) / temperature)
    return torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()


@pytest.mark.parametrize("views", [2, 5, 21, 64])
def test_reliability_is_the_nearness_of_other_views(views: int) -> None:
    generator = torch.Generator().manual_seed(views)
    features = torch.nn.functional.normalize(torch.randn(3, views, 8, generator=generator, dtype=torch.float64), dim=-1)
    features[:, 1] = features[:, 0]  # a copy is a neighbour, the view itself is not
    weights = reliability_weights(features, 20, 0.01)
    for i in range(3):
        assert weights[i].tolist() == pytest.approx(naive_reliability(features[i]), abs=1e-12)
    torch.testing.assert_close(weights.sum(1), torch.ones(3, dtype=torch.float64))


def test_neighbours_and_temperature_are_options_of_the_reliability() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(2, 12, 8, generator=generator, dtype=torch.float64), dim=-1)
    text = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator, dtype=torch.float64), dim=-1)
    result = run(methods.get("clip+reliability:neighbours=3:temperature=0.5"), features, text, 20.0)
    for i in range(2):
        assert result.weights[i].tolist() == pytest.approx(naive_reliability(features[i], 3, 0.5), abs=1e-12)


def test_a_single_view_is_all_there_is() -> None:
    assert reliability_weights(torch.ones(2, 1, 3), 20, 0.01).tolist() == [[1.0], [1.0]]


def test_selected_views_are_those_most_confident_before_tuning() -> None:
    generator = torch.Generator().manual_seed(0)
    first, then = (3 * torch.randn(2, 30, 4, generator=generator) for _ in range(2))
    recipe = Recipe("mine", readout="selected")
    before, after = view_stats(recipe, first), view_stats(recipe, then)
    answer, weights = READOUTS["selected"](recipe, before, after, torch.zeros(2, 30, 8))
    for i in range(2):
        selected = before.entropies[i].argsort()[:3].tolist()
        assert weights[i].nonzero()[:, 0].tolist() == sorted(selected)
        torch.testing.assert_close(answer[i], then[i, selected].softmax(dim=-1).mean(dim=0))


def test_vte_classifies_the_mean_feature_of_the_most_confident_views() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(2, 30, 8, generator=generator), dim=-1)
    text = torch.nn.functional.normalize(torch.randn(4, 8, generator=generator), dim=-1)
    probs = run(methods.get("vte"), features, text, 20.0).probs
    for views, answer in zip(features, probs, strict=True):
        p = (20 * views @ text.T).softmax(dim=-1)
        chosen = (-(p * p.log()).sum(dim=-1)).argsort()[:3]
        mean = torch.nn.functional.normalize(views[chosen].mean(dim=0), dim=0)
        torch.testing.assert_close(answer, (20 * text @ mean).softmax(dim=-1))
