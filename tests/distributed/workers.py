"""Small work items, workers and models that show what an engine does with them; Ray's actors import this module."""

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
    """A work item: numbers to be squared."""

    key: tuple[int, ...]

    def parts(self) -> list["Numbers"]:
        return [Numbers((number,)) for number in self.key]


class SquareWorker:
    """Returns squares, and reads an item before it has returned the result of the one before."""

    def __init__(self, invalid: int | None = None, trace: Path | None = None) -> None:
        self._invalid = invalid
        self._trace = trace

    def run(self, items: Iterable[Numbers]) -> Generator[list[int], None, None]:
        previous: Numbers | None = None
        for item in items:
            if self._trace:
                with self._trace.open("a") as file:
                    file.write(f"{os.getpid()}\n")
            if self._invalid in item.key:
                raise ValueError(f"{self._invalid} cannot be squared")
            if previous:
                yield [number**2 for number in previous.key]
            previous = item
        if previous:
            yield [number**2 for number in previous.key]


class HangingWorker(SquareWorker):
    """It hangs at the number 3, with its whole process or alone, if it is the first to get it."""

    def __init__(self, stopped: Path, with_process: bool) -> None:
        super().__init__()
        self._stopped = stopped
        self._with_process = with_process

    def run(self, items: Iterable[Numbers]) -> Generator[list[int], None, None]:
        for item in items:
            if 3 in item.key and not self._stopped.exists():
                self._stopped.write_text(str(os.getpid()))
                if self._with_process:
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(10_000)
            yield [number**2 for number in item.key]


class SlowModel(Counting):
    """A model that is slow until a file exists, so that there is time to kill something in the middle of a run."""

    hurry: Path | None = None

    def encode_images(self, pixels: Tensor) -> Tensor:
        if self.hurry and not self.hurry.exists():
            time.sleep(0.3)
        return super().encode_images(pixels)


class DeadlyModel(Counting):
    """A model that kills its process when an image is black."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        if not pixels.any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_images(pixels)


def load(kind: type[Counting], processes: Path) -> Model:
    """A model of that kind. Each process that loads it leaves a file with its id in the folder `processes`."""
    (processes / str(os.getpid())).touch()
    model = kind(four_blocks())
    if isinstance(model, SlowModel):
        model.hurry = processes / "hurry"
    return model  # type: ignore[return-value]
