"""The embedded model's text tower: a small causal transformer on CLIP's tokens, aligned to CLIP ViT-B/16's space.

It ships with this package, made by `tools/align_text.py`: matrices as int8 with one scale per row (`name` and
`name.scale`), the token embedding as the product of codes and a basis, all under OpenAI's key names.
"""

import json
from importlib.resources import files
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

_FOLDER = files("usetta.models.embedded")


def read_config() -> dict[str, Any]:
    """Sizes, logit scale and provenance of the text tower."""
    config: dict[str, Any] = json.loads((_FOLDER / "config.json").read_text(encoding="utf-8"))
    return config


def read_state() -> dict[str, Tensor]:
    """The text tower in float32, under OpenAI's key names."""
    stored: dict[str, Tensor] = {}
    for part in sorted(read_config()["parts"]):
        stored |= load((_FOLDER / part).read_bytes())
    state = {
        name: tensor.float() * stored[f"{name}.scale"].float()[:, None] if f"{name}.scale" in stored else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(".scale")
    }
    codes, basis = state.pop("token_embedding.codes"), state.pop("token_embedding.basis")
    with torch.no_grad():
        return state | {"token_embedding.weight": codes @ basis}
