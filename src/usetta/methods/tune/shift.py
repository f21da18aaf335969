"""Tuning a shift of the text features, one for each class, as TPS does: t' = normalize(t + Δ), Δ from zero.

No encoder takes part, so the features of an ensemble of templates can be tuned like any others, and the gradient is a
formula: normalising passes on the part that is perpendicular to the result.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usetta.methods.tune.adamw import PerImage
from usetta.prompts import ClassPrompts

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe


class ShiftTuner:
    """Shifts (C, D) of text features (C, D) for `images` images, all zero at first."""

    copies: ClassVar[int] = 9
    """How many times an image holds as much as all text features."""

    def __init__(self, text: Tensor, images: int, *, lr: float, weight_decay: float) -> None:
        self._text = text
        self._shifts = PerImage([torch.zeros_like(text)], images, lr=lr, weight_decay=weight_decay)

    @classmethod
    def build(cls, recipe: "Recipe", text: ClassPrompts | Tensor, images: int) -> Self:
        """The tuner that `recipe` asks for."""
        return cls(plain(text), images, lr=recipe.lr, weight_decay=recipe.weight_decay)

    def step(self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None) -> Tensor:
        """Move some images' shifts against `grad` (A, C, D), the gradient with respect to their text features.

        Returns their new text features (A, C, D). With `classes` (K,) only those count, and C is K.
        """
        if classes is not None:
            grad = grad.new_zeros(len(grad), *self._text.shape).index_copy_(1, classes, grad)
        pulled = through_normalize(self._text + self._shifts.stacked(images), grad)
        self._shifts.step(images, ([direction] for direction in pulled))
        moved = normalize(self._text + self._shifts.stacked(images), dim=-1)
        return moved if classes is None else moved[:, classes]


def plain(text: ClassPrompts | Tensor) -> Tensor:
    """Text features (C, D), of prompts or as they are."""
    return text.features() if isinstance(text, ClassPrompts) else text


def through_normalize(vectors: Tensor, grad: Tensor) -> Tensor:
    """The gradient (..., D) with respect to `vectors` of what has the gradient `grad` by normalize(vectors)."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-12)  # as normalize itself
    unit = vectors / length
    return (grad - unit * (unit * grad).sum(dim=-1, keepdim=True)) / length
