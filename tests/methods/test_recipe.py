"""What every recipe promises; self-ensembling against the paper's equations; bad input; whatever the caller's mode.

The tuned recipes are compared with their equations in `parity/test_tuning.py`.
"""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.tiny import TINY_VIT, disturbed
from usetta import methods
from usetta.methods.recipe import Recipe, run
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts

UNTUNED = [name for name in methods.names() if not methods.get(name).tunes]
PROMPT_TUNED = [name for name in methods.names() if methods.get(name).needs_prompts]
BLENDS = ["clip", "strong", "average", "uniform", "se"]
"""Methods whose answer is a weighted mean of the views' probabilities."""
SHAPES = st.tuples(st.integers(2, 128), st.sampled_from([1, 2, 3, 37, 1000]), st.integers(0, 2**32 - 1))


def episode(views: int, classes: int, seed: int, images: int = 2, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Unit-length features of views that resemble one another, and of classes."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, dim, generator=generator)
    features = centre + 0.8 * torch.randn(images, views, dim, generator=generator)
    text = torch.randn(classes, dim, generator=generator)
    return torch.nn.functional.normalize(features, dim=-1), torch.nn.functional.normalize(text, dim=-1)


def naive_se(features: Tensor, text: Tensor, scale: float, gamma: float = 0.4, rho: float = 0.1) -> dict[str, Any]:
    """SE of one image, one number at a time, from the paper's equations."""
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
def test_fixed_weights_are_the_other_readouts(shape: tuple[int, int, int]) -> None:
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
def test_where_the_chosen_views_agree_every_readout_agrees(shape: tuple[int, int, int]) -> None:
    features, text = episode(*shape)
    results = {name: run(methods.get(name), features, text, 20.0) for name in BLENDS}
    for i in range(2):
        votes = {results["se"].view_labels[i, v].item() for v in [0, *results["se"].chosen[i].tolist()]}
        if len(votes) == 1:
            assert {r.probs[i].argmax().item() for r in results.values()} == votes


def test_bad_input_is_named() -> None:
    features, text = episode(4, 3, seed=0)
    for bad in (math.nan, math.inf):
        spoilt = features.clone()
        spoilt[1, 3, 3] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            run(methods.get("se"), spoilt, text, 100.0)
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
        ({"rescaling": "cubic"}, "unknown rescaling 'cubic'; known: linear, root, square"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": -0.1}, "lr must not be negative"),
        ({"lr": math.nan}, "lr must not be negative, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative"),
        ({"dispersion": -1.0}, "dispersion must not be negative"),
        ({"active": -1}, "active must not be negative"),
        ({"tune": "prompt", "active": 10, "dispersion": 50.0, "steps": 2}, "dispersion changes all classes, so active"),
        ({"tune": "shift", "active": 10, "dispersion": 50.0}, "dispersion changes all classes"),
        ({"select": "few"}, "unknown selection rule 'few'; known: confident, weak\\+strong, all"),
        ({"tune": "image"}, "unknown tuner 'image'; known: nothing, prompt"),
        ({"loss": "ce"}, r"unknown loss 'ce'; did you mean 'rce'\?"),
        ({"label": "truth"}, "label must be one of se, mean"),
        (
            {"readout": "choir"},
            "unknown readout 'choir'; known: weak, strong, average, uniform, se, selected, feature, reliability",
        ),
        ({"se_stats": "both"}, "se_stats must be one of pre, post"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe("mine", **setting)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return disturbed(TINY_VIT)


@pytest.fixture(scope="module")
def zoo(model: CLIP) -> ClassPrompts:
    return ClassPrompts(model.text, ["cat", "red-breasted merganser", "kite (bird of prey)", "hen"])


def test_prompts_or_their_features_are_the_same_where_nothing_is_tuned(zoo: ClassPrompts) -> None:
    features, _ = episode(24, 1, seed=0, dim=24)
    for name in UNTUNED:
        by_prompts, by_features = (run(methods.get(name), features, text, 20.0) for text in (zoo, zoo.features()))
        assert torch.equal(by_prompts.probs, by_features.probs)


@pytest.mark.parametrize("name", BLENDS)
def test_weights_make_the_answer(name: str) -> None:
    features, text = episode(64, 37, seed=3, images=4)
    result = run(methods.get(name), features, text, 20.0)
    torch.testing.assert_close(result.weights.sum(dim=1), torch.ones(4))
    assert (result.weights >= 0).all()
    probs = (20.0 * features @ text.T).softmax(dim=-1)
    torch.testing.assert_close(result.probs, (result.weights[:, :, None] * probs).sum(dim=1))
    assert torch.equal(result.before, result.probs)
    assert not result.skipped.any()


@pytest.mark.parametrize("name", [*methods.names(), "use:steps=3", "use:active=2", "clip+reliability"])
def test_no_images_give_no_answers(name: str, zoo: ClassPrompts) -> None:
    result = run(methods.get(name), torch.zeros(0, 64, 24), zoo, 20.0)
    assert result.probs.shape == result.before.shape == result.weak_probs.shape == (0, 4)
    assert result.weights.shape == result.entropies.shape == result.view_labels.shape == (0, 64)
    assert result.chosen.shape == (0, 6)
    assert result.skipped.shape == result.delta.shape == result.beta.shape == (0,)


@pytest.mark.parametrize("name", PROMPT_TUNED)
def test_tuning_needs_prompts_and_two_views(name: str, zoo: ClassPrompts) -> None:
    features, _ = episode(8, 1, seed=0, dim=24)
    recipe = methods.get(name)
    with pytest.raises(ValueError, match=f"'{name}' tunes the prompt, so it needs ClassPrompts, not their features"):
        run(recipe, features, zoo.features(), 20.0)
    with pytest.raises(ValueError, match=f"'{name}' compares views, so it needs at least 2, not 1"):
        run(recipe, features[:, :1], zoo, 20.0)
    torch.testing.assert_close(run(recipe, features[:, :2], zoo, 20.0).probs.sum(dim=1), torch.ones(2))


@pytest.mark.parametrize("templates", [["a photo of a {}.", "itap of a {}."], "{}"])
def test_without_a_context_only_the_other_methods_work(model: CLIP, templates: str | list[str]) -> None:
    features, _ = episode(8, 1, seed=0, dim=24)
    prompts = ClassPrompts(model.text, ["cat", "dog", "hen"], templates)
    for name in (*UNTUNED, "tps", "sts"):
        assert run(methods.get(name), features, prompts, 20.0).probs.shape == (2, 3)
    for name in PROMPT_TUNED:
        with pytest.raises(ValueError, match="there is no context to tune"):
            run(methods.get(name, skip=False), features, prompts, 20.0)


def test_whether_there_is_a_context_does_not_depend_on_the_images(model: CLIP) -> None:
    """Where all views agree USE tunes nothing, but the next image would stop the run."""
    ensemble = ClassPrompts(model.text, ["cat", "dog", "hen"], ["a photo of a {}.", "itap of a {}."])
    agreeing = episode(1, 1, seed=0, dim=24)[0].expand(-1, 8, -1)
    for features in (agreeing, agreeing[:0]):
        with pytest.raises(ValueError, match="there is no context to tune"):
            run(methods.get("use"), features, ensemble, 20.0)


@pytest.mark.parametrize(
    "name", ["se", "use:skip=false", "use:steps=2", "tpt", "c-tpt:steps=2", "r-tpt", "use:active=2"]
)
def test_the_caller_s_mode_does_not_matter_and_nothing_is_left_behind(name: str, model: CLIP) -> None:
    names = ["cat", "red-breasted merganser", "kite (bird of prey)", "hen"]
    answers = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            prompts = ClassPrompts(model.text, names)
            features, _ = episode(24, 1, seed=4, images=3, dim=24)
            result = run(methods.get(name), features, prompts, 20.0)
        answers.append(result)
        for field in fields(result):
            assert not getattr(result, field.name).requires_grad
            assert not getattr(result, field.name).is_inference()
        # What was built in one mode serves in every other.
        again = run(methods.get(name), features, prompts, 20.0)
        assert torch.equal(again.probs, result.probs)
    for other in answers[1:]:
        for field in fields(other):
            assert torch.equal(getattr(other, field.name), getattr(answers[0], field.name))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())


def test_features_that_want_a_gradient_get_none(zoo: ClassPrompts) -> None:
    features = episode(24, 1, seed=4, dim=24)[0].requires_grad_()
    result = run(methods.get("use:skip=false"), features, zoo, 20.0)
    assert not result.probs.requires_grad
    assert features.grad is None
    assert torch.equal(result.probs, run(methods.get("use:skip=false"), features.detach(), zoo, 20.0).probs)
