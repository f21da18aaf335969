"""A model that remembers on disk what its image tower said.

The key is the pixels themselves and the model's fingerprint, so a hit is exact whatever made the views.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from usetta.models.base import Model, own_way_with_images
from usetta.models.package_files import write_atomically


class CachedImages:
    """`model`, with the features of every batch of pixels kept in `folder`."""

    def __init__(self, model: Model, folder: Path) -> None:
        self._model = model
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_images(self, pixels: Tensor) -> Tensor:
        """As the model's own, from disk where these very pixels were seen before."""
        return self._remembered(pixels, "", self._model.encode_images)

    @property
    def encode_whole_images(self) -> Callable[[Tensor], Tensor] | None:
        """Likewise, if the model has a way of its own with them."""
        own = own_way_with_images(self._model)
        return None if own is None else partial(self._remembered, kind="whole ", encode=own)

    def _remembered(self, pixels: Tensor, kind: str, encode: Callable[[Tensor], Tensor]) -> Tensor:
        digest = hashlib.blake2b(f"{kind}{self._model.fingerprint} {pixels.dtype} {tuple(pixels.shape)}".encode())
        digest.update(pixels.cpu().contiguous().numpy().tobytes())
        file = self._folder / f"{digest.hexdigest()[:32]}.safetensors"
        with suppress(FileNotFoundError, SafetensorError, KeyError):  # absent, or damaged: then it is made anew
            return load_file(file)["features"]
        features = encode(pixels)
        write_atomically(file, save({"features": features.cpu().contiguous()}))
        return features
