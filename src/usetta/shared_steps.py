"""Tuning steps that several methods have in common are computed once, as long as these methods answer the same images.

The gradients of TPT, C-TPT and O-TPT differ by a constant of the class list; `rce` and `use`, or `tpt` and `tpt+se`,
tune alike to the end and differ in their readout; `tpt:steps=4` begins as `tpt` does. So results are kept by the bits
of what they were computed from: whatever asks for the same gets the same bits, alone or beside other methods, and no
method has to know of another. Hashing takes a thousandth of the time of a step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

_BYTES = 2**27
"""Of results that are kept: text features of 1000 classes for 64 tuned contexts."""


class _Known(NamedTuple):
    result: Tensor
    seconds: float
    """What it cost, and would have cost again."""


class SharedSteps:
    """Results of tuning steps of one class list, kept within `kept()` only."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Known] | None = None
        self.seconds_saved = 0.0
        """Time that results which were known would have taken, so that a method can be charged as if it were alone."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep results until the end of this block. An inner block changes nothing."""
        if self._known is not None:
            yield
            return
        self._known = OrderedDict()
        try:
            yield
        finally:
            self._known = None

    def get(self, compute: Callable[[], Tensor], kind: str, inputs: Sequence[Tensor | None]) -> Tensor:
        """What `compute` returns, which depends on `kind` and `inputs` alone; nobody may write to it.

        On a device nothing is kept: the host would have to wait for the inputs.
        """
        known = self._known
        if known is None or any(tensor is not None and tensor.device.type != "cpu" for tensor in inputs):
            return compute()
        key = _digest(kind, inputs)
        if key in known:
            known.move_to_end(key)
            self.seconds_saved += known[key].seconds
            return known[key].result
        started, saved = perf_counter(), self.seconds_saved
        result = compute().detach()
        # What `compute` found known in turn would have taken its time, too.
        known[key] = _Known(result, perf_counter() - started + self.seconds_saved - saved)
        while len(known) > 1 and sum(entry.result.nbytes for entry in known.values()) > _BYTES:
            known.popitem(last=False)
        return result


def _digest(kind: str, inputs: Sequence[Tensor | None]) -> bytes:
    digest = blake2b(kind.encode(), digest_size=16)
    for tensor in inputs:
        if tensor is None:
            digest.update(b"none")
        else:
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
