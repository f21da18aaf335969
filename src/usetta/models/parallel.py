"""Images through an image tower in parts, on a CPU each part by a core of its own.

Cores that share an operation wait for each other at its end, some hundred times a part, and read what another has just
written. Cores that have parts of their own do neither.
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
    lanes = min(threads, len(rows)) if device.type == "cpu" else 1
    if lanes < 2:
        return torch.cat([work(part) for part in torch.split(rows, size)])
    parts = torch.tensor_split(rows, lanes * ceil(len(rows) / size / lanes))
    try:
        with ThreadPoolExecutor(lanes, "usetta-encode", torch.set_num_threads, (threads // lanes,)) as pool:
            return torch.cat(list(pool.map(torch.no_grad()(work), parts)))
    finally:
        torch.set_num_threads(threads)  # what a lane sets is its own, but also the default of threads to come
