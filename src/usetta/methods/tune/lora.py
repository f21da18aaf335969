"""Tuning the image tower itself, as TTL does: low-rank additions to queries and values of its last three blocks.

    x W + b + (alpha / rank) · x A B        A drawn at random, B from zero, both new for every image

Here the text features are constants and the features of the views move. The gradient of a loss with respect to the
logits is carried to the features, and from there through the blocks: part by part of the views, which add up exactly
whatever the loss. The blocks before are not touched, so hidden states of the views are all that is needed of an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usetta.methods.losses import Reward
from usetta.methods.stats import ViewStats, tie_duplicate_classes
from usetta.methods.tune.adamw import PerImage
from usetta.methods.tune.steps import logit_gradient, optimize
from usetta.models.clip import LastBlocks, LoraDelta, LowRank
from usetta.models.parallel import chunk_size

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe

RANK = 16
ALPHA = 32


@dataclass(frozen=True)
class Hidden:
    """The last blocks of an image tower, and what enters them: `model.last_blocks()` and `model.hidden_states(pixels)`."""

    blocks: LastBlocks
    states: Tensor | Sequence[Tensor]
    """(N, tokens, width) of each image. They are taken one after the other, so anything will do that can be indexed
    and sliced, also what computes an entry when it is asked for."""


class LoraTuner:
    """LoRA's weights for the images of `hidden`. A is the same draw for every image, and `seed` decides it.

    It is drawn by Xavier's normal rule from one generator, block by block, first of the queries and then of the values.
    """

    def __init__(self, hidden: Hidden, *, lr: float, weight_decay: float, seed: int = 0) -> None:
        self._hidden = hidden
        width, generator = hidden.blocks.width, torch.Generator().manual_seed(seed)
        device, dtype = hidden.blocks.device, torch.promote_types(hidden.blocks.dtype, torch.float32)
        start = []
        for _ in range(2 * len(hidden.blocks)):
            drawn = torch.nn.init.xavier_normal_(torch.empty(width, RANK), generator=generator)
            start += [drawn.to(device, dtype), torch.zeros(RANK, width, device=device, dtype=dtype)]
        self.weights = PerImage(start, len(hidden.states), lr=lr, weight_decay=weight_decay)
        """For each image A and B of the queries, then A and B of the values, block by block."""

    def step(self, image: int, grad: Tensor, views: Tensor) -> None:
        """Move an image's weights against `grad` (k, D), the gradient with respect to the features of `views` (k,)."""
        states = self._hidden.states[image]
        weights = self.weights[image]
        total = [torch.zeros_like(weight) for weight in weights]
        size = chunk_size(self._hidden.blocks.device)
        for some, pull in zip(torch.split(views, size), torch.split(grad, size), strict=True):
            with torch.enable_grad():
                features = self._hidden.blocks(states[some], _changes(weights))
                parts = torch.autograd.grad(features, weights, pull.to(features.dtype))
            torch._foreach_add_(total, parts)
        self.weights.step([image], [total])

    def features(self, image: int, views: slice) -> Tensor:
        """Features (n, D) of some views of an image by the tower as it is now."""
        return self._hidden.blocks.encode(self._hidden.states[image][views], _changes(self.weights[image]))


def _changes(weights: Sequence[Tensor]) -> list[LoraDelta]:
    pairs = [LowRank(down, ALPHA / RANK * up) for down, up in zip(weights[::2], weights[1::2], strict=True)]
    return [LoraDelta(queries, values) for queries, values in zip(pairs[::2], pairs[1::2], strict=True)]


def tune_images(
    recipe: "Recipe",
    now: ViewStats,
    features: Tensor,
    text: Tensor,
    logit_scale: float,
    hidden: Hidden,
    reward: Reward | None = None,
) -> tuple[ViewStats, Tensor, Tensor]:
    """How views look after tuning the image tower, their new features (B, N, D), and which were left out (B,).

    `now` is how they look before, with `features` (B, N, D) and text features `text` (C, D). Where the weak view alone
    answers, the others are not run again, and what is said about them stays as it was.
    """
    tuner = LoraTuner(hidden, lr=recipe.lr, weight_decay=recipe.weight_decay, seed=recipe.seed)
    reward, moved = reward or Reward(features, text), features.clone()
    if recipe.readout == "weak" and recipe.steps == 1:
        recipe, again = replace(recipe, se_stats="pre"), slice(1)
    else:
        again = slice(None)

    def move(now: ViewStats, going: Tensor, views: Tensor) -> Tensor:
        pull = logit_scale * (logit_gradient(recipe, now, going, views, reward) @ text)
        for row, image in enumerate(going.tolist()):
            tuner.step(image, pull[row], views[row])
            moved[image, again] = tuner.features(image, again).to(moved.dtype)
        return tie_duplicate_classes(logit_scale * (moved[going] @ text.T), text)

    last, skipped = optimize(recipe, now, move)
    return last, moved, skipped
