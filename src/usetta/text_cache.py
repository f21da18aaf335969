"""Text features of long class lists on disk: CLIP's text tower takes longer for 1000 names than an answer does.

A file holds the features of one list under a name that hashes all they depend on to the last bit: the text tower, the
templates and names as token ids, the learned context, and the arithmetic of this machine. A file that is damaged or
cannot be written is a list that is encoded again. Only the latest files are kept.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from usetta import __version__
from usetta.files import cache_dir, write_atomically

LEAST_TEXTS = 100
"""Fewer are encoded in less time than it takes to know that the tower is the same."""
_KEPT = 32
"""Files, of 2 MB for 1000 names."""


def text_digest(*tensors: Tensor) -> str:
    """A hash of the bits of some tensors, with their types and shapes; cores share the work."""

    def of_one(tensor: Tensor) -> bytes:
        # SHA-256, because processors have instructions for it.
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return hashlib.sha256(b"".join(pool.map(of_one, tensors))).hexdigest()


class TextCache:
    """The text features that one model computes on this machine."""

    def __init__(self, tower: nn.Module, description: str) -> None:
        self._tower = tower
        self._description = description

    @cached_property
    def _of_model(self) -> str:
        # Of the embeddings those of the texts count, which are part of the hash of these.
        state = {key: value for key, value in self._tower.state_dict().items() if key != "token_embedding.weight"}
        machine = (__version__, torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
        return f"{self._description} {machine} {sorted(state)} {text_digest(*(state[key] for key in sorted(state)))}"

    def get(self, texts: str, count: int, compute: Callable[[], Tensor]) -> Tensor:
        """The features (C, D) of `count` texts that `texts` is a hash of: from the disk, or from `compute`."""
        if count < LEAST_TEXTS:
            return compute()
        name = hashlib.blake2b(f"{self._of_model} {texts}".encode(), digest_size=16).hexdigest()
        path = cache_dir() / "texts" / f"{name}.safetensors"
        known = _read(path, count)
        if known is not None:
            with suppress(OSError):
                path.touch()  # the latest are those that were used last
            return known
        features = compute()
        with suppress(OSError):
            write_atomically(path, save({"features": features.contiguous()}, {"digest": text_digest(features)}))
            _drop_oldest(path.parent)
        return features


def _read(path: Path, count: int) -> Tensor | None:
    """The features in a file; None if there is none or it is not as it was written."""
    try:
        with safe_open(path, "pt") as file:
            features: Tensor = file.get_tensor("features").clone()
            stated = (file.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    return features if len(features) == count and stated == text_digest(features) else None


def _drop_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[:-_KEPT]:
        path.unlink(missing_ok=True)
