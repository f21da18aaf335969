"""Images through an image tower in chunks, on a CPU each chunk by a core of its own.

Cores that share an operation wait for each other at its end, some hundred times a chunk, and read what another has just
written. Cores that have chunks of their own do neither.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from math import ceil

import torch
from torch import Tensor

ON_CPU = 4  # images encoded at once: activations of few stay in a core's cache
ON_GPU = 64

_observer: ContextVar[Callable[[int], None] | None] = ContextVar("observer", default=None)


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
    size, threads, done = chunk_size(device), torch.get_num_threads(), _observer.get()

    @torch.no_grad()  # not inference_mode: its tensors may not take part in a later backward pass
    def work_on(chunk: Tensor) -> Tensor:
        result = work(chunk)
        if done is not None:
            done(len(chunk))
        return result

    workers = min(threads, len(rows)) if device.type == "cpu" else 1
    if workers < 2:
        return torch.cat([work_on(chunk) for chunk in torch.split(rows, size)])
    # As many chunks for each worker, so that none waits while another has a last chunk of its own.
    chunks = torch.tensor_split(rows, workers * ceil(len(rows) / size / workers))
    try:
        with ThreadPoolExecutor(workers, "usetta-encode", torch.set_num_threads, (threads // workers,)) as pool:
            return torch.cat(list(pool.map(work_on, chunks)))
    finally:
        torch.set_num_threads(threads)  # what a worker sets is its own, but also the default of threads to come
