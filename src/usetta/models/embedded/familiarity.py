"""Which class names the embedded model may not know.

A name that the text tower was trained on is known; `familiar.safetensors` holds hashes of these names, not the names
themselves. Of any other name the text feature is looked at: where training taught the tower nothing about a name,
its feature stays near the mean of all texts. That mean is in the same file, and how near is too near: as near as six in
ten words that never trained. Training gave a name the same target in every template, so the distance hardly depends on
the template. docs/notes/embedded.md says how often the warning is right. `tools/align_text.py` writes the file.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class TrainedNames:
    """See `base.Familiarity`."""

    def __init__(self, trained: NDArray[np.uint32], mean: Tensor, least: float) -> None:
        """`trained`: hashes (n,) of the names that trained; `mean` (D,): the mean text, of unit length.

        `least`: the distance (1 − cosine) from it below which a name may be unknown.
        """
        self.least = least
        self._trained = frozenset(trained.tolist())
        self._mean = mean

    def unfamiliar(self, names: Sequence[str], features: Tensor) -> list[str]:
        """Those of `names` that the tower may not know, given their text features (C, D)."""
        rows = zip(names, self.was_trained_on(names), self.distances(features).tolist(), strict=True)
        return [name for name, trained, distance in rows if not trained and distance < self.least]

    def was_trained_on(self, names: Sequence[str]) -> list[bool]:
        """Whether each name trained the tower, in singular or plural."""
        return [not self._trained.isdisjoint(name_hashes([name, name.removesuffix("s")]).tolist()) for name in names]

    def distances(self, features: Tensor) -> Tensor:
        """Distances (C,) of text features (C, D) of unit length from the mean text."""
        return 1 - features.float().cpu() @ self._mean


def name_hashes(names: Iterable[str]) -> NDArray[np.uint32]:
    """32 bits of each name; case, hyphens and underscores do not count."""
    plain = [" ".join(re.sub(r"[-_/]", " ", name.lower()).split()) for name in names]
    return np.frombuffer(b"".join(hashlib.blake2b(name.encode(), digest_size=4).digest() for name in plain), "<u4")
