"""TPS against its definition, one image at a time, and the gradient that is a formula against autograd."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from methods.test_mta import episode
from usetta import methods
from usetta.methods.recipe import run
from usetta.methods.tune.shift import ShiftTuner, through_normalize

SCALE = 20.0


def probabilities(view: Tensor, text: list[Tensor]) -> Tensor:
    powers = (SCALE * (torch.stack(text) @ view) - SCALE).exp()
    return powers / powers.sum()


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum()


def naive_tps(features: Tensor, text: Tensor, *, lr: float, steps: int, decay: float = 0.01) -> tuple[Tensor, Tensor]:
    """The text features of one image (N, D) after tuning, and its answer from the weak view."""
    entropies = [float(entropy(probabilities(view, list(text)))) for view in features]
    confident = sorted(range(len(features)), key=lambda i: entropies[i])[: max(1, int(0.1 * len(features)))]
    shift = torch.zeros_like(text)
    first, second = torch.zeros_like(text), torch.zeros_like(text)
    for step in range(1, steps + 1):
        leaf = shift.clone().requires_grad_()
        tuned = [(row + delta) / (row + delta).square().sum().sqrt() for row, delta in zip(text, leaf, strict=True)]
        mean = torch.stack([probabilities(features[i], tuned) for i in confident]).mean(dim=0)
        (gradient,) = torch.autograd.grad(entropy(mean), leaf)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        shift = shift * (1 - lr * decay)
        shift = shift - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    tuned = [row + delta for row, delta in zip(text, shift, strict=True)]
    tuned = [row / math.sqrt(row @ row) for row in tuned]
    return torch.stack(tuned), probabilities(features[0], tuned)


@pytest.mark.parametrize(("views", "classes"), [(2, 1), (2, 3), (11, 2), (64, 37), (64, 200), (5, 5)])
@pytest.mark.parametrize("steps", [1, 3])
def test_tps_is_its_definition(views: int, classes: int, steps: int) -> None:
    features, text = episode(views, classes, seed=views + classes)
    result = run(methods.get("tps", steps=steps), features, text, SCALE)
    single = run(methods.get("tps", steps=steps), features.float(), text.float(), SCALE)
    for i, image in enumerate(features):
        _, naive = naive_tps(image, text, lr=1e-3, steps=steps)
        torch.testing.assert_close(result.probs[i], naive, atol=1e-9, rtol=0)
        torch.testing.assert_close(single.probs[i].double(), naive, atol=1e-5, rtol=0)


def test_the_formula_through_normalize_is_autograd_s() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors, grad = (torch.randn(3, 5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    leaf = vectors.clone().requires_grad_()
    (expected,) = torch.autograd.grad(normalize(leaf, dim=-1), leaf, grad)
    torch.testing.assert_close(through_normalize(vectors, grad), expected, atol=1e-14, rtol=0)


def test_a_step_has_the_size_of_the_learning_rate() -> None:
    _, text = episode(2, 4, seed=1)
    tuner = ShiftTuner(text, 2, lr=1e-3, weight_decay=0.01)
    grad = torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = tuner.step([1], 1e6 * grad)
    sign = through_normalize(text, grad[0]).sign()
    torch.testing.assert_close(moved[0], normalize(text - 1e-3 * sign, dim=-1), atol=1e-12, rtol=0)


def test_images_left_alone_stay_where_they_are() -> None:
    _, text = episode(2, 4, seed=1)
    together, alone = (ShiftTuner(text, images, lr=1e-3, weight_decay=0.01) for images in (3, 1))
    grad = torch.randn(3, 4, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    together.step([0, 1, 2], grad)
    together.step([0, 2], -grad[[0, 2]])
    last = together.step([1], grad[1:2])
    alone.step([0], grad[1:2])
    torch.testing.assert_close(last, alone.step([0], grad[1:2]), atol=0, rtol=0)


def test_some_classes_alone_move_as_they_would_among_all() -> None:
    _, text = episode(2, 6, seed=1)
    some = torch.tensor([4, 1])
    grad = torch.randn(1, 6, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    everything = ShiftTuner(text, 1, lr=1e-3, weight_decay=0.01).step([0], grad)
    moved = ShiftTuner(text, 1, lr=1e-3, weight_decay=0.01).step([0], grad[:, some], some)
    torch.testing.assert_close(moved, everything[:, some], atol=0, rtol=0)


def test_memory_for_the_shifts_is_reckoned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, build = [], ShiftTuner.__init__

    def noting(tuner: ShiftTuner, text: Tensor, images: int, **settings: float) -> None:
        sizes.append(images)
        build(tuner, text, images, **settings)

    monkeypatch.setattr(ShiftTuner, "__init__", noting)
    features, text = episode(4, 100, seed=0, images=7)
    per_image = 100 * (4 * 4 + 9 * 12) * 8
    monkeypatch.setattr("usetta.methods.recipe._MEMORY", 3 * per_image)
    run(methods.get("tps"), features, text, SCALE)
    assert sizes == [3, 3, 1]


def test_half_precision_is_computed_in_single() -> None:
    features, text = (tensor.half() for tensor in episode(16, 5, seed=4))
    result = run(methods.get("tps"), features, text, SCALE)
    expected = run(methods.get("tps"), features.float(), text.float(), SCALE)
    assert result.probs.dtype == torch.float32
    assert torch.equal(result.probs, expected.probs)
