"""Tuning the image tower itself, as TTL does: low-rank additions to queries and values of its last three blocks.

    x W + b + (alpha / rank) · x A B        A drawn at random, B from zero, both new for every image

Here the text features are constants and the features of the views move. The gradient of a loss with respect to the
logits is carried to the features, and from there through the blocks, some views at a time: their gradients add up
exactly, whatever the loss. Earlier blocks do not change, so the hidden states of the views are all that is needed of
an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from usetta.cancellation import checkpoint
from usetta.methods.losses import Reward
from usetta.methods.options import Count, Positive, Seed
from usetta.methods.stats import ViewStats, tie_duplicate_classes
from usetta.methods.tune.adamw import PerImage
from usetta.methods.tune.shift import text_features
from usetta.methods.tune.steps import TunedImages, logit_gradient, optimize
from usetta.models.clip import LastBlocks, LoraDelta, LowRank
from usetta.models.parallel import chunk_size
from usetta.prompts import ClassPrompts

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe


@dataclass(frozen=True)
class Hidden:
    """The last blocks of an image tower and their input: `model.last_blocks()` and `model.hidden_states(pixels)`."""

    blocks: LastBlocks
    states: Tensor | Sequence[Tensor]
    """(N, tokens, width) of each image. Images are taken one after the other, so this can be any object with indexing
    and slicing, also one that computes an entry on demand."""


class LoraTuner:
    """LoRA's weights for the images of `hidden`. A is the same draw for every image, and `seed` decides it.

    It is drawn by Xavier's normal rule from one generator, block by block, first of the queries and then of the values.
    """

    needs: ClassVar[str] = "hidden"
    copies: ClassVar[int] = 0

    def __init__(
        self,
        hidden: Hidden,
        *,
        lr: float,
        weight_decay: float,
        rank: Count = 16,
        alpha: Positive = 32.0,
        seed: Seed = 0,
    ) -> None:
        self._hidden = hidden
        self._scale = alpha / rank
        width, generator = hidden.blocks.width, torch.Generator().manual_seed(seed)
        device, dtype = hidden.blocks.device, torch.promote_types(hidden.blocks.dtype, torch.float32)
        start = []
        for _ in range(2 * len(hidden.blocks)):
            drawn = torch.nn.init.xavier_normal_(torch.empty(width, rank), generator=generator)
            start += [drawn.to(device, dtype, non_blocking=True), torch.zeros(rank, width, device=device, dtype=dtype)]
        self.weights = PerImage(start, len(hidden.states), lr=lr, weight_decay=weight_decay)
        """For each image A and B of the queries, then A and B of the values, block by block."""

    def step(self, image: int, grad: Tensor, views: Tensor) -> None:
        """Move an image's weights against `grad` (k, D), the gradient with respect to the features of `views` (k,)."""
        states = self._hidden.states[image]
        weights = self.weights[image]
        total = [torch.zeros_like(weight) for weight in weights]
        size = chunk_size(self._hidden.blocks.device)
        for chunk, chunk_grad in zip(torch.split(views, size), torch.split(grad, size), strict=True):
            checkpoint()
            with torch.enable_grad():
                features = self._hidden.blocks(states[chunk], self._deltas(weights))
                parts = torch.autograd.grad(features, weights, chunk_grad.to(features.dtype))
            torch._foreach_add_(total, parts)
        self.weights.step([image], [total])

    def features(self, image: int, views: slice) -> Tensor:
        """Features (n, D) of some views of an image by the tower as it is now."""
        return self._hidden.blocks.encode(self._hidden.states[image][views], self._deltas(self.weights[image]))

    def _deltas(self, weights: Sequence[Tensor]) -> list[LoraDelta]:
        pairs = [LowRank(down, self._scale * up) for down, up in zip(weights[::2], weights[1::2], strict=True)]
        return [LoraDelta(queries, values) for queries, values in zip(pairs[::2], pairs[1::2], strict=True)]


def tune_images(
    recipe: "Recipe",
    stats: ViewStats,
    features: Tensor,
    text: ClassPrompts | Tensor,
    logit_scale: float,
    hidden: Hidden,
    reward: Reward | None = None,
) -> tuple[ViewStats, Tensor, Tensor]:
    """Statistics and features (B, N, D) of views after tuning the image tower, and which images were skipped (B,).

    Where the weak view alone answers, the others are not encoded again, and their statistics stay those from before.
    """
    tuner: LoraTuner = recipe.part("tune")(hidden, lr=recipe.lr, weight_decay=recipe.weight_decay)
    classes, tuned = text_features(text), features.clone()
    reward = reward or Reward(features, classes)
    if recipe.readout == "weak" and recipe.steps == 1:
        recipe, again = replace(recipe, se_stats="pre"), slice(1)
    else:
        again = slice(None)

    def step(stats: ViewStats, images: TunedImages, views: Tensor) -> Tensor:
        grad = logit_scale * (logit_gradient(recipe, stats, images.rows, views, reward) @ classes)
        for row, image in enumerate(images.numbers):
            tuner.step(image, grad[row], views[row])
            tuned[image, again] = tuner.features(image, again).to(tuned.dtype)
        return tie_duplicate_classes(logit_scale * (tuned[images.rows] @ classes.T), classes)

    last, skipped = optimize(recipe, stats, step)
    return last, tuned, skipped
