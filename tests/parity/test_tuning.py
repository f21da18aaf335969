"""The engine against prompt tuning by the book: gradients, contexts, decisions and answers, in both precisions.

The reference always runs in float64. In float64 the comparison needs no care: rounding moves a gradient by 1e-14, far
below AdamW's ε = 1e-8, so that even a coordinate at zero steps the same way. In float32 rounding is above ε, and the
first step g / (|g| + ε) of a coordinate near zero may have either sign. There, what comes after the first gradient is
compared for the images that have no such coordinate, which must be most of them. Ties in the decisions (entropies,
classes) are not to be feared: features are drawn at random, and a gap of 1e-5 among a few dozen numbers is rare.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from naive_tuning import How, Outcome, Prompts, adapt
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from models.tiny import TINY_RESNET, TINY_TEXT, TINY_VIT, disturbed
from test_prompts import WORDS, Bidirectional, Tower, names_of
from usetta import methods
from usetta.methods.recipe import Result, run
from usetta.methods.tune.adamw import PerImage
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts

NAMES = names_of(10)[:9]
USE = {"loss": "rce", "skip": True, "stats": "pre"}
TPT = {"loss": "mem", "confident": True}
CENTRAL = {
    "se": How(),
    "use": How(**USE),
    "use:steps=4": How(**USE, steps=4),
    "use:steps=4:skip=false": How(**{**USE, "skip": False}, steps=4),
    "tpt": How(**TPT, answer="weak"),
    "tpt+se:steps=2": How(**TPT, steps=2),
    "tpt-rce": How("rce to the mean", confident=True, answer="weak"),
    "c-tpt": How(**TPT, spread=50, answer="weak"),
    "r-tpt": How("pointwise", confident=True, answer="reliability"),
}
METHODS = {
    **CENTRAL,
    # Readouts of the untuned model, and how β comes about.
    "clip": How(answer="weak"),
    "strong": How(answer="strong"),
    "average": How(answer="average"),
    "uniform": How(answer="uniform"),
    "clip+reliability": How(answer="reliability"),
    "se:beta=0": How(beta=0.0),
    "se:beta=uniform": How(beta="uniform"),
    "se:rescaling=root": How(power=0.5),
    "se:rescaling=square:gamma=1": How(power=2, gamma=1),
    "se:gamma=0.8:rho=0.3": How(gamma=0.8, rho=0.3),
    # USE: β is that of the pseudo-label and of the answer.
    "use:beta=0": How(**USE, beta=0.0),
    "use:beta=0.5": How(**USE, beta=0.5),
    "use:beta=1": How(**USE, beta=1.0),
    "use:beta=uniform": How(**USE, beta="uniform"),
    "use:gamma=0.8": How(**USE, gamma=0.8),
    "use:rho=0.3": How(**USE, rho=0.3),
    "use:rescaling=root": How(**USE, power=0.5),
    "use:rescaling=square": How(**USE, power=2),
    "use:skip=false": How(**{**USE, "skip": False}),
    "use:lr=0.02": How(**USE, lr=0.02),
    "use:steps=2": How(**USE, steps=2),
    "use:steps=6:lr=0.001": How(**USE, steps=6, lr=0.001),
    "use:steps=2:se_stats=post": How(**{**USE, "stats": "post"}, steps=2),
    "use:weight_decay=0.5": How(**USE, weight_decay=0.5),
    "rce": How(**USE, answer="weak"),
    "rce+uniform": How(**USE, answer="uniform"),
    # The others, with their own answers and with SE's.
    "tpt:steps=4": How(**TPT, steps=4, answer="weak"),
    "tpt:rho=0.3": How(**TPT, rho=0.3, answer="weak"),
    "tpt+uniform": How(**TPT, answer="uniform"),
    "tpt+uniform:se_stats=pre": How(**TPT, answer="uniform", stats="pre"),
    "tpt+se": How(**TPT),
    "tpt+se:se_stats=pre": How(**TPT, stats="pre"),
    "tpt+se:steps=2:se_stats=pre": How(**TPT, steps=2, stats="pre"),
    "tpt-rce:steps=2": How("rce to the mean", confident=True, steps=2, answer="weak"),
    "c-tpt:dispersion=20": How(**TPT, spread=20, answer="weak"),
    "c-tpt:steps=2": How(**TPT, spread=50, steps=2, answer="weak"),
    "c-tpt+se": How(**TPT, spread=50),
    "c-tpt+se:se_stats=pre": How(**TPT, spread=50, stats="pre"),
    "r-tpt:steps=2": How("pointwise", confident=True, steps=2, answer="reliability"),
    "r-tpt+weak": How("pointwise", confident=True, answer="weak"),
    "r-tpt+se": How("pointwise", confident=True),
    "r-tpt+se:se_stats=pre": How("pointwise", confident=True, stats="pre"),
    # Points of the grid that have no name.
    "tpt:skip=true": How(**TPT, skip=True, answer="weak"),
    "use:select=confident:steps=2": How(**USE, confident=True, steps=2),
    "use:label=mean": How(**{**USE, "loss": "rce to the mean"}),
    "use:loss=pointwise:dispersion=5": How(**{**USE, "loss": "pointwise"}, spread=5),
}


class Setting:
    """A text tower in both precisions, class names, and features (B, N, D) of the views of images, in float64."""

    def __init__(self, tower: Tower, names: list[str], features: Tensor, scale: float, start: int = 1) -> None:
        self.features, self.scale = features, scale
        exact = deepcopy(tower).double()
        self.prompts = {torch.float32: ClassPrompts(tower, names), torch.float64: ClassPrompts(exact, names)}
        self._naive = Prompts(exact, names, start)

    def truth(self, how: How) -> list[Outcome]:
        """By the book, image by image."""
        return [adapt(how, views, self._naive, self.scale) for views in self.features]


def of_pixels(model: CLIP, images: int, views: int, seed: int) -> Tensor:
    """Features of views that share half of their pixels, encoded by the image tower.

    All images look much alike to random weights; what they have in common is taken off, so that views disagree.
    """
    generator = torch.Generator().manual_seed(seed)
    own = torch.rand(images, 1, 3, 4, 4, generator=generator)
    coarse = ((own + torch.rand(images, views, 3, 4, 4, generator=generator)) / 2).flatten(0, 1)
    pixels = interpolate(coarse, size=model.image_size, mode="bicubic").clamp(0, 1)
    features = model.encode_images(pixels).double()
    return normalize(features - features.mean(0), dim=-1).view(images, views, -1)


def at_random(dim: int, images: int, views: int, seed: int) -> Tensor:
    """Random directions, near one another within an image."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, dim, generator=generator, dtype=torch.float64)
    return normalize(centre + 0.8 * torch.randn(images, views, dim, generator=generator, dtype=torch.float64), dim=-1)


