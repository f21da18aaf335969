"""How long the paper's grid takes: processor time of each stage of an image, and arithmetic on it.

Stages are measured on one core by processor time, which other programs on the machine hardly disturb. `STAGES` are the
figures that docs/cluster.md is computed from; `python -m benchmarks.scaling --stages` measures them again.
"""

import pickle
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from usetta import methods
from usetta.data import list_datasets
from usetta.episode import Episode, answer
from usetta.evaluate.store import ResultRow, Store
from usetta.images import open_image
from usetta.models import Model
from usetta.models.base import require_last_blocks
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, generated_jpeg, load_quietly
from usetta.views import ViewRecipe, make_views

METHODS = ("clip", "mta", "zero", "se", "use:skip=false", "tpt", "c-tpt", "r-tpt", "rlcf", "ttl", "tps", "sts")
"""The paper's twelve; USE as if it never skipped, which is the most that it can cost."""
BACKBONES = ("ViT-B-16", "RN50")
FEW, MANY = 50, 250
"""Numbers of classes at which methods are measured; costs are linear in between and beyond."""
_TIMED_VIEWS, _VIEWS = 8, 64
"""Views with which the tower is timed, a batch on a CPU, and views of an image."""
SEEDS = 3
BATCH = 8
"""Images of a work item."""
JPEG = 110_000
"""Bytes of an image, about ImageNet's mean."""

STAGES: dict[str, Any] = {
    "views": 0.07,
    "views with AugMix": 0.21,
    "tower ViT-B-16": 28.3,
    "tower RN50": 12.2,
    "methods": {
        "clip": {"50": 0.00, "250": 0.00},
        "mta": {"50": 0.01, "250": 0.01},
        "zero": {"50": 0.00, "250": 0.00},
        "se": {"50": 0.00, "250": 0.00},
        "use:skip=false": {"50": 0.40, "250": 1.99},
        "tpt": {"50": 0.39, "250": 2.16},
        "c-tpt": {"50": 0.41, "250": 2.16},
        "r-tpt": {"50": 0.41, "250": 2.11},
        "rlcf": {"50": 1.76, "250": 10.39},
        "ttl": {"50": 11.11, "250": 12.78},
        "tps": {"50": 0.01, "250": 0.01},
        "sts": {"50": 0.01, "250": 0.03},
    },
    "store": 0.0032,
    "bytes": 14_455,
}
"""Measured on one core of an otherwise idle server."""


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor time of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure_stages(log: Callable[[str], object]) -> dict[str, Any]:
    """Seconds of one core for the stages of an image of 500 x 375 pixels and 64 views; bytes of a work item's rows."""
    torch.set_num_threads(1)
    file = generated_jpeg(0)
    costs: dict[str, Any] = {}
    for name, augmix in (("views", False), ("views with AugMix", True)):
        recipe = ViewRecipe(augmix=augmix)
        costs[name] = min(processor_seconds(lambda r=recipe: make_views(open_image(file), "0", r)) for _ in range(3))  # type: ignore[misc]
        log(f"{name}: {costs[name]:.2f} s")
    pixels = make_views(open_image(file), "0", ViewRecipe(views=_TIMED_VIEWS))
    for name in BACKBONES:
        model = load_quietly(name, weights="random")
        model.encode_images(pixels)
        encode = partial(model.encode_images, pixels)
        costs[f"tower {name}"] = _VIEWS / _TIMED_VIEWS * min(processor_seconds(encode) for _ in range(2))
        log(f"tower {name}: {costs[f'tower {name}']:.1f} s")
    costs["methods"] = _measure_methods(load_quietly("ViT-B-16", weights="random"), pixels, log)
    costs["store"], costs["bytes"] = _measure_store()
    return costs


def _measure_methods(model: Model, pixels: torch.Tensor, log: Callable[[str], object]) -> dict[str, dict[str, float]]:
    """Seconds of each method on the features of an image, by number of classes."""
    tower = require_last_blocks(model)
    hidden = tower.hidden_states(pixels)
    features = tower.last_blocks().encode(hidden)
    copies = _VIEWS // _TIMED_VIEWS
    noise = 0.1 * torch.randn(_VIEWS, features.shape[1], generator=torch.Generator().manual_seed(0))
    views = torch.nn.functional.normalize(features.repeat(copies, 1) + noise, dim=-1)
    episode = Episode(views, None, hidden.repeat(copies, 1, 1))
    costs: dict[str, dict[str, float]] = {}
    for classes in (FEW, MANY):
        prompts = ClassPrompts(model.text, class_names(classes))
        prompts.features()
        for method in METHODS:
            recipe = methods.get(method)
            if recipe.tune == "prompt":
                answer(recipe, [episode], model, prompts)  # the graph of the class list is made once
            cost = processor_seconds(lambda r=recipe, p=prompts: answer(r, [episode], model, p))  # type: ignore[misc]
            costs.setdefault(method, {})[str(classes)] = cost
            log(f"{method}, {classes} classes: {cost:.2f} s")
    return costs


