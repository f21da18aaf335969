"""Tuning the context of the prompt, as TPT and its descendants do."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from usetta.methods.tune.adamw import PerImage
from usetta.prompts import ClassPrompts

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe


class PromptTuner:
    """Contexts of `images` images, all at the initial one at first."""

    copies: ClassVar[int] = 4
    """How many times an image holds as much as all text features."""

    def __init__(self, prompts: ClassPrompts, images: int, *, lr: float, weight_decay: float) -> None:
        self._prompts = prompts
        self._own = PerImage([prompts.context], images, lr=lr, weight_decay=weight_decay)
        self._contexts = [self._own[i][0] for i in range(images)]
        self._moved = [False] * images

    @classmethod
    def build(cls, recipe: "Recipe", text: ClassPrompts | Tensor, images: int) -> Self:
        """The tuner that `recipe` asks for."""
        if not isinstance(text, ClassPrompts):
            raise ValueError(f"method '{recipe.name}' tunes the prompt, so it needs ClassPrompts, not their features")
        return cls(text, images, lr=recipe.lr, weight_decay=recipe.weight_decay)

    def step(self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None) -> Tensor:
        """Move some images' contexts against `grad` (A, C, D), the gradient with respect to their text features.

        Returns their new text features (A, C, D). With `classes` (K,) only those count, and C is K.
        """
        self._own.step(images, ([direction] for direction in self._pullback(images, grad, classes)))
        for i in images:
            self._moved[i] = True
        return self._prompts.encode(self._own.stacked(images), classes)

    def _pullback(self, images: Sequence[int], grad: Tensor, classes: Tensor | None) -> Tensor:
        """Gradients with respect to the contexts (A, n, W); those at the initial one share its forward pass."""
        if not any(self._moved[i] for i in images):
            return self._prompts.pullback(grad, classes)
        with torch.enable_grad():
            contexts = self._own.stacked(images).requires_grad_()
            (gradients,) = torch.autograd.grad(self._prompts.encode(contexts, classes), contexts, grad)
        return gradients
