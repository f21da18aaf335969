"""How many images make one work item, so that results come back every few seconds and a kill loses no more than those.

Items should be large where images are fast, since each costs a message to another machine. Where images are slow an
item has one. How fast they are is found out during the run: the number begins with one, doubles while items
come back soon, and halves when they take long. What a worker has waiting counts too, so the number errs on the small
side.

Where the images of an item are computed together, as on a GPU, which ones those are decides the last bits of their
answers. There the number is fixed, because no answer may depend on the clock.
"""

import time
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

_SOON, _LONG = 2.0, 5.0
"""Seconds from when an item is sent until its result is there."""


class Pace:
    """The number of images per item, `most` at most, or if `fixed` always."""

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self.images = most if fixed else 1
        self.most = most
        self._fixed = fixed
        self._sent: dict[Hashable, float] = {}

    def pieces(self, images: Sequence[T]) -> Iterator[Sequence[T]]:
        """The images in pieces, each as large as is right when it is taken."""
        first = 0
        while first < len(images):
            piece = images[first : first + self.images]
            first += len(piece)
            yield piece

    def sent(self, key: Hashable) -> None:
        """An item is on its way."""
        self._sent[key] = time.monotonic()

    def returned(self, key: Hashable) -> None:
        """Its result is there. Items that were never sent, since they are parts of one that was, change nothing."""
        sent = self._sent.pop(key, None)
        if sent is None or self._fixed:
            return
        seconds = time.monotonic() - sent
        if seconds > _LONG:
            self.images = max(1, self.images // 2)
        elif seconds < _SOON:
            self.images = min(self.most, 2 * self.images)