def _measure_store(rounds: int = 200) -> tuple[float, int]:
    """Seconds of the driver to write the rows of a work item, and their bytes as they are sent."""

    def rows(item: int) -> list[ResultRow]:
        return [
            ResultRow(
                dataset="imagenet",
                image=f"n01440764/ILSVRC2012_val_{item:05}{i}.JPEG",
                seed=0,
                method=name,
                label=1,
                prediction=2,
                confidence=0.5,
                true_probability=0.25,
                rank=3,
                sum_of_squares=0.125,
                delta=0.5,
                beta=0.5,
                before=2,
                views=_VIEWS,
                skipped=False,
                seconds=1.5,
            )
            for i in range(BATCH)
            for name in METHODS
        ]

    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        begin = time.process_time()
        for item in range(rounds):
            store.add(rows(item))
        cost = (time.process_time() - begin) / rounds
    return cost, len(pickle.dumps(rows(0)))


def per_image(backbone: str, classes: int, augmix: bool) -> dict[str, float]:
    """Seconds of one core for an image under a seed, by stage; the cost of a method does not depend on the tower."""
    costs = {name: cost for name, cost in STAGES["methods"].items() if backbone.startswith("ViT") or name != "ttl"}

    def cost(method: str) -> float:
        (fewer, low), (more, high) = sorted((int(count), seconds) for count, seconds in costs[method].items())
        return max(0.0, low + (high - low) * (classes - fewer) / (more - fewer))

    return {
        "views": STAGES["views with AugMix" if augmix else "views"],
        "tower": STAGES[f"tower {backbone}"],
        "methods": sum(map(cost, costs)),
    }


def total() -> dict[str, dict[str, float]]:
    """Seconds of one core for the whole grid, by backbone and stage."""
    totals: dict[str, dict[str, float]] = {}
    for backbone in BACKBONES:
        stages = totals.setdefault(backbone, {"views": 0.0, "tower": 0.0, "methods": 0.0})
        for dataset in list_datasets():
            for stage, cost in per_image(backbone, dataset.classes, dataset.family == "fine-grained").items():
                stages[stage] += cost * dataset.images * SEEDS
    return totals


def grid(overhead: float = 0.0017, start: float = 30.0) -> str:
    """The grid on several numbers of workers of one core, as a Markdown table.

    overhead: seconds of the driver and Ray for a work item. start: seconds until a worker has loaded its model.
    """
    images = SEEDS * sum(dataset.images for dataset in list_datasets()) * len(BACKBONES)
    work = sum(sum(stages.values()) for stages in total().values())
    setup = start * len(BACKBONES)
    driver = images / BATCH * (overhead + STAGES["store"])
    lines = [
        "| workers | time | images/s | reading images | rows to the driver | driver busy | bottleneck |",
        "|---|---|---|---|---|---|---|",
    ]
    for workers in (1, 10, 100, 1000):
        wall = max(work / workers + setup, driver)
        rate = images / wall
        busy = driver / wall
        slowest = "the driver" if busy > 0.99 else "workers: " + _slowest()
        network = f"{rate * JPEG / 1e6:.2g} MB/s | {rate / BATCH * STAGES['bytes'] / 1e6:.2g} MB/s"
        lines.append(f"| {workers} | {_duration(wall)} | {rate:.2g} | {network} | {busy:.2g} | {slowest} |")
    shares = ", ".join(
        f"{backbone}: " + ", ".join(f"{stage} {cost / sum(stages.values()):.0%}" for stage, cost in stages.items())
        for backbone, stages in total().items()
    )
    return "\n".join(
        [*lines, "", f"{images:,} images under a seed, {work / 86400 / 365:.2g} years of one core. {shares}."]
    )


def _slowest() -> str:
    stages: dict[str, float] = {}
    for by_stage in total().values():
        for stage, cost in by_stage.items():
            stages[stage] = stages.get(stage, 0.0) + cost
    return max(stages, key=lambda stage: stages[stage])


def _duration(wall: float) -> str:
    return f"{wall / 86400:,.0f} days" if wall > 2 * 86400 else f"{wall / 3600:,.0f} h"
