"""Work and hands that are small enough to see what an engine does with them; workers import this module."""

import os
import signal
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from evaluate.runs import Counting, four_blocks
from usetta.models import Model


@dataclass(frozen=True)
class Numbers:
    """Work: numbers to be squared."""

    key: tuple[int, ...]

    def parts(self) -> list["Numbers"]:
        return [Numbers((number,)) for number in self.key]


class Squares:
    """Gives squares, and takes a piece before it has given the result of the last one."""

    def __init__(self, deadly: int | None = None, wrong: int | None = None, trace: Path | None = None) -> None:
        self._deadly = deadly
        self._wrong = wrong
        self._trace = trace

    def run(self, works: Iterable[Numbers]) -> Generator[list[int], None, None]:
        before: Numbers | None = None
        for work in works:
            if self._trace:
                with self._trace.open("a") as file:
                    file.write(f"{os.getpid()} {' '.join(map(str, work.key))}\n")
            if self._deadly in work.key:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._wrong in work.key:
                raise ValueError(f"{self._wrong} cannot be squared")
            if before:
                yield [number**2 for number in before.key]
            before = work
        if before:
            yield [number**2 for number in before.key]


class Slow(Counting):
    """A model that takes its time until it is told to hurry, so that there is a middle to be killed in."""

    hurry: Path | None = None
    """A file whose existence tells it."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        if self.hurry and not self.hurry.exists():
            time.sleep(0.3)
        return super().encode_images(pixels)


class Deadly(Counting):
    """A model that ends its process where an image is black."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        if not pixels.any():
            os._exit(1)
        return super().encode_images(pixels)


def load(kind: type[Counting], registry: Path) -> Model:
    """A model of that kind; whoever loads it is put down as a file with the number of its process."""
    (registry / str(os.getpid())).touch()
    model = kind(four_blocks())
    if isinstance(model, Slow):
        model.hurry = registry / "hurry"
    return model  # type: ignore[return-value]
