"""What a cluster gives and costs: `python -m benchmarks.scaling [--json]`, and `--stages`, `--grid` for sizing.

Two single-threaded workers of a Ray cluster on this machine are compared with one on the same images (ViT-B/16 with
random weights, few views). Workers tell when they began and ended each image, and what counts is how many were done
while all of them worked: how long it takes to start is another question. Then a hundred thousand pieces of work that
are no work go through Ray: memory of the driver at the end over that after a tenth, and the time of a piece.

`--stages` measures processor time of the stages of an image, on one core. `--grid` computes from such figures what the
paper's whole grid takes on 1, 10, 100 and 1000 workers; docs/cluster.md shows its output. Both want two idle cores;
the default takes about a quarter of an hour.
"""

import argparse
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.names import class_names
from usetta import methods
from usetta.batch.runner import Batch, BatchSettings, BatchWorker
from usetta.batch.sources import BatchImage
from usetta.distributed import RayEngine
from usetta.models import Model, load_model

TARGETS = {
    "two_workers_speedup": ("images per second of two workers ÷ one", "≥ 1.8"),
    "driver_memory_growth": ("memory of the driver after all pieces ÷ after a tenth of them", "≤ 1.05"),
    "ray_overhead": ("milliseconds of the driver and Ray for a piece of work (of 8 images)", ""),
}


def random_weights(name: str = "ViT-B-16") -> Model:
    """A model whose answers mean nothing, which is no news here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(name, weights="random", precision="fp32")


def image(seed: int, size: tuple[int, int] = (500, 375)) -> bytes:
    """A JPEG with structure at several scales."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse) + rng.integers(-12, 12, (size[1], size[0], 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


@dataclass(frozen=True)
class Span:
    """When a worker was at a piece of work."""

    worker: int
    begin: float
    end: float


class Watched:
    """The hand of `usetta classify`, which tells its times instead of its answers."""

    def __init__(self, views: int) -> None:
        setting = BatchSettings(tuple(class_names(100)), methods.get("se"), ("a photo of a {}.",), views=views)
        self._hand = BatchWorker(setting.classifier(random_weights()), 1)

    def run(self, batches: Iterable[Batch]) -> Generator[Span, None, None]:
        for batch in batches:
            begin = time.time()
            for _ in self._hand.run([batch]):
                yield Span(os.getpid(), begin, time.time())


def throughput(workers: int, images: int, views: int) -> float:
    """Images per second while all workers work."""
    works = (Batch((i,), (BatchImage("", str(i), image(i)),)) for i in range(images))
    engine = RayEngine("local", workers)
    spans = [span for _, span in engine.run(partial(Watched, views), works) if isinstance(span, Span)]
    crew = {span.worker for span in spans}
    assert len(crew) == workers, "a worker came too late; give more --images"
    # From when the last of them has finished its first image to when the first of them has nothing more to do.
    begin = max(min(span.end for span in spans if span.worker == worker) for worker in crew)
    end = min(max(span.end for span in spans if span.worker == worker) for worker in crew)
    busy = sum(max(0.0, min(span.end, end) - max(span.begin, begin)) / (span.end - span.begin) for span in spans)
    return busy / (end - begin)


@dataclass(frozen=True)
class Nothing:
    """Work that is no work."""

    key: int
    load: bytes = bytes(1000)
    """About what eight images of a dataset take to be named."""

    def parts(self) -> list["Nothing"]:
        return [self]


class Idle:
    """Gives back about as much as eight images and twelve methods do."""

    def run(self, works: Iterable[Nothing]) -> Generator[bytes, None, None]:
        for _ in works:
            yield bytes(10_000)


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_driver(pieces: int) -> dict[str, float]:
    """Growth of the driver's memory, and milliseconds of a piece."""
    begin, after_tenth = 0.0, 0

    def works() -> Iterator[Nothing]:
        yield from (Nothing(i) for i in range(pieces))

    for done, _ in enumerate(RayEngine("local").run(Idle, works())):
        if done == pieces // 10:
            begin, after_tenth = time.perf_counter(), resident()
    seconds = time.perf_counter() - begin
    return {
        "driver_memory_growth": resident() / after_tenth,
        "ray_overhead": 1000 * seconds / (pieces - pieces // 10),
    }


def tell(text: str) -> None:
    """What is going on, for people who wait."""
    print(text, file=sys.stderr, flush=True)


def measure(images: int, rounds: int, views: int, pieces: int) -> dict[str, float]:
    one, two = [], []
    for i in range(rounds):
        one.append(throughput(1, images, views))
        two.append(throughput(2, 2 * images, views))
        tell(f"round {i + 1} of {rounds}: {one[-1]:.3f} and {two[-1]:.3f} images/s")
    tell(f"{pieces} pieces of no work")
    return {"two_workers_speedup": max(two) / max(one), **measure_driver(pieces)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--images", type=int, default=16, help="of a round, for each worker")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--views", type=int, default=4, help="of an image")
    parser.add_argument("--items", type=int, default=100_000, help="pieces of work that are no work")
    parser.add_argument("--stages", action="store_true", help="processor time of the stages of an image, as JSON")
    parser.add_argument("--grid", action="store_true", help="what the paper's grid takes, as a Markdown table")
    options = parser.parse_args()
    if options.stages or options.grid:
        from benchmarks import sizing

        print(json.dumps(sizing.measure_stages(tell), indent=1) if options.stages else sizing.grid())
        return
    figures = measure(options.images, options.rounds, options.views, options.items)
    if options.json:
        print(json.dumps(figures))
        return
    for key, (meaning, target) in TARGETS.items():
        print(f"{figures[key]:8.3f}  {target:6}  {meaning}")


if __name__ == "__main__":
    main()