def lively(start_token: bool) -> Bidirectional:
    """A bidirectional tower with embeddings as small as CLIP's, so that a step of 0.005 changes something."""
    tower = Bidirectional(start_token)
    tower.table.weight.mul_(0.03)
    tower.positions.mul_(0.03)
    return tower


@cache
def setting(kind: str) -> Setting:
    """Three images that stop at different steps, and whose gradients are not what is left of larger terms."""
    seed = {"ViT": 9, "RN50": 12, "bidirectional": 12, "bidirectional with a start token": 0}[kind]
    if kind in ("ViT", "RN50"):
        model = disturbed(TINY_VIT if kind == "ViT" else TINY_RESNET)
        return Setting(model.text, NAMES, of_pixels(model, 5, 24, seed)[1:4], 25.0)
    tower = lively(start_token="start" in kind)
    return Setting(tower, NAMES, at_random(12, 4, 24, seed)[1:4], 25.0, start=len(tower.start))


def watched(
    method: str, features: Tensor, prompts: ClassPrompts, scale: float
) -> tuple[Result, list[list[Tensor]], list[list[Tensor]]]:
    """The engine's result, and for every image the gradients that its AdamW took and the contexts that came out."""
    gradients: list[list[Tensor]] = [[] for _ in features]
    contexts: list[list[Tensor]] = [[] for _ in features]
    step = PerImage.step

    def watched_step(own: PerImage, images: Iterable[int], grads: Iterable[Sequence[Tensor]]) -> None:
        moving, taken = list(images), list(grads)
        step(own, moving, taken)
        for i, (grad,) in zip(moving, taken, strict=True):
            gradients[i].append(grad.clone())
            contexts[i].append(own[i][0].detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PerImage, "step", watched_step)
        result = run(methods.get(method), features, prompts, scale)
    return result, gradients, contexts


