"""Tuning a shift of the text features, one for each class, as TPS does: t' = normalize(t + Δ), Δ from zero.

No encoder takes part, so the features of an ensemble of templates can be tuned like any others, and the gradient is a
formula: normalising passes on the part that is perpendicular to the result.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usetta.methods.losses import Penalties, penalty_gradient
from usetta.methods.tune.adamw import PerImage
from usetta.prompts import ClassPrompts


class ShiftTuner:
    """Shifts (C, D) of text features (C, D) for `images` images, all zero at first."""

    needs: ClassVar[str] = "text"
    copies: ClassVar[int] = 9

    def __init__(self, text: ClassPrompts | Tensor, images: int, *, lr: float, weight_decay: float) -> None:
        self._text = text_features(text)
        self._shifts = PerImage([torch.zeros_like(self._text)], images, lr=lr, weight_decay=weight_decay)

    def step(
        self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None, penalties: Penalties = ()
    ) -> Tensor:
        """New text features (A, C, D) of `images`, from the gradient (A, C, D) with respect to those they have.

        `penalties` on the text features add to it. With `classes` (K,) only those are tuned, and C is K.
        """
        if classes is not None:
            grad = grad.new_zeros(len(grad), *self._text.shape).index_copy_(1, classes, grad)
        shifted = self._text + self._shifts.stacked(images)
        grad = through_normalize(shifted, grad + penalty_gradient(penalties, normalize(shifted, dim=-1)))
        self._shifts.step(images, ([own] for own in grad))
        moved = normalize(self._text + self._shifts.stacked(images), dim=-1)
        return moved if classes is None else moved[:, classes]


def text_features(text: ClassPrompts | Tensor) -> Tensor:
    """Text features (C, D), of prompts or as they are."""
    return text.features() if isinstance(text, ClassPrompts) else text


def through_normalize(vectors: Tensor, grad: Tensor) -> Tensor:
    """The gradient (..., D) with respect to `vectors`, from `grad`, the one with respect to normalize(vectors)."""
    # The bound is the one that normalize itself has.
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-12)
    unit = vectors / length
    return (grad - unit * (unit * grad).sum(dim=-1, keepdim=True)) / length
