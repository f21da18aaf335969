"""The memory of a method for streams, as a classifier or an evaluation holds it: it can be saved, loaded and reset.

A file of it belongs to one method with its settings, one model and one list of classes, and is refused by any other.
It holds features of earlier images: enough to recognise an image that somebody has, so it is as private as the images.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from usetta.files import write_atomically
from usetta.methods.memory import MEMORIES, State
from usetta.methods.recipe import Recipe
from usetta.models import Model

_KIND = "usetta stream memory 1"


def most_bytes(recipe: Recipe, classes: int, dim: int) -> float:
    """Bytes that the memory of a recipe may take in float32; infinite if it grows with the stream or nobody knows."""
    numbers = MEMORIES[recipe.memory].numbers
    return math.inf if numbers is None else 4 * numbers(classes, dim, recipe.settings)


class StreamMemory:
    """What a recipe remembers of a stream so far."""

    def __init__(self, recipe: Recipe, model: Model, classes: Sequence[str]) -> None:
        self.recipe = recipe
        self.state: State | None = None
        """None before the first image."""
        self.seen = 0
        """Images so far."""
        names = json.dumps(list(classes)).encode()
        self._belongs_to = {
            "settings": json.dumps(recipe.settings, sort_keys=True),
            "weights": model.fingerprint,
            "classes": hashlib.blake2b(names, digest_size=16).hexdigest(),
        }

    def copy(self) -> "StreamMemory":
        """A memory of its own, with the same content."""
        other = object.__new__(StreamMemory)
        vars(other).update(vars(self))
        other.state = self.state and {name: tensor.clone() for name, tensor in self.state.items()}
        return other

    def reset(self) -> None:
        """Forget all images."""
        self.state, self.seen = None, 0

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in (self.state or {}).items()}
        write_atomically(path, save(tensors, {"kind": _KIND, "seen": str(self.seen), **self._belongs_to}))

    def load(self, path: Path, device: torch.device) -> None:
        """Go on where the memory in a file stopped."""
        try:
            with safe_open(path, framework="pt") as file:
                about: dict[str, Any] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read as the memory of a stream: {error}") from None
        if about.get("kind") != _KIND:
            raise ValueError(f"{path} is not the memory of a stream")
        differs = [name for name, value in self._belongs_to.items() if about.get(name) != value]
        if differs:
            raise ValueError(f"{path} belongs to another stream, with other {', '.join(differs)}")
        # Counters are read on the host at every step. Tensors are copied, because those of a file are aligned in
        # another way, and then products may round in another way.
        moved = {name: (tensor.to(device) if tensor.ndim else tensor).clone() for name, tensor in tensors.items()}
        self.state, self.seen = moved or None, int(about["seen"])
