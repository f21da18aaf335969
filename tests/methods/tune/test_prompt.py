"""The prompt tuner: one AdamW step as the formula has it, several as PyTorch has them, and no image touches another."""

import pytest
import torch
from torch import Tensor

from models.tiny import TINY_VIT, disturbed
from usetta.methods.tune.prompt import PromptTuner
from usetta.prompts import ClassPrompts

NAMES = ["cat", "red-breasted merganser", "kite (bird of prey)", "hen", "great grey owl"]


@pytest.fixture(scope="module")
def prompts() -> ClassPrompts:
    return ClassPrompts(disturbed(TINY_VIT).text.double(), NAMES)


def pulls(images: int, seed: int = 0, classes: int = len(NAMES)) -> Tensor:
    """Gradients (A, C, D) with respect to text features."""
    return torch.randn(images, classes, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tuner_of(prompts: ClassPrompts, images: int) -> PromptTuner:
    return PromptTuner(prompts, images, lr=5e-3, weight_decay=0.01)


def by_autograd(prompts: ClassPrompts, steps: list[Tensor]) -> Tensor:
    """The context after steps against gradients (C, D), each taken through the text tower by autograd."""
    context = torch.nn.Parameter(prompts.context.clone())
    optimizer = torch.optim.AdamW([context], lr=5e-3, weight_decay=0.01)
    for pull in steps:
        optimizer.zero_grad()
        (prompts.encode(context[None])[0] * pull).sum().backward()
        optimizer.step()
    return context.detach()


def test_the_first_step_has_the_same_size_in_every_coordinate(prompts: ClassPrompts) -> None:
    tuner = tuner_of(prompts, 2)
    start = prompts.context.clone()
    pull = pulls(2)
    tuner.step([0, 1], pull)
    for context, g in zip(map(tuner.context, range(2)), prompts.pullback(pull), strict=True):
        assert g.abs().min() > 1e-5, "the pull must be well above AdamW's ε"
        moved = context - start * (1 - 5e-3 * 0.01)
        torch.testing.assert_close(moved, -5e-3 * g.sign(), atol=1e-5, rtol=0)
        torch.testing.assert_close(moved, -5e-3 * g / (g.abs() + 1e-8), atol=1e-15, rtol=1e-12)


def test_without_a_gradient_the_context_only_decays(prompts: ClassPrompts) -> None:
    tuner = tuner_of(prompts, 1)
    tuner.step([0], torch.zeros(1, len(NAMES), 24, dtype=torch.float64))
    torch.testing.assert_close(tuner.context(0), prompts.context * (1 - 5e-5), atol=1e-16, rtol=0)


def test_several_steps_are_pytorch_s(prompts: ClassPrompts) -> None:
    tuner = tuner_of(prompts, 2)
    pull = [pulls(2, seed) for seed in range(4)]
    for step in pull:
        features = tuner.step([0, 1], step)
    for i in range(2):
        expected = by_autograd(prompts, [step[i] for step in pull])
        torch.testing.assert_close(tuner.context(i), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(features[i], prompts.encode(expected[None])[0], atol=1e-11, rtol=0)


def test_an_image_that_is_left_out_keeps_its_context_and_its_moments(prompts: ClassPrompts) -> None:
    tuner = tuner_of(prompts, 3)
    a, b, c = pulls(3, 0), pulls(3, 1), pulls(3, 2)
    tuner.step([0, 2], a[[0, 2]])
    at_rest = tuner.context(2).clone()
    tuner.step([0], b[:1])
    assert torch.equal(tuner.context(2), at_rest)
    assert torch.equal(tuner.context(1), prompts.context)
    tuner.step([2, 0], c[[2, 0]])  # in any order
    assert torch.equal(tuner.context(1), prompts.context)
    for i, steps in ((0, [a[0], b[0], c[0]]), (2, [a[2], c[2]])):
        torch.testing.assert_close(tuner.context(i), by_autograd(prompts, steps), atol=1e-12, rtol=0)


def test_those_at_the_start_and_those_on_their_way_go_together(prompts: ClassPrompts) -> None:
    tuner = tuner_of(prompts, 2)
    a, b = pulls(2, 0), pulls(2, 1)
    tuner.step([1], a[1:])
    tuner.step([0, 1], b)
    for i, steps in enumerate(([b[0]], [a[1], b[1]])):
        torch.testing.assert_close(tuner.context(i), by_autograd(prompts, steps), atol=1e-12, rtol=0)


@pytest.mark.parametrize("steps", [1, 2])
def test_some_classes_are_all_of_them_with_no_pull_on_the_others(prompts: ClassPrompts, steps: int) -> None:
    classes = torch.tensor([3, 0, 4])
    few, all_of_them = tuner_of(prompts, 1), tuner_of(prompts, 1)
    for step in range(steps):
        pull = pulls(1, step, classes=3)
        everywhere = torch.zeros(1, len(NAMES), 24, dtype=torch.float64)
        everywhere[:, classes] = pull
        found, expected = few.step([0], pull, classes), all_of_them.step([0], everywhere)
        torch.testing.assert_close(few.context(0), all_of_them.context(0), atol=1e-12, rtol=0)
        torch.testing.assert_close(found, expected[:, classes], atol=1e-12, rtol=0)


def test_the_prompts_are_as_they_were(prompts: ClassPrompts) -> None:
    context, features = prompts.context.clone(), prompts.features().clone()
    tuner = tuner_of(prompts, 1)
    for step in range(2):
        returned = tuner.step([0], pulls(1, step))
    assert torch.equal(prompts.context, context)
    assert torch.equal(prompts.features(), features)
    assert prompts.context.grad is None
    assert not returned.requires_grad
    torch.testing.assert_close(tuner_of(prompts, 1).step([0], pulls(1)), tuner_of(prompts, 2).step([1], pulls(1)))
