"""AdamW for many images at once that are independent of each other.

Every image has parameters and an optimiser state of its own, all new. One step from a fresh state is

    θ ← θ (1 − lr·wd) − lr · g / (|g| + 1e-8)

a step of size lr per coordinate, whatever the scale of the loss. PyTorch's function does it; its class `AdamW` would
import torch's compiler first, which takes two seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class OptimizedTensor:
    """A tensor that is optimised, and its moments."""

    value: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor

    @classmethod
    def new(cls, start: Tensor) -> "OptimizedTensor":
        """A parameter that begins with the value `start`."""
        value = start.clone().requires_grad_()
        return cls(value, torch.zeros_like(value), torch.zeros_like(value), torch.tensor(0.0))


class PerImage:
    """Parameters of `images` images, each of which starts from the tensors of `start`."""

    def __init__(self, start: Sequence[Tensor], images: int, *, lr: float, weight_decay: float) -> None:
        self._own = [[OptimizedTensor.new(tensor) for tensor in start] for _ in range(images)]
        self._lr = lr
        self._weight_decay = weight_decay

    def __getitem__(self, image: int) -> list[Tensor]:
        """The parameters of one image."""
        return [parameter.value for parameter in self._own[image]]

    def stacked(self, images: Iterable[int]) -> Tensor:
        """The first parameter of some images (A, ...), as values."""
        return torch.stack([self._own[image][0].value.detach() for image in images])

    def step(self, images: Iterable[int], gradients: Iterable[Sequence[Tensor]]) -> None:
        """Move some images' parameters against `gradients`, for each image as many as it has parameters."""
        moved, gradient = [], []
        for image, own in zip(images, gradients, strict=True):
            for parameter, grad in zip(self._own[image], own, strict=True):
                moved.append(parameter)
                gradient.append(grad)
        with torch.no_grad():
            adamw(
                [parameter.value for parameter in moved],
                gradient,
                [parameter.first for parameter in moved],
                [parameter.second for parameter in moved],
                [],
                [parameter.steps for parameter in moved],
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self._lr,
                weight_decay=self._weight_decay,
                eps=1e-8,
                maximize=False,
            )
