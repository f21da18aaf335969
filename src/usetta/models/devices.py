"""What is the same on all devices: waiting for one, reading from one, and a stream of work beside the main one.

A GPU computes while the host does other things. Whatever the host reads from it makes the host wait, and the GPU
after that, so reads are few: `to_host` makes one of many.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def device_of(model: object) -> torch.device:
    """Where a model computes; one that does not say so is taken to do it on the CPU."""
    return torch.device(getattr(model, "device", "cpu"))


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device on the CPU, all by one read."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    # As bytes, because their types differ. The widest numbers come first, so that all stand at multiples of their size.
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
    packed = torch.cat([tensors[number].contiguous().flatten().view(torch.uint8) for number in order]).cpu()
    parts = torch.split(packed, [tensors[number].nbytes for number in order])
    on_host = {
        number: part.view(tensors[number].dtype).view(tensors[number].shape)
        for number, part in zip(order, parts, strict=True)
    }
    return [on_host[number] for number in range(len(tensors))]


class SideStream:
    """Work that a CUDA device may do beside that of the current stream. Elsewhere it is done in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._device = device

    @contextmanager
    def launch(self) -> Iterator[None]:
        """What is launched inside starts after all that was launched before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "torch.cuda.Event | None":
        """The end of what was launched so far."""
        return None if self._stream is None else self._stream.record_event()

    def use(self, mark: "torch.cuda.Event | None", results: Iterable[Tensor | None]) -> None:
        """Let what is launched from now on start after a mark, and use the results of the work before it."""
        if mark is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        for result in results:
            if result is not None and result.device.type == "cuda":
                result.record_stream(current)  # else their memory may be given away while this stream reads it
