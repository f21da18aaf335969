"""What tuning promises, whatever the images: skipping, batches, memory, and tuning some of the classes only."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from methods.test_recipe import episode
from models.tiny import TINY_VIT, disturbed
from usetta import methods
from usetta.methods import recipe
from usetta.methods.losses import dispersion, orthogonality
from usetta.methods.recipe import Result, run
from usetta.methods.tune.prompt import PromptTuner
from usetta.models.clip import TextTransformer
from usetta.prompts import ClassPrompts

NAMES = ["cat", "red-breasted merganser", "kite (bird of prey)", "hen", "great grey owl", "axolotl", "newt", "747-400"]
TUNED = [
    "use",
    "use:steps=4",
    "use:steps=4:skip=false:se_stats=post",
    "rce+uniform:rho=0.3",
    "tpt",
    "tpt+se:steps=3",
    "tpt-rce",
    "c-tpt",
    "c-tpt+se:steps=2",
    "r-tpt",
    "r-tpt+se:se_stats=pre",
    "use:active=3",
    "use:active=3:steps=3",
]
SCALE = 20.0
SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def tower() -> TextTransformer:
    return disturbed(TINY_VIT).text.double()


@pytest.fixture(scope="module")
def birds(tower: TextTransformer) -> ClassPrompts:
    return ClassPrompts(tower, NAMES)


def views_of(images: int, views: int = 24, seed: int = 0) -> Tensor:
    """Features (B, N, 24) of views, of which some agree about a class and some do not."""
    return episode(views, 1, seed, images, dim=24)[0].double()


def assert_equal(result: Result, expected: Result, atol: float = 1e-9) -> None:
    for field in fields(Result):
        ours, theirs = getattr(result, field.name), getattr(expected, field.name)
        torch.testing.assert_close(ours, theirs, atol=atol if ours.is_floating_point() else 0, rtol=0, msg=field.name)


def picked(result: Result, images: list[int]) -> Result:
    return Result(*(getattr(result, field.name)[images] for field in fields(Result)))


@pytest.mark.parametrize("method", TUNED)
def test_a_batch_is_its_images_one_by_one_in_any_order(method: str, birds: ClassPrompts) -> None:
    features = views_of(6)
    together = run(methods.get(method), features, birds, SCALE)
    for i in range(6):
        assert_equal(run(methods.get(method), features[i : i + 1], birds, SCALE), picked(together, [i]))
    order = [3, 5, 0, 4, 1, 2]
    assert_equal(run(methods.get(method), features[order], birds, SCALE), picked(together, order))


@pytest.mark.parametrize("method", TUNED)
def test_a_batch_that_does_not_fit_goes_through_in_parts(
    method: str, birds: ClassPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, parts = views_of(5), []
    whole = run(methods.get(method), features, birds, SCALE)
    monkeypatch.setattr(recipe, "_run", lambda *a, run_part=recipe._run: parts.append(len(a[1])) or run_part(*a))
    monkeypatch.setattr(recipe, "_MEMORY", 30_000)
    assert_equal(run(methods.get(method), features, birds, SCALE), whole)
    assert parts == [2, 2, 1]


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 70), SEEDS)
def test_where_views_agree_nothing_is_tuned_and_the_answer_is_se_s(birds: ClassPrompts, views: int, seed: int) -> None:
    features = views_of(6, views, seed)
    use, se, clip, uniform = (run(methods.get(m), features, birds, SCALE) for m in ("use", "se", "clip", "uniform"))
    for i in range(6):
        votes = {use.view_labels[i, v].item() for v in [0, *se.chosen[i].tolist()]}
        assert use.skipped[i].item() == (len(votes) == 1)
        if use.skipped[i]:
            assert torch.equal(use.probs[i], se.probs[i])
            assert torch.equal(use.before[i], se.probs[i])
            assert {r.probs[i].argmax().item() for r in (use, se, clip, uniform)} == votes
        else:
            assert not torch.allclose(use.probs[i], se.probs[i], atol=1e-6)
        assert torch.equal(use.before[i], se.probs[i])
        assert torch.equal(use.weak_probs[i], clip.probs[i])


def test_some_images_are_skipped_and_some_are_not(birds: ClassPrompts) -> None:
    assert set(run(methods.get("use"), views_of(6), birds, SCALE).skipped.tolist()) == {True, False}
    for method in ("use:skip=false", "tpt", "c-tpt", "r-tpt"):
        assert not run(methods.get(method), views_of(6), birds, SCALE).skipped.any()


def test_once_the_views_agree_more_steps_change_nothing(birds: ClassPrompts) -> None:
    """Each image goes its own way to agreement, then its answer is SE's with the prompt that it has by then."""
    features = views_of(12, seed=3)
    answers = torch.stack([run(methods.get("use", steps=n), features, birds, SCALE).probs for n in range(1, 7)])
    with_skip, without = answers[-1], run(methods.get("use:steps=6:skip=false"), features, birds, SCALE).probs
    still = (answers[1:] - answers[:-1]).abs().amax(dim=2) == 0
    assert torch.equal(still, still.cummax(dim=0).values), "an image that stopped has started again"
    stopped_later = still[-1] & ~still[0]
    assert stopped_later.any()
    assert (with_skip - without)[stopped_later].abs().amax(dim=1).min() > 1e-4


