"""How fast stream methods answer from cached features: `python -m benchmarks.streams [--json] [--methods tda,dpe]`.

Random unit features of one view of each of 10 000 images, and of 1000 classes, of 512 dimensions. An image of each
method costs the same at the end of the stream as at its beginning, but for three that are measured apart on fewer
images: ECALP, whose graph grows, DOTA, whose covariances are C × D × D numbers, and DPE, which multiplies k × k × D
numbers three times for every image, where k classes have had images. For DPE `dpe_products_images_per_second` is the
speed that would be left if nothing but these products were computed, at the k of the end: no order of its other work
can be faster. `stream_memory_growth` is the process's memory at the end of the streams over that after a
tenth of them.
"""

import argparse
import ctypes
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import log, show
from usetta.methods.memory import MEMORIES, Answers, State, Stream, Views

QUICK = ("tda", "dmn-weak", "boostadapter", "onzeta", "bca")
BATCH = 64


def answer(name: str, features: Tensor, stream: Stream, batch: int = BATCH) -> Iterator[State]:
    """The state after each batch of a stream."""
    memory, state = MEMORIES[name], None
    for part in features.split(batch):
        logits = stream.logit_scale * (part @ stream.text.T)
        seen = Views(part[:, None], logits[:, None]) if memory.sees == "views" else Answers(part, logits)
        _, state = memory.step(state, seen, stream)
        yield state


def current_memory() -> int:
    """Bytes that this process has in memory, without those that were freed and are kept for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def speed(name: str, features: Tensor, stream: Stream) -> tuple[float, float, float]:
    """Images per second in the median batch of the stream and in its last quarter, and by how much memory has grown.

    The median, because other programs on the machine can only make a batch longer. With one thread (OMP_NUM_THREADS=1)
    it is processor time, which they lengthen less.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds, early = [], 0
    batch = min(BATCH, len(features) // 8)
    batches = len(features) // batch
    last = clock()
    for number, _ in enumerate(answer(name, features[: batches * batch], stream, batch)):
        now = clock()
        seconds.append(now - last)
        if number == batches // 10:
            early = current_memory()
        last = clock()
    at_end = statistics.median(seconds[3 * batches // 4 :])
    return batch / statistics.median(seconds), batch / at_end, current_memory() / early


def products(classes: int, dim: int) -> float:
    """How often in a second DPE's three products can be computed, where so many classes have images."""
    text, images = torch.rand(2, classes, dim)
    error = torch.rand(classes, classes)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(images, text.T, out=error)
        torch.mm(error, text), torch.mm(error.T, images)
        seconds.append(time.perf_counter() - start)
    return 1 / min(seconds)


def measure(images: int, classes: int, dim: int, names: Sequence[str], slow: dict[str, int]) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    text, features = (
        torch.nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=-1) for n in (classes, images)
    )
    figures: dict[str, float] = {}
    growth = 0.0
    with torch.inference_mode():
        for name in [name for name in QUICK if name in names]:
            list(answer(name, features[: 4 * BATCH], Stream(text, 100.0, length=images)))  # warms up
            per_second, _, grown = speed(name, features, Stream(text, 100.0, length=images))
            growth = max(growth, grown)
            log(f"{name}: {per_second:.0f} images/s, memory grew by {grown:.3f}")
            figures[f"{name}_images_per_second"] = per_second
        if growth:
            figures["stream_memory_growth"] = growth
        for name, fewer in [(name, min(fewer, images)) for name, fewer in slow.items() if name in names]:
            per_second, at_end, _ = speed(name, features[:fewer], Stream(text, 100.0, length=fewer))
            log(f"{name}: {per_second:.1f} images/s over {fewer} images, {at_end:.1f} in its last quarter")
            figures |= {f"{name}_images_per_second": per_second, f"{name}_images_per_second_at_end": at_end}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=512)
    slow = {"dpe": 1024, "ecalp": 512, "dota": 32}
    parser.add_argument("--methods", default=",".join([*QUICK, *slow]), help="which, separated by commas")
    parser.add_argument("--slow-images", type=int, help="images of the streams that are measured apart")
    options = parser.parse_args()
    slow = {name: options.slow_images or fewer for name, fewer in slow.items()}
    names = options.methods.split(",")
    figures = measure(options.images, options.classes, options.dim, names, slow)
    if "dpe" in names:
        seen = min(slow["dpe"], options.images)
        held = round(options.classes * (1 - (1 - 1 / options.classes) ** seen))  # of random images
        figures["dpe_products_images_per_second"] = products(held, options.dim)
        log(f"dpe: {figures['dpe_products_images_per_second']:.1f} times its products for {held} classes in a second")
    meanings = {f"{name}_images_per_second": (f"{name}, images per second", ">= 2000") for name in QUICK}
    meanings["stream_memory_growth"] = ("memory at the end over that after a tenth of the stream", "<= 1.05")
    sizes = {name: getattr(options, name) for name in ("images", "classes", "dim")}
    show(figures, meanings, as_json=options.json, **sizes)


if __name__ == "__main__":
    main()
