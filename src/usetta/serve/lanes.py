"""The image tower on all cores, in the way that suits what waits.

The views of a picture that is alone go through the tower with every core inside every operation, which answers soonest.
Where others wait, views are dealt to lanes, threads with one core each: cores then never wait for each other between
operations, and threads that decode the next pictures take their share of them without holding up the rest. That answers
most in the end.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


class Lanes:
    """`count` lanes, by default as many as PyTorch has threads; one where there is a GPU. For one thread alone."""

    def __init__(self, count: int | None = None) -> None:
        self._threads = torch.get_num_threads()
        self.count = count or (1 if torch.cuda.is_available() else self._threads)
        self._pool = ThreadPoolExecutor(self.count, "usetta-lane", initializer=torch.set_num_threads, initargs=(1,))

    def encode(self, tower: Callable[[Tensor], Tensor], pixels: Tensor, *, spread: bool) -> Tensor:
        """Features (n, D) of views (n, 3, S, S), in lanes if they shall be `spread`."""
        if self.count == 1 or len(pixels) < 2 or not spread:
            return tower(pixels)
        parts = [part for part in torch.tensor_split(pixels, self.count) if len(part)]
        features = torch.cat(list(self._pool.map(tower, parts)))
        torch.set_num_threads(self._threads)  # what a lane sets is its own, but also the default of threads to come
        return features

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
