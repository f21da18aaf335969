"""ZERO against its definition, written one vote at a time, and every way a tie can end."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from methods import test_mta
from usetta import methods
from usetta.methods.recipe import run
from usetta.methods.zero import votes_of_views

episode = partial(test_mta.episode, images=3, spread=1.5)


def entropy(logits: list[float]) -> float:
    powers = [math.exp(z - max(logits)) for z in logits]
    p = [power / sum(powers) for power in powers]
    return -sum(x * math.log(x) for x in p if x > 0)


def naive_zero(logits: list[list[float]], share: float = 0.3) -> dict[str, Any]:
    """ZERO of one image."""
    n, classes = len(logits), range(len(logits[0]))
    ranked = sorted(range(n), key=lambda i: entropy(logits[i]))
    k = max(1, int(n * share))
    votes, weights = [0.0] * len(classes), [0.0] * n
    for i in ranked[:k]:
        best = [c for c in classes if logits[i][c] == max(logits[i])]
        weights[i] += 1
        for c in best:
            votes[c] += 1 / len(best)
    tied = [c for c in classes if abs(votes[c] - max(votes)) < 1e-9]
    if len(tied) > 1:
        winner = None
        for i in ranked[k:]:
            first = logits[i].index(max(logits[i]))
            if first in tied:
                winner, decider = first, i
                break
        if winner is None:
            decider = ranked[k] if k < n else ranked[0]
            winner = max(tied, key=lambda c: logits[decider][c])
        alike = [c for c in tied if logits[decider][c] == logits[decider][winner]]
        for c in alike:
            votes[c] += 1 / len(alike)
        weights[decider] += 1
    return {
        "probs": [v / sum(votes) for v in votes],
        "weights": [w / sum(weights) for w in weights],
        "label": votes.index(max(votes)),
        "tied": len(tied) > 1,
    }


@pytest.mark.parametrize("views", [2, 3, 10, 64])
@pytest.mark.parametrize("classes", [1, 2, 3, 37, 200])
def test_zero_is_its_definition(views: int, classes: int) -> None:
    features, text = episode(views, classes, seed=views + classes)
    for dtype in (torch.float64, torch.float32):
        result = run(methods.get("zero"), features.to(dtype), text.to(dtype), 20.0)
        for i, image in enumerate(features):
            naive = naive_zero((20.0 * image @ text.T).tolist())
            assert result.probs[i].tolist() == pytest.approx(naive["probs"], abs=1e-6)
            assert result.weights[i].tolist() == pytest.approx(naive["weights"], abs=1e-6)
            assert result.probs[i].argmax().item() == naive["label"]


def test_nineteen_of_sixty_four_views_vote_and_the_weak_one_competes() -> None:
    features, text = episode(64, 37, seed=0, images=40)
    result = run(methods.get("zero"), features, text, 20.0)
    voters = result.weights > 0
    tied = torch.tensor([naive_zero((20.0 * image @ text.T).tolist())["tied"] for image in features])
    assert (voters.sum(dim=1) == 19 + tied).all()
    assert 0 < voters[:, 0].sum() < 40


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 64), st.integers(2, 5), st.integers(0, 2**32 - 1), st.floats(0.1, 1), st.randoms())
def test_few_classes_tie_often_and_the_order_of_views_is_nothing(
    views: int, classes: int, seed: int, share: float, random: Any
) -> None:
    features, text = episode(views, classes, seed)
    recipe = methods.get("zero", voters=share)
    result = run(recipe, features, text, 3.0)
    order = random.sample(range(views), views)
    shuffled = run(recipe, features[:, order], text, 3.0)
    for i, image in enumerate(features):
        naive = naive_zero((3.0 * image @ text.T).tolist(), share)
        assert result.probs[i].tolist() == pytest.approx(naive["probs"], abs=1e-9)
        assert result.probs[i].argmax().item() == naive["label"]
        torch.testing.assert_close(shuffled.probs[i], result.probs[i])
        torch.testing.assert_close(shuffled.weights[i], result.weights[i, order])


def sure(label: int, logit: float, classes: int = 4) -> list[float]:
    """A view that chooses `label`, the more confidently the higher the logit."""
    return [logit if c == label else 0.0 for c in range(classes)]


def vote(*views: list[float], share: float) -> tuple[list[float], list[float]]:
    logits = torch.tensor([list(views)])
    entropies = torch.tensor([[entropy(view) for view in views]])
    votes, weights = votes_of_views(logits, entropies, share)
    naive = naive_zero([list(view) for view in views], share)
    assert votes[0].tolist() == pytest.approx(naive["probs"])
    assert weights[0].tolist() == pytest.approx(naive["weights"])
    return votes[0].tolist(), weights[0].tolist()


def test_a_majority_needs_no_further_vote() -> None:
    votes, weights = vote(sure(1, 9), sure(2, 8), sure(1, 7), sure(2, 3), share=0.75)
    assert votes == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert weights == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_a_tie_is_broken_by_the_next_view_that_chooses_one_of_the_tied() -> None:
    votes, weights = vote(sure(1, 9), sure(2, 8), sure(3, 7), sure(2, 6), sure(1, 5), share=0.4)
    assert votes == pytest.approx([0, 1 / 3, 2 / 3, 0])
    assert weights == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 0])


def test_if_no_view_chooses_one_of_the_tied_the_next_one_decides_by_its_logits() -> None:
    votes, weights = vote(sure(1, 9), sure(2, 8), [0.0, 1.0, 2.0, 7.0], [6.0, 3.0, 0.0, 0.0], share=0.5)
    assert votes == pytest.approx([0, 1 / 3, 2 / 3, 0])
    assert weights == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_if_every_view_has_voted_the_most_certain_decides() -> None:
    votes, weights = vote(sure(1, 8), sure(2, 9), share=1.0)
    assert votes == pytest.approx([0, 1 / 3, 2 / 3, 0])
    assert weights == pytest.approx([1 / 3, 2 / 3])


def test_equal_names_share_a_vote_and_the_first_of_them_wins() -> None:
    both = [0.0, 9.0, 9.0, 0.0]
    votes, _ = vote(both, both, [0.0, 5.0, 5.0, 0.0], sure(0, 2), share=0.5)
    assert votes == [0, 0.5, 0.5, 0]
    assert votes.index(max(votes)) == 1


@pytest.mark.parametrize("classes", [5, 9, 10, 47])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_names_share_votes_however_the_products_round(classes: int, dtype: torch.dtype) -> None:
    features, text = (tensor.to(dtype) for tensor in episode(40, classes, seed=classes, images=20))
    text[-1] = text[0]
    features = normalize(features + text[0], dim=-1)
    result = run(methods.get("zero"), features, text, 20.0)
    assert torch.equal(result.probs[:, 0], result.probs[:, -1])
    torch.testing.assert_close(result.probs.sum(dim=1), torch.ones(20, dtype=dtype))
    assert (result.probs.argmax(dim=1) == 0).sum() > 5
    single = run(methods.get("zero"), features, text[:-1], 20.0)
    assert not (result.view_labels == classes - 1).any()
    assert torch.equal(result.view_labels, single.view_labels)


def test_seven_sevenths_are_a_whole_vote() -> None:
    sevenths = [9.0] * 7 + [0.0]
    votes, _ = vote(*[sevenths] * 7, sure(7, 1, classes=8), sure(7, 0.5, classes=8), share=0.9)
    assert votes == pytest.approx([1 / 9] * 7 + [2 / 9])


def test_more_voters_than_views_are_all_views() -> None:
    features, text = episode(5, 3, seed=1)
    assert (run(methods.get("zero", voters=1.0), features, text, 20.0).weights > 0).all()
