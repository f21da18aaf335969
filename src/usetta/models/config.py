"""The architectures as data: what a tower is made of, and the table of those that have a name.

A configuration holds everything that changes the features apart from the weights: sizes, number of heads and
activation. Neither the number of heads nor the activation can be read off the shapes of a state dict, and both give
plausible but wrong features when guessed, so they are always stated, here or by the file that comes with the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # architectures have names where nobody should wait for torch to be imported
    from usetta.views.recipe import Interpolation, ResizeMode

Activation = Literal["quick_gelu", "gelu"]

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ViTConfig:
    """A vision transformer: square patches, a class token, pre-norm blocks."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int

    @property
    def tokens(self) -> int:
        """Patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


@dataclass(frozen=True)
class ResNetConfig:
    """CLIP's residual network: `layers` blocks in each of four stages, attention pooling with `heads` heads."""

    image_size: int
    width: int
    layers: tuple[int, int, int, int]
    heads: int

    @property
    def tokens(self) -> int:
        """Cells of the last feature map and their mean."""
        return (self.image_size // 32) ** 2 + 1

    @property
    def pool_width(self) -> int:
        """Channels of the last feature map."""
        return self.width * 32


@dataclass(frozen=True)
class TextConfig:
    """A causal text transformer over CLIP's byte-pair vocabulary."""

    width: int
    layers: int
    heads: int
    context_length: int = 77
    vocab_size: int = 49408


@dataclass(frozen=True)
class CLIPConfig:
    """Two towers into one space of `embed_dim` dimensions, and the pixel statistics they were trained with."""

    embed_dim: int
    vision: ViTConfig | ResNetConfig
    text: TextConfig
    activation: Activation = "quick_gelu"
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD
    # How the weak view is made is part of the view recipe, so it stays out of the description that fingerprints hash.
    resize_mode: ResizeMode = field(default="shortest", repr=False)
    interpolation: Interpolation = field(default="bicubic", repr=False)


_TEXT_512 = TextConfig(width=512, layers=12, heads=8)
_TEXT_768 = TextConfig(width=768, layers=12, heads=12)

ARCHITECTURES: dict[str, CLIPConfig] = {
    "ViT-B-32": CLIPConfig(512, ViTConfig(224, 32, width=768, layers=12, heads=12), _TEXT_512),
    "ViT-B-16": CLIPConfig(512, ViTConfig(224, 16, width=768, layers=12, heads=12), _TEXT_512),
    "ViT-L-14": CLIPConfig(768, ViTConfig(224, 14, width=1024, layers=24, heads=16), _TEXT_768),
    "ViT-L-14-336": CLIPConfig(768, ViTConfig(336, 14, width=1024, layers=24, heads=16), _TEXT_768),
    "RN50": CLIPConfig(1024, ResNetConfig(224, width=64, layers=(3, 4, 6, 3), heads=32), _TEXT_512),
    "RN101": CLIPConfig(512, ResNetConfig(224, width=64, layers=(3, 4, 23, 3), heads=32), _TEXT_512),
}

# What published weights were trained with, by their name; the first that matches. From open_clip's table of weights.
_ACTIVATIONS: tuple[tuple[str, Activation], ...] = (
    (r"quick.?gelu|openai", "quick_gelu"),
    (r"(patch32_clip_224|b.?32).*laion400m", "quick_gelu"),  # LAION's only models with QuickGELU
    (r"metaclip_altogether|dfn2b.*39b", "gelu"),
    (r"metaclip|dfn\d+b|yfcc15m|cc12m", "quick_gelu"),
    (r"laion|datacomp|commonpool", "gelu"),
)


def activation_of_name(name: str) -> Activation | None:
    """The activation that weights published under this name were trained with, if it is known."""
    return next((known for pattern, known in _ACTIVATIONS if re.search(pattern, name.lower())), None)