def assert_by_the_book(method: str, here: Setting) -> None:
    truth = here.truth(METHODS[method])
    for dtype in (torch.float64, torch.float32):
        _assert_equal(method, here, truth, dtype)


def _assert_equal(method: str, here: Setting, truth: list[Outcome], dtype: torch.dtype) -> None:
    exact = dtype == torch.float64
    # A later gradient is taken at a context that carries the rounding of the steps before.
    at_first, later, to_contexts, to_probs = (1e-11, 1e-11, 1e-12, 1e-11) if exact else (1e-5, 1e-4, 1e-6, 1e-4)
    result, gradients, contexts = watched(method, here.features.to(dtype), here.prompts[dtype], here.scale)
    assert result.probs.dtype == dtype
    assert result.skipped.tolist() == [expected.skipped for expected in truth]
    followed = 0
    for i, expected in enumerate(truth):
        if expected.gradients:
            first = expected.gradients[0]
            assert (gradients[i][0] - first).norm() <= at_first * first.norm()
            if not exact and first.abs().min() <= at_first * first.norm():
                continue
        followed += 1
        for ours, theirs in zip(gradients[i], expected.gradients, strict=True):
            assert (ours - theirs).norm() <= later * theirs.norm()
        for ours, theirs in zip(contexts[i], expected.contexts, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=to_contexts, rtol=0)
        torch.testing.assert_close(result.probs[i].double(), expected.probs, atol=to_probs, rtol=0)
        assert result.chosen[i].tolist() == expected.seen.chosen
        assert result.delta[i].item() == pytest.approx(expected.seen.delta)
        assert result.beta[i].item() == pytest.approx(expected.seen.beta)
    assert followed >= len(truth) - 1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_a_vision_transformer(method: str) -> None:
    assert_by_the_book(method, setting("ViT"))


@pytest.mark.parametrize("method", CENTRAL)
@pytest.mark.parametrize("tower", ["RN50", "bidirectional", "bidirectional with a start token"])
def test_other_towers(tower: str, method: str) -> None:
    assert_by_the_book(method, setting(tower))


def test_the_images_stop_at_different_steps() -> None:
    """Or the other tests would not prove that each image of a batch stops when its own views agree."""
    for kind, steps in {"ViT": [0, 2, 4], "RN50": [0, 1, 4], "bidirectional": [3, 1, 2]}.items():
        assert [len(outcome.gradients) for outcome in setting(kind).truth(METHODS["use:steps=4"])] == steps


def numbered(count: int, longest: int) -> list[str]:
    """Different names of 1 to `longest` words and a number."""
    return [" ".join([*(WORDS[(i + j) % len(WORDS)] for j in range(i * i % longest)), f"{i}"]) for i in range(count)]


@pytest.mark.parametrize("method", ["use", "use:skip=false", "tpt+se", "c-tpt", "r-tpt"])
@pytest.mark.parametrize("count", [2, 37])
def test_short_and_long_lists_of_classes(count: int, method: str) -> None:
    assert_by_the_book(method, many_classes(count))


@cache
def many_classes(count: int) -> Setting:
    model = disturbed(TINY_VIT)
    names = numbered(36, longest=11)
    return Setting(
        model.text, names[:2] if count == 2 else [*names, names[7]], of_pixels(model, 5, 64, seed=9)[:2], 25.0
    )


def test_a_thousand_classes() -> None:
    model = disturbed(replace(TINY_VIT, text=replace(TINY_TEXT, context_length=20)))  # 77 would take the book 20 s
    here = Setting(model.text, numbered(1000, longest=4), of_pixels(model, 5, 64, seed=9)[:1], 25.0)
    assert_by_the_book("use:skip=false", here)
