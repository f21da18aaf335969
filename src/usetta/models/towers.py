"""What all models that are PyTorch modules have in common: pixels in, unit-length features out, a fingerprint.

Weights are frozen and the towers are always in evaluation mode; only inputs ever receive gradients.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from usetta.models.base import no_last_blocks
from usetta.models.parallel import map_chunks
from usetta.views.recipe import Interpolation, ResizeMode

if TYPE_CHECKING:
    from usetta.models.clip import LastBlocks


_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class TwoTowers(nn.Module, ABC):
    """The image half of a `base.Model`. A subclass adds the text tower, and how normalised pixels become features.

    `to(device, dtype)` moves the weights and leaves `logit_scale` exact.
    """

    is_random = False
    resize_mode: ResizeMode = "shortest"
    interpolation: Interpolation = "bicubic"
    image_tower: nn.Module

    def __init__(
        self,
        *,
        name: str,
        embed_dim: int,
        image_size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        logit_scale: float,
    ) -> None:
        super().__init__()
        self.name = name
        self.embed_dim = embed_dim
        self.image_size = image_size
        self.mean = mean
        self.std = std
        self.logit_scale = logit_scale
        self._fingerprints: dict[str, str] = {}

    @abstractmethod
    def image_features(self, pixels: Tensor) -> Tensor:
        """Features (n, D), of any length, of normalised pixels (n, 3, S, S)."""

    @abstractmethod
    def describe(self) -> str:
        """Everything beside the weights that the features depend on."""

    def describe_images(self) -> str:
        """Everything beside the weights that the features of images depend on."""
        return self.describe()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights; features are float32 whatever it is."""
        return next(self.parameters()).dtype

    @property
    def precision(self) -> str:
        """Of the image tower: fp32, bf16, fp16, int8, or fp64 in tests."""
        return _PRECISIONS[self.dtype]

    def check(self, pixels: Tensor) -> None:
        """Refuse what are not pixels (n, 3, S, S)."""
        size = self.image_size
        if pixels.ndim != 4 or pixels.shape[1:] != (3, size, size):
            raise ValueError(f"{self.name} expects pixels of shape (n, 3, {size}, {size}), got {tuple(pixels.shape)}")
        if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
            raise ValueError(f"{self.name} expects pixels as uint8 or float, got {pixels.dtype}")

    def normalize(self, pixels: Tensor) -> Tensor:
        """Pixels (n, 3, S, S), uint8 in 0..255 or float in 0..1, as the image tower wants them."""
        return normalised(_moved(pixels, self.device), self.mean, self.std).to(self.dtype)

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Unit-length float32 features (n, D) of pixels (n, 3, S, S): uint8 in 0..255 or float in 0..1."""
        return self.encode_with(self.image_features, pixels)

    def encode_with(self, image_features: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """As `encode_images`, with another function from normalised pixels (n, 3, S, S) to features (n, D)."""
        if len(pixels) == 0:
            return torch.empty(0, self.embed_dim, device=self.device)
        self.check(pixels)  # before the batch is split, so that an error shows its whole shape
        features = map_chunks(lambda part: image_features(self.normalize(part)), pixels, self.device)
        return normalize(features.float(), dim=-1)

    def hidden_states(self, pixels: Tensor) -> Tensor:
        """What enters the last blocks of the image tower (n, tokens, width); see `base.HasLastBlocks`."""
        raise ValueError(no_last_blocks(self.name))

    def last_blocks(self) -> "LastBlocks":
        """The last blocks of the image tower: `last_blocks().encode(hidden_states(pixels))` are the features."""
        raise ValueError(no_last_blocks(self.name))

    @property
    def fingerprint(self) -> str:
        """A hash of configuration, precision and weights; the device is not part of it."""
        return self._hash(f"{self.describe()} {self.logit_scale}", without="")

    @property
    def image_fingerprint(self) -> str:
        """The same of what image features depend on, so that they outlive a change of the text tower."""
        return self._hash(self.describe_images(), without="text_tower.")

    def _hash(self, description: str, *, without: str) -> str:
        if without not in self._fingerprints:
            digest = hashlib.blake2b(description.encode(), digest_size=16)
            for key, tensor in sorted(self.state_dict().items()):
                if not (without and key.startswith(without)):
                    digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
            self._fingerprints[without] = digest.hexdigest()
        return self._fingerprints[without]

    def forget_fingerprint(self) -> None:
        """Compute it anew when it is next read: the weights have changed."""
        self._fingerprints.clear()

    def freeze(self) -> Self:
        """Evaluation mode, and no gradients for the weights."""
        return self.requires_grad_(False).train(False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.forget_fingerprint()  # PyTorch calls this for every `to`, and a change of precision changes the weights
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Pixels (n, 3, S, S), uint8 in 0..255 or float in 0..1, less the mean of their channel, ÷ its std: float32."""
    # The statistics are scaled to the range of the pixels instead of the reverse: one pass over the pixels less.
    unit = 255.0 if pixels.dtype == torch.uint8 else 1.0
    centre, scale = _statistics(tuple(mean), tuple(std), unit, pixels.device)
    return torch.sub(pixels if unit > 1 else pixels.float(), centre).mul_(scale)


@cache  # a device would wait for them at every batch
def _statistics(
    mean: tuple[float, ...], std: tuple[float, ...], unit: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    centre, width = (unit * torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    return centre.to(device), (1 / width).to(device)


def _moved(pixels: Tensor, device: torch.device) -> Tensor:
    """Pixels on a device. A GPU can copy them while it computes, but only from memory that is never swapped out."""
    if device.type == "cuda" and pixels.device.type == "cpu":
        return pixels.pin_memory().to(device, non_blocking=True)
    return pixels.to(device)
