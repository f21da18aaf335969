"""Tuning the context of the prompt, as TPT and its descendants do.

Every image starts from the same context, so the first step of all of them shares one forward pass, whose graph
`ClassPrompts` keeps. The gradient of a penalty on the text features is the same for all of them at that context, so it
is a constant of the class list. Later steps build a graph for the contexts as they are by then.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from usetta.methods.losses import Penalties, penalty_gradient
from usetta.methods.tune.adamw import PerImage
from usetta.prompts import ClassPrompts


class PromptTuner:
    """Contexts of `images` images, all at the initial one at first."""

    needs: ClassVar[str] = "prompts"
    copies: ClassVar[int] = 4

    def __init__(self, text: ClassPrompts | Tensor, images: int, *, lr: float, weight_decay: float) -> None:
        if not isinstance(text, ClassPrompts):
            raise ValueError("tuning the prompt needs ClassPrompts, not their features")
        self._prompts = text
        self._contexts = PerImage([text.context], images, lr=lr, weight_decay=weight_decay)
        self._moved = [False] * images

    def context(self, image: int) -> Tensor:
        """The context (n, W) of an image as it is now."""
        return self._contexts[image][0].detach()

    def step(
        self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None, penalties: Penalties = ()
    ) -> Tensor:
        """New text features (A, C, D) of `images`, from the gradient (A, C, D) with respect to those they have.

        `penalties` on the text features add to it. With `classes` (K,) only those are tuned, and C is K.
        """
        self._contexts.step(images, ([own] for own in self._pullback(images, grad, classes, penalties)))
        for image in images:
            self._moved[image] = True
        return self._prompts.encode(self._contexts.stacked(images), classes)

    def _pullback(self, images: Sequence[int], grad: Tensor, classes: Tensor | None, penalties: Penalties) -> Tensor:
        """Gradients with respect to the contexts (A, n, W)."""
        prompts = self._prompts
        if not any(self._moved[image] for image in images):
            total = prompts.pullback(grad, classes)
            for weight, penalty in penalties:
                total = total + weight * prompts.gradient_of(penalty)
            return total
        contexts = self._contexts.stacked(images)

        def compute() -> Tensor:
            with torch.enable_grad():
                leaf = contexts.clone().requires_grad_()
                features = prompts.encode(leaf, classes)
                (gradients,) = torch.autograd.grad(features, leaf, grad + penalty_gradient(penalties, features))
            return gradients

        kind = f"later pullback {[(weight, penalty.__name__) for weight, penalty in penalties]}"
        return prompts.steps.get(compute, kind, [contexts, grad, classes])
