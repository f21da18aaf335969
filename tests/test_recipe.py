"""What self-ensembling promises, over many shapes and against the paper's equations written out naively."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from usetta import methods
from usetta.recipe import Recipe, run

UNTUNED = [name for name in methods.names() if not methods.get(name).tunes]
SHAPES = st.tuples(st.integers(2, 128), st.sampled_from([1, 2, 3, 37, 1000]), st.integers(0, 2**32 - 1))


def episode(views: int, classes: int, seed: int, pictures: int = 2, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Unit-length features of views that resemble one another, and of classes."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(pictures, 1, dim, generator=generator)
    features = centre + 0.8 * torch.randn(pictures, views, dim, generator=generator)
    text = torch.randn(classes, dim, generator=generator)
    return torch.nn.functional.normalize(features, dim=-1), torch.nn.functional.normalize(text, dim=-1)


def naive_se(features: Tensor, text: Tensor, scale: float, gamma: float = 0.4, rho: float = 0.1) -> dict[str, Any]:
    """SE of one picture, one number at a time, from the paper's equations."""
    probs, entropies = [], []
    for view in features.double().tolist():
        logits = [scale * sum(a * b for a, b in zip(view, row, strict=True)) for row in text.double().tolist()]
        top = max(logits)
        total = sum(math.exp(z - top) for z in logits)
        p = [math.exp(z - top) / total for z in logits]
        probs.append(p)
        entropies.append(-sum(x * math.log(x) for x in p if x > 0))
    strong = sorted(range(1, len(probs)), key=lambda i: entropies[i])
    chosen = strong[: max(1, int((len(probs) - 1) * rho))]
    delta = sum(h > entropies[0] for h in entropies[1:]) / (len(probs) - 1)
    beta = 0.5 + gamma * (delta - 0.5)
    mean = [sum(probs[i][c] for i in chosen) / len(chosen) for c in range(len(text))]
    q = [beta * weak + (1 - beta) * s for weak, s in zip(probs[0], mean, strict=True)]
    return {"q": q, "chosen": chosen, "delta": delta, "beta": beta, "entropies": entropies}


@pytest.mark.parametrize("views", [2, 7, 64, 128])
@pytest.mark.parametrize("classes", [1, 2, 37])
def test_se_is_what_the_paper_says(views: int, classes: int) -> None:
    features, text = episode(views, classes, seed=views + classes)
    features, text = features.double(), text.double()
    result = run(methods.get("se"), features, text, 10.0)
    for i in range(len(features)):
        naive = naive_se(features[i], text, 10.0)
        assert result.probs[i].tolist() == pytest.approx(naive["q"], abs=1e-12)
        assert result.entropies[i].tolist() == pytest.approx(naive["entropies"], abs=1e-12)
        if classes > 1:  # with one class all entropies are zero up to rounding, and the rank means nothing
            assert result.chosen[i].tolist() == naive["chosen"]
            assert result.delta[i].item() == pytest.approx(naive["delta"])
            assert result.beta[i].item() == pytest.approx(naive["beta"])


@settings(deadline=None, max_examples=40)
@given(SHAPES)
def test_probabilities_sum_to_one_and_beta_stays_in_its_range(shape: tuple[int, int, int]) -> None:
    features, text = episode(*shape)
    for name in UNTUNED:
        result = run(methods.get(name), features, text, 100.0)
        torch.testing.assert_close(result.probs.sum(-1), torch.ones(2))
        assert (result.probs >= 0).all()
    assert ((run(methods.get("se"), features, text, 100.0).beta - 0.5).abs() <= 0.2 + 1e-6).all()


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.randoms(use_true_random=False))
def test_the_order_of_strong_views_changes_nothing(shape: tuple[int, int, int], random: Any) -> None:
    features, text = episode(*shape)
    order = [0, *random.sample(range(1, shape[0]), shape[0] - 1)]
    for name in UNTUNED:
        one, other = (run(methods.get(name), f, text, 20.0) for f in (features, features[:, order]))
        torch.testing.assert_close(one.probs, other.probs, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(SHAPES)
def test_fixed_weights_are_the_other_read_outs(shape: tuple[int, int, int]) -> None:
    features, text = episode(*shape)
    weak = (30.0 * features[:, 0] @ text.T).softmax(-1)
    torch.testing.assert_close(run(methods.get("se", beta=1), features, text, 30.0).probs, weak)
    torch.testing.assert_close(run(methods.get("clip"), features[:, :1], text, 30.0).probs, weak)
    size = 1 + max(1, int((shape[0] - 1) * 0.1))
    uniform = run(methods.get("uniform"), features, text, 30.0)
    torch.testing.assert_close(uniform.probs, run(methods.get("se", beta=1 / size), features, text, 30.0).probs)
    for i in range(2):
        members = [0, *uniform.chosen[i].tolist()]
        torch.testing.assert_close(uniform.probs[i], (30.0 * features[i, members] @ text.T).softmax(-1).mean(0))


@settings(deadline=None, max_examples=40)
@given(SHAPES)
def test_where_the_chosen_views_agree_every_read_out_agrees(shape: tuple[int, int, int]) -> None:
    features, text = episode(*shape)
    results = {name: run(methods.get(name), features, text, 20.0) for name in UNTUNED}
    for i in range(2):
        votes = {results["se"].view_labels[i, v].item() for v in [0, *results["se"].chosen[i].tolist()]}
        if len(votes) == 1:
            assert {r.probs[i].argmax().item() for r in results.values()} == votes


def test_a_batch_is_its_pictures_one_by_one() -> None:
    features, text = episode(64, 100, seed=5, pictures=7)
    together = run(methods.get("se"), features, text, 100.0)
    for i in range(7):
        alone = run(methods.get("se"), features[i : i + 1], text, 100.0)
        torch.testing.assert_close(together.probs[i], alone.probs[0], atol=1e-6, rtol=1e-4)
        assert together.chosen[i].tolist() == alone.chosen[0].tolist()


def test_a_set_of_seven_with_the_paper_s_numbers() -> None:
    features, text = episode(64, 10, seed=1)
    assert run(methods.get("se"), features, text, 100.0).chosen.shape == (2, 6)


def test_bad_input_is_named() -> None:
    features, text = episode(4, 3, seed=0)
    with pytest.raises(ValueError, match="NaN or infinity"):
        run(methods.get("se"), features * float("nan"), text, 100.0)
    with pytest.raises(ValueError, match="needs at least 2, not 1"):
        run(methods.get("se"), features[:, :1], text, 100.0)
    with pytest.raises(ValueError, match="at least one view and one class"):
        run(methods.get("se"), features, text[:0], 100.0)
    with pytest.raises(ValueError, match=r"\(2, 4, 16\) and \(3, 8\)"):
        run(methods.get("se"), features, text[:, :8], 100.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"beta": 1.5}, "beta must be"),
        ({"beta": "half"}, "beta must be"),
        ({"gamma": -0.1}, "gamma must be"),
        ({"rho": 0.0}, "rho must be"),
        ({"rescaling": "cubic"}, "rescaling must be one of linear, root, square"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe("mine", **setting)
