"""Images through an image tower in chunks, on a CPU each chunk by a core of its own.

Cores that share an operation wait for each other at its end, some hundred times a chunk, and read what another has just
written. Cores that have chunks of their own do neither. A lone image has but one chunk, which all cores share; where
several images wait, `map_on_cores` gives each a core of its own, without changing a bit of any.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from usetta.cancellation import current_check

ON_CPU = 4  # images encoded at once: activations of few stay in a core's cache
ON_GPU = 64

T = TypeVar("T")

_one_core: ContextVar[int | None] = ContextVar("one_core", default=None)
"""The threads that a thread of `map_on_cores` stands for."""
_observer: ContextVar[Callable[[int], None] | None] = ContextVar("observer", default=None)

if hasattr(os, "register_at_fork"):
    # OpenMP's threads do not survive a fork, and a child that shares an operation among them waits for ever. PyTorch's
    # own data loaders compute in one thread after a fork, too.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@contextmanager
def observe_chunks(done: Callable[[int], None]) -> Iterator[None]:
    """Within it, `done` is called with the number of rows of each computed chunk, by the thread that computed it."""
    token = _observer.set(done)
    try:
        yield
    finally:
        _observer.reset(token)


def chunk_size(device: torch.device) -> int:
    """Images encoded at once, at most."""
    return ON_CPU if device.type == "cpu" else ON_GPU


def map_chunks(work: Callable[[Tensor], Tensor], rows: Tensor, device: torch.device) -> Tensor:
    """`work` on all rows (n, …), by a model on `device`. It is called by several threads at once."""
    one_core, size, done, check = _one_core.get(), chunk_size(device), _observer.get(), current_check()
    threads = one_core or torch.get_num_threads()

    @torch.no_grad()  # not inference_mode: its tensors may not take part in a later backward pass
    def work_on(chunk: Tensor) -> Tensor:
        check()
        result = work(chunk)
        if done is not None:
            done(len(chunk))
        return result

    workers = min(threads, len(rows)) if device.type == "cpu" else 1
    if workers < 2:
        chunks: Sequence[Tensor] = torch.split(rows, size)
    else:  # as many chunks for each worker, so that none waits while another has a last chunk of its own
        chunks = torch.tensor_split(rows, workers * ceil(len(rows) / size / workers))
    if one_core is not None and device.type == "cpu":
        with _AttentionThreads(threads // max(1, workers)):
            return torch.cat([work_on(chunk) for chunk in chunks])
    if workers < 2:
        return torch.cat([work_on(chunk) for chunk in chunks])
    try:
        with ThreadPoolExecutor(workers, "usetta-encode", _compute_with, (threads // workers,)) as pool:
            return torch.cat(list(pool.map(work_on, chunks)))
    finally:
        torch.set_num_threads(threads)  # what a worker sets is its own, but also the default of threads to come


def map_on_cores(work: Callable[[T], None], items: Sequence[T]) -> None:
    """`work` on each item by one core, with the results that `map_chunks` has in it when all cores share an item.

    That they are equal to the last bit is for the caller to find out (`agrees_on_one_core`).
    """
    threads = torch.get_num_threads()

    def on_one_core(item: T) -> None:
        _one_core.set(threads)
        work(item)

    try:
        with ThreadPoolExecutor(threads, "usetta-core", _compute_with, (1,)) as pool:
            for future in [pool.submit(copy_context().run, on_one_core, item) for item in items]:
                future.result()
    finally:
        torch.set_num_threads(threads)


def agrees_on_one_core(encode: Callable[[Tensor], Tensor], size: int) -> bool:
    """Whether `encode` gives two random views (2, 3, size, size) the same features by one core as by all of them.

    A matrix product may add up in another order when it is shared; whether it does depends on processor and library.
    """
    views = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    by_one: list[Tensor] = []
    map_on_cores(lambda views: by_one.append(encode(views)), [views])
    return torch.equal(encode(views), by_one[0])


def _compute_with(threads: int) -> None:
    """A new thread shares its operations among `threads`.

    PyTorch gives a thread the number that any thread has set last, once, at its first operation. It is asked for that
    here, so that it does not come later and replace the thread's own number.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


class _AttentionThreads(TorchFunctionMode):
    """Attention of a single query by as many threads as elsewhere: PyTorch gives each of them a part of its sum."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention or args[0].shape[-2] > 1:
            return func(*args, **(kwargs or {}))
        torch.set_num_threads(self._threads)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_num_threads(1)
