"""OpenAI's own code, loaded by file: its package imports torchvision, the two files that matter do not."""

import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn


@lru_cache
def openai_module(stem: str) -> ModuleType:
    """`clip/<stem>.py` of the package openai-clip; skips the test where that is not installed."""
    found = importlib.util.find_spec("clip")
    if found is None or not found.submodule_search_locations:
        pytest.skip("openai-clip is not installed (pip install --no-deps openai-clip==1.0.1)")
    path = Path(found.submodule_search_locations[0]) / f"{stem}.py"
    spec = importlib.util.spec_from_file_location(f"openai_clip_{stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw everything that initialisation leaves at 0 or 1, so that a forgotten or swapped tensor shows.

    Convolutions are drawn anew as well: at their usual size the biases drown the image after fifty layers, all
    images get the same features, and parity would prove nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.ndim not in (1, 4):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim == 4:
            tensor.copy_(noise * (2 / tensor[0].numel()) ** 0.5)
        elif tensor.ndim == 1 and name.endswith(("weight", "running_var")):
            tensor.copy_(1 + 0.2 * noise.clamp(-2, 2))
        elif tensor.ndim == 1 and name.endswith(("bias", "running_mean")):
            tensor.copy_(0.1 * noise)
    return model.requires_grad_(False).eval()
