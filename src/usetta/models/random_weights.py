"""Random weights for benchmarks and tests: the right shapes and speed, meaningless answers.

The scale of every layer follows OpenAI's initialisation, so that features of different inputs differ and gradients
neither vanish nor explode. Everything is drawn on the CPU from one seeded generator, in the order of the keys, so equal
seeds give equal weights on every machine.
"""

import math

import torch
from torch import Tensor

from usetta.models.clip import CLIP
from usetta.models.config import CLIPConfig


def random_model(config: CLIPConfig, *, name: str, seed: int = 0) -> CLIP:
    """A CLIP of this architecture with weights drawn from `seed`; its `is_random` is set."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {key: tensor.shape for key, tensor in CLIP(config, name=name).state_dict().items()}
    state = {key: _draw(key, shape, config, generator) for key, shape in shapes.items()}
    return CLIP.from_state(config, state, name=name, is_random=True)


def _draw(key: str, shape: torch.Size, config: CLIPConfig, generator: torch.Generator) -> Tensor:
    if key.endswith("bias") or key.endswith("running_mean"):
        return torch.zeros(shape)
    if ".ln_" in key or ".norm." in key:  # the weights of a normalisation, and a batch normalisation's variance
        return torch.ones(shape)
    return torch.randn(shape, generator=generator) * _deviation(key, shape, config)


def _deviation(key: str, shape: torch.Size, config: CLIPConfig) -> float:
    tower, _, rest = key.partition(".")
    if tower == "text_tower" and rest == "token_embedding.weight":
        return 0.02
    if tower == "text_tower" and rest == "positional_embedding":
        return 0.01
    if rest.endswith(("attention.out.weight", "mlp.down.weight")):  # what is added to the residual stream
        layers = config.text.layers if tower == "text_tower" else config.vision.layers
        assert isinstance(layers, int)
        return float(shape[0] ** -0.5 * (2 * layers) ** -0.5)
    if rest.endswith("mlp.up.weight"):
        return float((2 * shape[1]) ** -0.5)
    if rest.endswith(("projection", "class_embedding", "positional_embedding")):
        return float((shape[0] if rest.endswith("projection") else shape[-1]) ** -0.5)
    if len(shape) == 4:  # convolutions keep the variance through the ReLU
        return float((2 / math.prod(shape[1:])) ** 0.5)
    return float(shape[-1] ** -0.5)
