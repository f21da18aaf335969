"""What memories have in common: their input, their state, and the caches that several of them keep.

A memory is a function of a state, images in the order of a stream, and what the whole stream shares, to logits and the
state after these images. It answers a batch exactly as if its images came one by one. The state is a dictionary of
tensors of fixed size, None before the first image; it is updated in place, so the one that was passed in must not be
used again.

Batches are quick because of one observation: which images a cache keeps depends on their zero-shot labels and
entropies alone. So `Turnover` first plays through who enters and who leaves, on a few numbers, and all products of
features are computed afterwards, at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Stream:
    """What all images of a stream have in common."""

    text: Tensor
    """(C, D): features of the classes, of unit length."""
    logit_scale: float
    rho: float = 0.1
    """Share of the views that is kept."""
    length: int | None = None
    """Images of the whole stream, where that is known."""


class Answers(NamedTuple):
    """B images as a readout sees them."""

    features: Tensor
    """(B, D), of unit length"""
    logits: Tensor
    """(B, C)"""


class Views(NamedTuple):
    """N views of B images, the weak view first."""

    features: Tensor
    """(B, N, D), of unit length"""
    logits: Tensor
    """(B, N, C)"""


@dataclass(frozen=True)
class Memory:
    """A memory, and what it works with."""

    step: Callable[..., tuple[Tensor, State]]
    """(state or None, `Answers` or `Views`, stream, **options) → logits (B, C), state."""
    sees: Literal["answer", "views"] = "answer"
    """Whether it takes the answer of the readout, or chooses among the views itself."""
    returns: Literal["logits", "probabilities"] = "logits"
    """What the method computes; logarithms of probabilities count as logits, but have no energy."""
    numbers: Callable[[int, int, Mapping[str, Any]], float] | None = None
    """(classes, dimensions, options) → the most numbers that a state has, infinite if it grows; None: unknown."""


def smoothed_entropy(logits: Tensor) -> Tensor:
    """−Σ p ln(p + 1e-5) over the last axis, by which published caches rank images."""
    probs = logits.softmax(dim=-1)
    return -(probs * (probs + 1e-5).log()).sum(dim=-1)


def affinity(cosines: Tensor, sharpness: float) -> Tensor:
    """exp(−β (1 − cos)): 1 for equal features."""
    return (sharpness * (cosines - 1)).exp()


def unit(vectors: Tensor) -> Tensor:
    """Vectors (..., D) of length 1; zeros stay zeros."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def log_probabilities(probs: Tensor) -> Tensor:
    """Logarithms that stay finite where a probability has vanished."""
    return probs.clamp(min=torch.finfo(probs.dtype).tiny).log()


def touched_zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros that take their memory now and not when they are written to, so that memory does not seem to grow."""
    return like.new_empty(shape).zero_()


class Turnover:
    """Which keys a cache of C × K slots holds while images pass, best first.

    Key s < C·K is what slot s held before, key C·K + i is image i. `born` and `dies` are the first image that sees a
    key and the first that does not any more.
    """

    def __init__(self, entropies: Tensor, images: int) -> None:
        """`entropies` (C, K) of what the slots hold, infinite where they are empty."""
        self.capacity = entropies.shape[1]
        self._entropies = entropies
        self._images = images
        self._size = entropies.numel()
        self.rows: dict[int, list[tuple[float, int]]] = {}
        """Entropy and key of what a class holds, of classes that an image was put in."""
        self._dies = [images] * (self._size + images)
        self._born = [images] * images

    def row(self, label: int) -> list[tuple[float, int]]:
        """Entropies and keys of what a class holds."""
        if label not in self.rows:
            held = self._entropies[label].tolist()
            first = label * self.capacity
            self.rows[label] = [(entropy, first + k) for k, entropy in enumerate(held) if entropy < torch.inf]
        return self.rows[label]

    def insert(self, label: int, entropy: float, image: int, *, newest_first: bool = False) -> None:
        """Put an image in the row of its class, which loses its last key if it is full.

        Rows are in the order of their entropies, of equal ones the older first, and a full row is closed to an image
        that is not better than its last. With `newest_first` entropies do not matter.
        """
        row = self.row(label)
        place = 0 if newest_first else sum(other <= entropy for other, _ in row)
        if place == self.capacity:
            return
        row.insert(place, (entropy, self._size + image))
        self._born[image] = image
        if len(row) > self.capacity:
            self._dies[row.pop()[1]] = image

    def find(self, key: int, table: Tensor, images: Tensor) -> Tensor:
        """What a key stands for: a slot of `table` (C, K, …), or one of `images` (B, …)."""
        return table.flatten(0, 1)[key] if key < self._size else images[key - self._size]

    def seen(self, keys: Tensor) -> Tensor:
        """Whether each image sees each of `keys` (n,): (B, n)."""
        empty = torch.where(torch.isfinite(self._entropies.flatten()), 0, self._images)
        born = torch.cat([empty.to(keys.device), torch.tensor(self._born, device=keys.device)])[keys]
        dies = torch.tensor(self._dies, device=keys.device)[keys]
        times = torch.arange(self._images, device=keys.device)[:, None]
        return (born <= times) & (times < dies)

    def write(self, *tables: tuple[Tensor, Tensor]) -> None:
        """Bring tables (C, K, …) up to date; each comes with the rows (B, …) of the images."""
        if not self.rows:
            return
        device, slots = self._entropies.device, range(self.capacity)
        padded = [
            [row[k][1] if k < len(row) else label * self.capacity + k for k in slots]  # an empty slot stays as it is
            for label, row in self.rows.items()
        ]
        labels, keys = torch.tensor(list(self.rows), device=device), torch.tensor(padded, device=device)
        is_old = keys < self._size
        for table, images in tables:
            old = table.flatten(0, 1)[keys.clamp(max=self._size - 1)]
            new = images[(keys - self._size).clamp(min=0)]
            table[labels] = torch.where(is_old.view(*keys.shape, *[1] * (table.ndim - 2)), old, new)
