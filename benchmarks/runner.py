"""What a run costs beside its model: `python -m benchmarks.runner [--json]`.

ViT-B/16 with random weights in float32, generated JPEGs of 500 x 375 pixels, 64 views with AugMix, 100 classes. The
bare model and the runner take turns on the same images, and the best of each counts: absolute times of one machine
say little about another. The bare model finds its views ready-made; the runner starts from files, in a new directory.

`classify --out` is compared with answering one image after the other, whose views one thread makes before the tower
starts: 64 crops of JPEGs of 1600 x 1200 pixels, with a small model whose tower takes no longer than making the views.
There it pays most that both happen at the same time.

Peak memory is that of a process of its own for each number of images, with a model so small that images would show.
Takes about ten minutes on two cores; single figures are measured by their keys.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.common import load
from usetta import Classifier, methods
from usetta.batch.runner import BatchSettings, classify
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.images import open_image
from usetta.models.clip import random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig
from usetta.timing import class_names
from usetta.views import ViewRecipe, make_views

METHODS = ("clip", "se")
OTHERS = ("clip", "se", "mta", "zero", "tps")
"""Of a second run: the same and others, none of which asks more than features."""
FEW = 100
TARGETS = {
    "batch_speedup": ("one image after the other, views by one thread ÷ `classify --out`, 32 images", "≥ 1.5"),
    "runner_over_model": ("images per second of the runner ÷ the bare model", "≥ 0.9"),
    "cached_speedup": ("time of a run ÷ a second one with more methods and the first one's features", "≥ 10"),
    "memory_growth": ("peak memory of many images ÷ 100", "≤ 1.1"),
    "time_growth": ("time per image of many images ÷ 100", "≤ 1.1"),
}


def generated(root: Path, images: int, size: tuple[int, int], classes: int) -> Dataset:
    """A dataset of JPEGs with structure at several scales, so that decoding them is the usual work."""
    rng = np.random.default_rng(0)
    ids = tuple(f"{i}.jpg" for i in range(images))
    for name in ids:
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        noise = rng.integers(-12, 12, (size[1], size[0], 3))
        Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)).save(root / name, quality=90)
    labels = tuple(i % classes for i in range(images))
    return Dataset(
        "generated", "Generated", "fine-grained", tuple(class_names(classes)), ids, labels, root, "generated"
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_times(images: int, rounds: int, threads: int) -> dict[str, float]:
    """Ratios of times."""
    model = load()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        dataset = generated(folder / "images", images, (500, 375), 100)
        recipe = ViewRecipe(size=model.image_size, augmix=True)
        views = [make_views(open_image(each.path, for_benchmark=True), each.id, recipe) for each in dataset]

        def bare() -> float:
            return timed(lambda: [model.encode_images(each) for each in views])

        def runner(out: str, names: tuple[str, ...] = METHODS, cache: Path | None = None, some: int = images) -> float:
            return evaluate(
                model, [dataset], names, folder / out, EvalSettings(), limit=some, cache=cache, threads=threads
            ).seconds

        log("warming up")
        model.encode_images(views[0])
        runner("first", some=1)
        alone, whole = [], []
        for i in range(rounds):
            alone.append(bare())
            whole.append(runner(f"round-{i}", cache=folder / f"cache-{i}"))
            log(f"round {i + 1} of {rounds}: bare model {alone[-1]:.1f} s, runner {whole[-1]:.1f} s")
        cached = [runner(f"again-{i}", OTHERS, folder / f"cache-{i}") for i in range(rounds)]
        log(f"with the features of the first run: {min(cached):.1f} s")
    return {"runner_over_model": min(alone) / min(whole), "cached_speedup": min(whole) / min(cached)}


def measure_batch(images: int, rounds: int) -> float:
    """Time of one image after the other, views by one thread, ÷ that of `classify --out`."""
    vision = ViTConfig(image_size=224, patch_size=32, width=96, layers=2, heads=1)
    model = random_model(CLIPConfig(64, vision, TextConfig(width=64, layers=2, heads=1)), name="small-random")
    settings = BatchSettings(tuple(class_names(100)), methods.get("se"), ("a photo of a {}.",), views=64)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        dataset = generated(folder / "images", images, (1600, 1200), 100)

        def one_by_one() -> None:
            # With more threads the views of a single image keep all cores busy, too.
            classifier = Classifier(settings.classes, model, settings.recipe, views=settings.views, threads=1)
            for item in dataset:
                classifier(item.path)

        one_by_one()  # which warms up
        singly, together = [], []
        for i in range(rounds):
            singly.append(timed(one_by_one))
            done = classify(model, settings, [str(folder / "images")], folder / f"out-{i}")
            together.append(done.seconds)
            log(f"round {i + 1} of {rounds}: one by one {singly[-1]:.1f} s, classify --out {together[-1]:.1f} s")
    return min(singly) / min(together)


def crowd(images: int) -> tuple[int, float]:
    """Peak resident memory in kB after a run over so many images, and the seconds that each took."""
    vision = ViTConfig(image_size=32, patch_size=16, width=32, layers=1, heads=1)
    text = TextConfig(width=32, layers=1, heads=1)
    model = random_model(CLIPConfig(embed_dim=16, vision=vision, text=text), name="tiny-random")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        dataset = generated(folder / "images", images, (80, 60), 10)
        done = evaluate(model, [dataset], METHODS, folder / "run", EvalSettings(views=4), cache=folder / "cache")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, done.seconds / images


def alone(images: int) -> tuple[float, float]:
    """The same of a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.runner", "--crowd", str(images)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()  # noqa: S603
    return float(printed[0]), float(printed[1])


def log(text: str) -> None:
    """Progress, for people who wait."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--images", type=int, default=6, help="of a round of the bare model and the runner")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="that make views")
    parser.add_argument("--many", type=int, default=10_000, help="images whose memory is compared with that of 100")
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("keys", nargs="*", choices=[*TARGETS, []], help="figures to measure; by default all")
    options = parser.parse_args()
    if options.crowd:
        print(*crowd(options.crowd))
        return
    keys = options.keys or list(TARGETS)
    figures: dict[str, float] = {}
    if {"memory_growth", "time_growth"} & {*keys}:  # first: a child's peak starts from its parent's
        crowds: dict[int, list[tuple[float, float]]] = {FEW: [], options.many: []}
        for _ in range(options.rounds):
            for count, costs in crowds.items():
                log(f"memory and time of {count} images")
                costs.append(alone(count))
        for i, key in enumerate(("memory_growth", "time_growth")):
            few, many = (min(cost[i] for cost in costs) for costs in crowds.values())
            figures[key] = many / few
    if "batch_speedup" in keys:
        figures["batch_speedup"] = measure_batch(32, 2 * options.rounds)
    if {"runner_over_model", "cached_speedup"} & {*keys}:
        figures |= measure_times(options.images, options.rounds, options.threads)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "images": options.images} | figures))
        return
    for key, value in figures.items():
        meaning, target = TARGETS[key]
        print(f"{value:8.3f}  {target:6}  {meaning}")


if __name__ == "__main__":
    main()
