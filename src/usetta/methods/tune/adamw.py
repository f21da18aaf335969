"""AdamW for many images at once that are independent of each other.

Every image has parameters and an optimiser state of its own, all new. One step from a fresh state is

    θ ← θ (1 − lr·wd) − lr · g / (|g| + 1e-8)

a step of size lr per coordinate, whatever the scale of the loss. PyTorch's optimiser does it; an image that takes no
part in a step has no gradient there, so it also keeps its moments.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class PerImage:
    """Parameters of `images` images, each of which starts from the tensors of `start`."""

    def __init__(self, start: Sequence[Tensor], images: int, *, lr: float, weight_decay: float) -> None:
        self._own = [[tensor.clone().requires_grad_() for tensor in start] for _ in range(images)]
        everything = [parameter for own in self._own for parameter in own]
        self._optimizer = torch.optim.AdamW(everything, lr=lr, weight_decay=weight_decay) if everything else None

    def __getitem__(self, image: int) -> list[Tensor]:
        """The parameters of one image."""
        return self._own[image]

    def stacked(self, images: Iterable[int]) -> Tensor:
        """The first parameter of some images (A, ...), as values."""
        return torch.stack([self._own[image][0].detach() for image in images])

    def step(self, images: Iterable[int], gradients: Iterable[Sequence[Tensor]]) -> None:
        """Move some images' parameters against `gradients`, for each image as many as it has parameters."""
        for image, own in zip(images, gradients, strict=True):
            for parameter, grad in zip(self._own[image], own, strict=True):
                parameter.grad = grad
        if self._optimizer is None:
            return
        try:
            self._optimizer.step()
        except RuntimeError as error:  # PyTorch's name for a number that single precision cannot hold
            if "overflow" not in str(error):
                raise
            raise OverflowError("the step is too large") from error
        self._optimizer.zero_grad()
