"""What a cluster gives and costs: `python -m benchmarks.scaling [--json]`, and `--stages`, `--grid` for sizing.

Two single-threaded workers of a Ray cluster on this machine are compared with one on the same images (ViT-B/16 with
random weights, few views). Workers report when they began and ended each image, and only images that were done while
all workers were running count: how long a worker takes to start is another question. Then a hundred thousand empty work
items go through Ray: the driver's memory at the end over that after a tenth of them, and the time of an item.

`--stages` measures processor time of the stages of an image, on one core. `--grid` computes from such figures what the
paper's whole grid takes on 1, 10, 100 and 1000 workers; docs/cluster.md shows its output. Both need two idle cores; the
default takes about a quarter of an hour.
"""

import argparse
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common import load, log, show
from usetta import methods
from usetta.batch.runner import BatchSettings, BatchWorker, ImageBatch
from usetta.batch.sources import BatchImage
from usetta.distributed import RayEngine
from usetta.timing import class_names, generated_jpeg

TARGETS = {
    "two_workers_speedup": ("images per second of two workers ÷ one", "≥ 1.8"),
    "driver_memory_growth": ("memory of the driver after all work items ÷ after a tenth of them", "≤ 1.05"),
    "ray_overhead": ("milliseconds of the driver and Ray for a work item (of 8 images)", ""),
}


@dataclass(frozen=True)
class Span:
    """When a worker was busy with an image."""

    worker: int
    begin: float
    end: float


class TimedWorker:
    """The worker of `usetta classify`, which returns times instead of answers."""

    def __init__(self, views: int) -> None:
        setting = BatchSettings(tuple(class_names(100)), methods.get("se"), ("a photo of a {}.",), views=views)
        self._worker = BatchWorker(setting.classifier(load()), 1)

    def run(self, batches: Iterable[ImageBatch]) -> Generator[Span, None, None]:
        for batch in batches:
            begin = time.time()
            for _ in self._worker.run([batch]):
                yield Span(os.getpid(), begin, time.time())


def throughput(workers: int, images: int, views: int) -> float:
    """Images per second while all workers are busy."""
    batches = (ImageBatch((i,), (BatchImage("", str(i), generated_jpeg(i)),)) for i in range(images))
    engine = RayEngine("local", workers)
    spans = [span for _, span in engine.run(partial(TimedWorker, views), batches) if isinstance(span, Span)]
    started = {span.worker for span in spans}
    assert len(started) == workers, "a worker started too late; increase --images"
    # From when the last worker has finished its first image to when the first one has nothing more to do.
    begin = max(min(span.end for span in spans if span.worker == worker) for worker in started)
    end = min(max(span.end for span in spans if span.worker == worker) for worker in started)
    busy = sum(max(0.0, min(span.end, end) - max(span.begin, begin)) / (span.end - span.begin) for span in spans)
    return busy / (end - begin)


@dataclass(frozen=True)
class EmptyItem:
    """A work item without work."""

    key: int
    payload: bytes = bytes(1000)
    """About as much as the paths of eight images."""

    def parts(self) -> list["EmptyItem"]:
        return [self]


class IdleWorker:
    """Returns about as many bytes as eight images and twelve methods do."""

    def run(self, items: Iterable[EmptyItem]) -> Generator[bytes, None, None]:
        for _ in items:
            yield bytes(10_000)


def resident() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_driver(items: int) -> dict[str, float]:
    """Growth of the driver's memory, and milliseconds of a work item."""
    begin, after_tenth = 0.0, 0

    def empty_items() -> Iterator[EmptyItem]:
        yield from (EmptyItem(i) for i in range(items))

    for done, _ in enumerate(RayEngine("local").run(IdleWorker, empty_items())):
        if done == items // 10:
            begin, after_tenth = time.perf_counter(), resident()
    seconds = time.perf_counter() - begin
    return {
        "driver_memory_growth": resident() / after_tenth,
        "ray_overhead": 1000 * seconds / (items - items // 10),
    }


def measure(images: int, rounds: int, views: int, items: int) -> dict[str, float]:
    """The figures of `TARGETS`."""
    one, two = [], []
    for i in range(rounds):
        one.append(throughput(1, images, views))
        two.append(throughput(2, 2 * images, views))
        log(f"round {i + 1} of {rounds}: {one[-1]:.3f} and {two[-1]:.3f} images/s")
    log(f"{items} empty work items")
    return {"two_workers_speedup": max(two) / max(one), **measure_driver(items)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--images", type=int, default=16, help="of a round, for each worker")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--views", type=int, default=4, help="of an image")
    parser.add_argument("--items", type=int, default=100_000, help="empty work items")
    parser.add_argument("--stages", action="store_true", help="processor time of the stages of an image, as JSON")
    parser.add_argument("--grid", action="store_true", help="what the paper's grid takes, as a Markdown table")
    options = parser.parse_args()
    if options.stages or options.grid:
        from benchmarks import sizing

        print(json.dumps(sizing.measure_stages(log), indent=1) if options.stages else sizing.grid())
        return
    figures = measure(options.images, options.rounds, options.views, options.items)
    show(figures, TARGETS, as_json=options.json)


if __name__ == "__main__":
    main()
