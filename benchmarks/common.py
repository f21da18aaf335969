"""What the benchmarks share: a model, and how figures are shown. Clocks and made-up data are in `usetta.timing`."""

import json
import sys
from collections.abc import Mapping

import torch

from usetta.models.clip import CLIP
from usetta.timing import load_quietly


def load() -> CLIP:
    """ViT-B/16 with random weights in float32."""
    model = load_quietly("ViT-B-16", weights="random", precision="fp32")
    assert isinstance(model, CLIP)
    return model


def log(text: str) -> None:
    """Progress, for people who wait; figures alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def show(
    figures: Mapping[str, float], meanings: Mapping[str, tuple[str, str]], *, as_json: bool, **settings: object
) -> None:
    """Print figures with their targets and meanings, or as JSON with the settings they were measured with."""
    if as_json:
        print(json.dumps({"threads": torch.get_num_threads(), **settings, **figures}))
        return
    for name, figure in figures.items():
        meaning, target = meanings.get(name, (name, ""))
        print(f"{figure:8.3f}  {target:7}  {meaning}")