@pytest.mark.parametrize("method", [method for method in TUNED if "active" not in method])
def test_weights_make_the_answer_of_the_views(
    method: str, birds: ClassPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, text = views_of(5), birds.features().repeat(5, 1, 1)
    step = PromptTuner.step

    def noted(tuner: PromptTuner, images: list[int], *pull: Tensor, **how: Any) -> Tensor:
        text[images] = step(tuner, images, *pull, **how)
        return text[images]

    monkeypatch.setattr(PromptTuner, "step", noted)
    result = run(methods.get(method), features, birds, SCALE)
    assert not torch.equal(text, birds.features().expand(5, -1, -1))
    logits, weights = SCALE * features @ text.mT, result.weights[:, :, None]
    if methods.get(method).readout == "reliability":
        expected = (weights * logits).sum(dim=1).softmax(dim=-1)
    else:
        expected = (weights * logits.softmax(dim=-1)).sum(dim=1)
    torch.testing.assert_close(result.probs, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("method", TUNED)
def test_one_class_has_all_the_probability_and_its_context_only_decays(
    method: str, tower: TextTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    only, contexts, encode = ClassPrompts(tower, ["cat"]), [], ClassPrompts.encode
    monkeypatch.setattr(ClassPrompts, "encode", lambda self, some, *k: contexts.append(some) or encode(self, some, *k))
    unskipped = methods.get(method, skip=False)
    result = run(unskipped, views_of(3), only, SCALE)
    torch.testing.assert_close(result.probs, torch.ones(3, 1, dtype=torch.float64), atol=1e-15, rtol=0)
    decayed = only.context.expand(3, -1, -1) * (1 - 5e-5) ** unskipped.steps
    torch.testing.assert_close(contexts[-1], decayed, atol=1e-16, rtol=1e-14)


@pytest.mark.parametrize("active", [8, 9, 1000])
def test_all_classes_active_is_the_exact_answer(active: int, birds: ClassPrompts) -> None:
    for method in ("use:steps=2", "tpt"):
        result = run(methods.get(method, active=active), views_of(4), birds, SCALE)
        assert_equal(result, run(methods.get(method), views_of(4), birds, SCALE), atol=0)


@pytest.mark.parametrize("method", ["rce:skip=false", "tpt"])
@pytest.mark.parametrize("active", [1, 4, 6])
def test_classes_that_are_not_active_move_together(method: str, active: int, birds: ClassPrompts) -> None:
    result = run(methods.get(method, active=active), views_of(5), birds, SCALE)
    for before, after in zip(result.before.log(), result.probs.log(), strict=True):
        moves = (after - before).sort().values
        alike = (moves[:, None] - moves).abs() < 1e-10
        assert alike.sum(dim=1).max() == (8 - active if active > 1 else 8), "the tail of one is that one"


@pytest.mark.parametrize(
    "method", ["use:skip=false:active=3", "tpt:active=3", "use:skip=false:active=4", "c-tpt:active=3", "o-tpt:active=4"]
)
def test_active_classes_are_tuned_by_the_definition(method: str, birds: ClassPrompts) -> None:
    """Their text depends on the context; the text of the others moves by the mean move of their less probable half."""
    features, count = (
        views_of(4, seed=3),
        int(method[-1]),
    )  # the weak view, which TPT does not choose, has its own class
    result = run(methods.get(method), features, birds, SCALE)
    for i, views in enumerate(features):
        p = (SCALE * views @ birds.features().T).softmax(dim=-1)
        confident = result.entropies[i].argsort()[:2].tolist()
        members = [0, *result.chosen[i].tolist()] if method.startswith("use") else confident
        active = p[[0, *members]].amax(dim=0).topk(count).indices
        tail = active[count - count // 2 :]
        context = torch.nn.Parameter(birds.context.clone())
        optimizer = torch.optim.AdamW([context], lr=5e-3)

        def logits() -> Tensor:
            new = birds.encode(context[None])[0]  # noqa: B023
            text = birds.features() + (new - birds.features())[tail].mean(dim=0)  # noqa: B023
            return SCALE * views @ text.index_copy(0, active, new[active]).T  # noqa: B023

        mean = logits()[members].softmax(dim=-1).mean(dim=0)
        q = result.weights[i] @ p if method.startswith("use") else mean
        penalty = torch.zeros(())
        if method.startswith(("c-tpt", "o-tpt")):  # on all classes
            text = birds.encode(context[None])[0]
            penalty = -50 * dispersion(text) if method.startswith("c-tpt") else 18 * orthogonality(text)
        (penalty - (mean * q.log()).sum()).backward()
        optimizer.step()
        expected = result.weights[i] @ logits().detach().softmax(dim=-1)
        torch.testing.assert_close(result.probs[i], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", [*TUNED, "use:skip=false:active=2", "tpt:active=2", "se", "clip"])
def test_equal_names_get_equal_probabilities(method: str, tower: TextTransformer) -> None:
    twins = ClassPrompts(tower, [*NAMES, "hen"])
    probs = run(methods.get(method), views_of(6, seed=1), twins, SCALE).probs
    torch.testing.assert_close(probs[:, 3], probs[:, 8], atol=1e-12, rtol=0)


@pytest.mark.parametrize("classes", [5, 9, 10])
def test_views_that_choose_between_equal_names_agree(classes: int, tower: TextTransformer) -> None:
    """Equal names have equal logits up to rounding, and rounding must not be taken for disagreement."""
    twins = ClassPrompts(tower, [*(f"thing {i}" for i in range(classes - 1)), "thing 0"])
    text = twins.features()
    noise = torch.randn(20, 24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = normalize(text[0] - text.mean(dim=0) + 0.01 * noise, dim=-1)
    result = run(methods.get("use"), features, twins, 100.0)
    assert set(result.view_labels.flatten().tolist()) <= {0, classes - 1}, "all views must choose that name"
    assert result.skipped.all()
    assert (result.probs.argmax(dim=1) == 0).all()
