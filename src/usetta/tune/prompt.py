"""Tuning the context of the prompt, as TPT and its descendants do.

Every image has a context of its own and its own AdamW state, both new. One step from a fresh state is

    θ ← θ (1 − lr·wd) − lr · g / (|g| + 1e-8)

a step of size lr per coordinate, whatever the scale of the loss. PyTorch's optimiser does it; an image that is not
moved has no gradient there, so it also keeps its moments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from usetta.prompts import ClassPrompts


class PromptTuner:
    """Contexts of `images` images, all at the initial one at first."""

    def __init__(self, prompts: ClassPrompts, images: int, *, lr: float, weight_decay: float) -> None:
        self._prompts = prompts
        self._contexts = [prompts.context.clone().requires_grad_() for _ in range(images)]
        self._moved = [False] * images
        self._optimizer = torch.optim.AdamW(self._contexts, lr=lr, weight_decay=weight_decay) if images else None

    def step(self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None) -> Tensor:
        """Move some images' contexts against `grad` (A, C, D), the gradient with respect to their text features.

        Returns their new text features (A, C, D). With `classes` (K,) only those count, and C is K.
        """
        contexts = [self._contexts[i] for i in images]
        for context, direction in zip(contexts, self._pullback(images, grad, classes), strict=True):
            context.grad = direction
        assert self._optimizer is not None
        self._optimizer.step()
        self._optimizer.zero_grad()
        for i in images:
            self._moved[i] = True
        return self._prompts.encode(torch.stack(contexts).detach(), classes)

    def _pullback(self, images: Sequence[int], grad: Tensor, classes: Tensor | None) -> Tensor:
        """Gradients with respect to the contexts (A, n, W); those at the initial one share its forward pass."""
        if not any(self._moved[i] for i in images):
            return self._prompts.pullback(grad, classes)
        with torch.enable_grad():
            contexts = torch.stack([self._contexts[i].detach() for i in images]).requires_grad_()
            (gradients,) = torch.autograd.grad(self._prompts.encode(contexts, classes), contexts, grad)
        return gradients
