"""Images through an image tower in chunks, on a CPU each chunk by a core of its own.

Cores that share an operation wait for each other at its end, some hundred times a chunk, and read what another has just
written. Cores that have chunks of their own do neither.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import ceil

import torch
from torch import Tensor

ON_CPU = 4  # images encoded at once: activations of few stay in a core's cache
ON_GPU = 64


def chunk_size(device: torch.device) -> int:
    """Images encoded at once, at most."""
    return ON_CPU if device.type == "cpu" else ON_GPU


@torch.no_grad()  # not inference_mode: its tensors may not take part in a later backward pass
def map_chunks(work: Callable[[Tensor], Tensor], rows: Tensor, device: torch.device) -> Tensor:
    """`work` on all rows (n, …), by a model on `device`. It is called by several threads at once."""
    size, threads = chunk_size(device), torch.get_num_threads()
    workers = min(threads, len(rows)) if device.type == "cpu" else 1
    if workers < 2:
        return torch.cat([work(chunk) for chunk in torch.split(rows, size)])
    # As many chunks for each worker, so that none waits while another has a last chunk of its own.
    chunks = torch.tensor_split(rows, workers * ceil(len(rows) / size / workers))
    try:
        with ThreadPoolExecutor(workers, "usetta-encode", torch.set_num_threads, (threads // workers,)) as pool:
            return torch.cat(list(pool.map(torch.no_grad()(work), chunks)))
    finally:
        torch.set_num_threads(threads)  # what a worker sets is its own, but also the default of threads to come
