"""Tiny models: the architecture of CLIP at a thousandth of its size (the vocabulary keeps its full length)."""

import math

import torch

from usetta.models.clip import CLIP, random_model
from usetta.models.config import CLIPConfig, ResNetConfig, TextConfig, ViTConfig

TINY_TEXT = TextConfig(width=32, layers=2, heads=2)
TINY_VIT = CLIPConfig(24, ViTConfig(32, 8, width=48, layers=3, heads=3), TINY_TEXT)
TINY_RESNET = CLIPConfig(24, ResNetConfig(64, width=8, layers=(1, 2, 1, 1), heads=4), TINY_TEXT)


def disturbed(config: CLIPConfig, seed: int = 0) -> CLIP:
    """A random model whose biases and normalisations are random too, so that a swapped tensor shows."""
    model = random_model(config, name="tiny", seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for key, tensor in model.state_dict().items():
        if key.endswith("bias") or "running_mean" in key:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        elif tensor.ndim == 1:
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    model.logit_scale = math.exp(4.25)  # its logarithm survives being stored in float32
    return model
