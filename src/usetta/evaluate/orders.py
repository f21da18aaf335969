"""In which order do the images of a stream come? Methods with a memory answer by it, so it is part of an experiment.

    shuffled           all images in random order
    class-blocks:10    blocks of ten classes each, one after the other, shuffled within; classes in random order
    dirichlet:0.1      each class falls on ten parts of the stream by shares drawn from a Dirichlet distribution: the
                       smaller its parameter, the more the images of a class come together

An image's place in a shuffle is decided by a hash of the seed and its id, not by a random number generator, so it is
the same with any version of any library and on any machine.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from usetta.registry import suggest

_KINDS = ("shuffled", "class-blocks", "dirichlet")
_PARTS = 10
"""Of a Dirichlet stream."""
SHUFFLED = "shuffled"


@dataclass(frozen=True)
class StreamOrder:
    """A kind of order; with a seed it is an order."""

    kind: str
    value: float = 0.0
    """Classes of a block, or the parameter of the Dirichlet distribution."""

    @classmethod
    def parse(cls, text: str) -> "StreamOrder":
        """The order that is written as `class-blocks:10`."""
        kind, colon, number = text.strip().lower().partition(":")
        if kind not in _KINDS:
            raise ValueError(f"unknown order {kind!r}; {suggest(kind, _KINDS)}")
        if kind == SHUFFLED:
            if colon:
                raise ValueError(f"the order 'shuffled' takes no number, not {number!r}")
            return cls(kind)
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf and (kind == "dirichlet" or value.is_integer())):
            example = "class-blocks:10" if kind == "class-blocks" else "dirichlet:0.1"
            raise ValueError(f"the order '{kind}' needs a number, such as {example}, not {number!r}")
        return cls(kind, value)

    def __str__(self) -> str:
        return self.kind if self.kind == SHUFFLED else f"{self.kind}:{self.value:g}"

    def places(self, ids: Sequence[str], labels: Sequence[int], seed: int) -> list[int]:
        """The numbers of the images in the order of the stream."""
        shuffled = sorted(range(len(ids)), key=lambda i: _hash(seed, ids[i]))
        if self.kind == "class-blocks":
            classes = sorted(set(labels), key=lambda label: _hash(seed, f"class {label}"))
            block = {label: place // int(self.value) for place, label in enumerate(classes)}
            return sorted(shuffled, key=lambda i: block[labels[i]])  # sorting keeps the shuffle within a block
        if self.kind == "dirichlet":
            part: dict[int, int] = {}
            rng = np.random.default_rng(seed)
            for label in sorted(set(labels)):
                own = [i for i in shuffled if labels[i] == label]
                shares = rng.dirichlet(np.full(_PARTS, self.value)).cumsum()
                ends = np.rint(shares * len(own)).astype(int)
                part |= {i: int(np.searchsorted(ends, place, side="right")) for place, i in enumerate(own)}
            return sorted(shuffled, key=lambda i: part[i])
        return shuffled


def _hash(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
