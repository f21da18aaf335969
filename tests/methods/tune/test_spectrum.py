"""STS against its definition, one image at a time, and the rank that decides how many directions there are."""

import statistics

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from methods.tune.test_shift import SCALE, entropy, probabilities
from usetta import methods
from usetta.methods.recipe import run
from usetta.methods.tune.shift import through_normalize
from usetta.methods.tune.spectrum import SpectrumTuner, main_directions, rank


def episode(views: int, classes: int, seed: int, images: int = 2, dim: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, dim, generator=generator, dtype=torch.float64)
    features = centre + 0.8 * torch.randn(images, views, dim, generator=generator, dtype=torch.float64)
    common = 2 * torch.randn(2, dim, generator=generator, dtype=torch.float64)
    mixture = torch.randn(classes, 2, generator=generator, dtype=torch.float64)
    text = mixture @ common + torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    return normalize(features, dim=-1), normalize(text, dim=-1)


def naive_basis(text: Tensor) -> Tensor:
    _, values, directions = np.linalg.svd(text.numpy())
    classes, dim = text.shape
    b = min(classes, dim) / max(classes, dim)
    omega = 0.56 * b**3 - 0.95 * b**2 + 1.82 * b + 1.43
    kept = sum(value > omega * statistics.median(values.tolist()) for value in values)
    return torch.from_numpy(directions[: max(1, kept)].T.copy())


def naive_sts(features: Tensor, text: Tensor, *, steps: int, penalty: float = 0.0) -> dict[str, Tensor]:
    """The answers for one image (N, D): the mean of the selected views, and the weak view."""
    entropies = [float(entropy(probabilities(view, list(text)))) for view in features]
    confident = sorted(range(len(features)), key=lambda i: entropies[i])[: max(1, int(0.1 * len(features)))]
    basis = naive_basis(text)
    gamma = torch.zeros(basis.shape[1], dtype=torch.float64)
    first, second = torch.zeros_like(gamma), torch.zeros_like(gamma)
    for step in range(1, steps + 1):
        leaf = gamma.clone().requires_grad_()
        shift = basis @ leaf
        tuned = [(row + shift) / (row + shift).square().sum().sqrt() for row in text]
        loss = entropy(torch.stack([probabilities(features[i], tuned) for i in confident]).mean(dim=0))
        if gamma.any():  # at zero the length has no gradient
            loss = loss + penalty * shift.square().sum().sqrt()
        (gradient,) = torch.autograd.grad(loss, leaf)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        gamma = gamma * (1 - 5e-3 * 0.01)
        gamma = gamma - 5e-3 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    tuned = [row + basis @ gamma for row in text]
    tuned = [row / row.square().sum().sqrt() for row in tuned]
    return {
        "selected": torch.stack([probabilities(features[i], tuned) for i in confident]).mean(dim=0),
        "weak": probabilities(features[0], tuned),
    }


@pytest.mark.parametrize(("views", "classes"), [(2, 1), (2, 3), (11, 2), (64, 37), (64, 200), (5, 12)])
@pytest.mark.parametrize(("steps", "penalty"), [(1, 0.0), (3, 0.0), (3, 2.0)])
def test_sts_is_its_definition(views: int, classes: int, steps: int, penalty: float) -> None:
    features, text = episode(views, classes, seed=views + classes)
    settings = {"steps": steps, "penalty": penalty}
    selected, weak = (run(methods.get(name, **settings), features, text, SCALE) for name in ("sts", "sts+weak"))
    single = run(methods.get("sts", **settings), features.float(), text.float(), SCALE)
    for i, image in enumerate(features):
        naive = naive_sts(image, text, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(selected.probs[i], naive["selected"], atol=1e-8, rtol=0)
        torch.testing.assert_close(weak.probs[i], naive["weak"], atol=1e-8, rtol=0)
        torch.testing.assert_close(single.probs[i].double(), naive["selected"], atol=1e-5, rtol=0)
    assert selected.weights.sort(dim=1).values[:, : -max(1, views // 10)].abs().max() == 0


def test_one_step_does_not_feel_the_penalty_and_a_second_does() -> None:
    features, text = episode(64, 20, seed=0)
    free, bound = (run(methods.get("sts", penalty=penalty), features, text, SCALE) for penalty in (0.0, 1e6))
    assert torch.equal(free.probs, bound.probs)
    free, bound = (run(methods.get("sts", steps=2, penalty=penalty), features, text, SCALE) for penalty in (0.0, 1e6))
    assert (free.probs - bound.probs).abs().max() > 1e-5


def test_a_shift_that_all_classes_share_is_nothing_to_a_softmax_until_it_is_normalised() -> None:
    features, text = episode(8, 20, seed=1)
    shifted = text + 0.3 * main_directions(text).sum(dim=1)
    before, without, normalised = (
        (SCALE * features @ t.T).softmax(dim=-1) for t in (text, shifted, normalize(shifted, dim=-1))
    )
    torch.testing.assert_close(without, before, atol=1e-12, rtol=0)
    assert (normalised - before).abs().max() > 1e-3


def test_the_directions_are_orthonormal_and_as_many_as_stand_out() -> None:
    _, text = episode(2, 200, seed=3, dim=40)
    basis = main_directions(text)
    assert basis.shape == naive_basis(text).shape == (40, 2)
    torch.testing.assert_close(basis.T @ basis, torch.eye(2, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(basis @ basis.T, naive_basis(text) @ naive_basis(text).T, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("values", "shape", "expected"),
    [
        ([9.0, 1.0, 1.0, 1.0], (4, 400), 1),
        ([9.0, 8.0, 1.0, 1.0, 1.0], (400, 5), 2),
        ([1.0, 1.0, 1.0], (3, 3), 1),
        ([1.0], (1, 512), 1),
        ([2.87, 1.0, 1.0], (3, 3), 1),  # the threshold of a square matrix is 2.86 medians
        ([2.87, 2.87, 1.0, 1.0, 1.0], (5, 5), 2),
        ([2.85, 2.85, 1.0, 1.0, 1.0], (5, 5), 1),
        ([6.0, 4.0, 2.0, 1.0], (4, 400), 1),  # the median of an even number is the mean of the two in the middle
    ],
)
def test_the_rank_is_gavish_and_donoho_s_and_at_least_one(
    values: list[float], shape: tuple[int, int], expected: int
) -> None:
    assert rank(torch.tensor(values), shape) == expected


def test_directions_are_remembered_until_the_text_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    decompositions = []
    svd = torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda *a, **k: decompositions.append(1) or svd(*a, **k))
    features, text = episode(4, 10, seed=5)
    for _ in range(3):
        run(methods.get("sts"), features, text, SCALE)
    assert len(decompositions) == 1
    text[0] = -text[0]
    run(methods.get("sts"), features, text, SCALE)
    assert len(decompositions) == 2
    with torch.inference_mode():
        run(methods.get("sts"), features, text.clone(), SCALE)
    assert len(decompositions) == 3


def test_some_classes_alone_pull_by_themselves() -> None:
    _, text = episode(2, 6, seed=1)
    some = torch.tensor([4, 1])
    grad = torch.randn(1, 2, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = SpectrumTuner(text, 1, lr=5e-3, weight_decay=0.0).step([0], 1e6 * grad, some)
    basis = main_directions(text)
    sign = (basis.T @ through_normalize(text[some], grad[0]).sum(dim=0)).sign()
    torch.testing.assert_close(moved[0], normalize(text[some] - 5e-3 * basis @ sign, dim=-1), atol=1e-12, rtol=0)
