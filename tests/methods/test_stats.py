"""What a recipe sees in the logits of the views: entropies, chosen views, δ, β, and whether they agree."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from usetta.methods.recipe import Recipe
from usetta.methods.stats import view_stats


def leaning(views: list[tuple[int, float]], classes: int = 3) -> Tensor:
    """Logits (1, N, C) of views that favour a class by so much."""
    logits = torch.zeros(1, len(views), classes)
    for i, (label, lead) in enumerate(views):
        logits[0, i, label] = lead
    return logits


def test_an_image_with_known_numbers() -> None:
    seen = view_stats(Recipe("mine", rho=0.5), leaning([(0, 2.0), (1, 1.0), (0, 3.0), (2, 0.5), (0, 4.0)]))
    p = [math.exp(lead) / (math.exp(lead) + 2) for lead in (2.0, 1.0, 3.0, 0.5, 4.0)]
    entropies = [-x * math.log(x) - (1 - x) * math.log((1 - x) / 2) for x in p]
    assert seen.entropies[0].tolist() == pytest.approx(entropies, abs=1e-6)
    assert seen.chosen.tolist() == [[4, 2]]
    assert seen.delta.item() == 0.5
    assert seen.beta.item() == pytest.approx(0.5)
    assert seen.agrees.tolist() == [True]


def test_only_the_weak_and_the_chosen_views_must_agree() -> None:
    doubtful, dissenting, lone = [(0, 1.0), (0, 4.0), (0, 3.0), (1, 0.5), (2, 0.5)], [(0, 1.0), (1, 4.0)], [(1, 9.0)]
    recipe = Recipe("mine", rho=0.5)
    assert view_stats(recipe, leaning(doubtful)).agrees.item()
    assert not view_stats(recipe, leaning([*doubtful[:2], (2, 3.5), *doubtful[3:]])).agrees.item()
    assert not view_stats(recipe, leaning(dissenting)).agrees.item()
    assert not view_stats(recipe, leaning([*lone, *doubtful[1:]])).agrees.item(), (
        "the weak view counts, however unconfident"
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, 0.5 + 0.4 * (0.75 - 0.5)),
        ({"gamma": 1.0}, 0.75),
        ({"gamma": 0.0}, 0.5),
        ({"rescaling": "root"}, 0.5 + 0.4 * 0.25**0.5),
        ({"rescaling": "square"}, 0.5 + 0.4 * 0.25**2),
        ({"beta": "uniform"}, 1 / 2),
        ({"beta": "uniform", "rho": 0.5}, 1 / 3),
        ({"beta": "uniform", "rho": 1.0}, 1 / 5),
        ({"beta": 0}, 0.0),
        ({"beta": 0.25}, 0.25),
        ({"beta": 1}, 1.0),
    ],
)
def test_beta_by_every_rule(setting: dict[str, Any], expected: float) -> None:
    views = leaning([(0, 2.0), (0, 1.0), (0, 3.0), (0, 0.5), (1, 0.7)])
    assert view_stats(Recipe("mine", **setting), views).beta.item() == pytest.approx(expected, abs=1e-6)


def test_a_single_view_is_on_its_own() -> None:
    seen = view_stats(Recipe("mine"), leaning([(2, 1.0)]))
    assert seen.chosen.shape == (1, 0)
    assert seen.delta.isnan().all()
    assert seen.beta.tolist() == [1.0]
    assert seen.agrees.tolist() == [True]
