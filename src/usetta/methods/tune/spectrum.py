"""Tuning along the main directions of the text features, as STS does: t' = normalize(t + Bγ), γ from zero.

B holds the first right singular vectors of the text features (C, D), not centred, as many as stand out from noise; γ is
shared by all classes. A shift that all classes share adds the same to all logits of a view, which a softmax does not
see: STS acts through the lengths it normalises away, and one step changes little.

STS also asks for a short shift, by λ‖Bγ‖. That has no slope at γ = 0, so it makes no difference to the one step that
STS takes. No value of λ is known here: the setting `penalty` is 0, and matters from the second step on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usetta.methods.tensor_cache import cache_per_tensor
from usetta.methods.tune.adamw import PerImage
from usetta.methods.tune.shift import plain, through_normalize
from usetta.prompts import ClassPrompts

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe


class SpectrumTuner:
    """Coefficients γ (r,) of `images` images for text features (C, D), all zero at first."""

    copies: ClassVar[int] = 6
    """How many times an image holds as much as all text features."""

    def __init__(self, text: Tensor, images: int, *, lr: float, weight_decay: float, penalty: float = 0.0) -> None:
        self._text = text
        self._basis = main_directions(text)
        self._penalty = penalty
        self._coefficients = PerImage([torch.zeros_like(self._basis[0])], images, lr=lr, weight_decay=weight_decay)

    @classmethod
    def build(cls, recipe: "Recipe", text: ClassPrompts | Tensor, images: int) -> Self:
        """The tuner that `recipe` asks for."""
        return cls(plain(text), images, lr=recipe.lr, weight_decay=recipe.weight_decay, penalty=recipe.penalty)

    def step(self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None) -> Tensor:
        """Move some images' coefficients against `grad` (A, C, D), the gradient with respect to their text features.

        Returns their new text features (A, C, D). With `classes` (K,) only those count, and C is K.
        """
        text = self._text if classes is None else self._text[classes]
        now = self._coefficients.stacked(images)
        pulled = through_normalize(text + self._shift(now), grad).sum(dim=1) @ self._basis
        pulled += self._penalty * normalize(now, dim=-1)  # B is orthonormal, so ‖Bγ‖ = ‖γ‖
        self._coefficients.step(images, ([direction] for direction in pulled))
        return normalize(text + self._shift(self._coefficients.stacked(images)), dim=-1)

    def _shift(self, coefficients: Tensor) -> Tensor:
        """Bγ (A, 1, D), for all classes the same."""
        return (coefficients @ self._basis.T)[:, None]


@cache_per_tensor
def main_directions(text: Tensor) -> Tensor:
    """B (D, r): the right singular vectors of `text` (C, D) whose singular values stand out, at least one."""
    _, values, directions = torch.linalg.svd(text.double(), full_matrices=False)
    basis: Tensor = directions[: rank(values, text.shape)].T
    return basis.to(text.dtype).contiguous()


def rank(values: Tensor, shape: Sequence[int]) -> int:
    """How many singular `values` of a matrix of that shape exceed Gavish and Donoho's threshold for unknown noise."""
    b = min(shape) / max(shape)
    threshold = (0.56 * b**3 - 0.95 * b**2 + 1.82 * b + 1.43) * values.quantile(0.5)
    return max(1, int((values > threshold).sum()))
