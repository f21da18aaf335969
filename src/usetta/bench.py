"""What methods cost on this machine: time per image and memory, beside one look at an image and 64.

The time of a method is that of its parts: reading the image, making and encoding its views, and the method on their
features. Text features and the graph at the initial prompt belong to the class list, so they are made before. A method
that skips images is measured on one that it does not skip. Memory is the peak of a process of its own, which holds
the model as well.
"""

import io
import json
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
import torch
from PIL import Image

from usetta import methods as known
from usetta.episode import Episode, answer, check, encode, encode_with_hidden
from usetta.evaluate.provenance import peak_memory
from usetta.images import open_image
from usetta.methods.recipe import Recipe
from usetta.models import Model, load_model
from usetta.models.base import require_last_blocks
from usetta.prompts import ClassPrompts
from usetta.report import paper
from usetta.report.tables import Cell, Column, Table, TableRow
from usetta.views import ViewRecipe, make_views

CLIP_64 = "CLIP-64"
"""Encoding all views and looking at the weak one alone: what every method with views pays at least."""

METHODS = ("clip", CLIP_64, "zero", "mta", "sts", "se", "tpt", "r-tpt", "c-tpt", "rlcf", "ttl", "use")
"""The rows of the paper's efficiency table."""


@dataclass(frozen=True)
class BenchSettings:
    """What is measured: a model, how many classes it chooses from, and how many views of an image it sees."""

    model: str = "auto"
    weights: str | None = None
    """`random`, for the cost of an architecture whose weights are not at hand."""
    classes: int = 100
    views: int = 64
    augmix: bool = True
    precision: str = "fp32"
    device: str | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Costs:
    """What was measured, by method or by stage."""

    seconds: dict[str, float]
    """Of an image, by method."""
    memory: dict[str, int]
    """Peak of a process, in bytes, by method."""
    stages: dict[str, float]
    """Seconds of what all methods share."""


def measure(
    job: BenchSettings,
    methods: Sequence[str] = (),
    *,
    repeat: int = 3,
    memory: bool = True,
    say: Callable[[str], object] = lambda text: None,
) -> Costs:
    """Measure methods, by default all that the model can run; `say` hears of each as soon as it is done."""
    model = _load(job)
    chosen = methods or _possible(model, say)
    names = [name if name == CLIP_64 else known.get(name).name for name in chosen]
    prompts = ClassPrompts(model.text, class_names(job.classes))
    for name in names:
        check(_recipe(name), model, prompts, job.views)
    # A process's peak starts from its parent's, so these come first, while this one is small.
    peaks = {}
    for name in names if memory else ():
        peaks[name] = _alone(job, name)
        say(f"{name}: {peaks[name] / 2**30:.2f} GiB")
    stages, episode = _stages(job, model, prompts, repeat, hidden=any(_recipe(name).needs_hidden for name in names))
    taken = {}
    for name in names:
        recipe = _recipe(name)
        weak_only = recipe.weak_only and name != CLIP_64
        shared = ("read", "one view", "encode one view") if weak_only else ("read", "views", "encode views")
        seen = Episode(episode.features[:1]) if weak_only else episode
        own = _shortest(lambda r=recipe, e=seen: answer(r, [e], model, prompts), repeat)  # type: ignore[misc]
        taken[name] = sum(stages[stage] for stage in shared) + own
        say(f"{name}: {taken[name]:.3f} s, {own:.3f} s of them after the views are encoded")
    return Costs(taken, peaks, stages)


def efficiency_table(costs: Costs, job: BenchSettings, model_name: str) -> Table:
    """The paper's efficiency table for this machine, with its ratios beside ours."""
    published = {row.method or row.name: row.values for row in paper.table("table-10").rows}
    columns = [Column("seconds", "s/image", 3, "none")]
    ratios = [("seconds", base, f"time ÷ {base}") for base in ("clip", CLIP_64)]
    if costs.memory:
        columns.append(Column("memory", "memory, GiB", 2, "none"))
        ratios.append(("gigabytes", CLIP_64, f"memory ÷ {CLIP_64}"))
    columns += [Column(title, title, 2, "none") for _, _, title in ratios]
    rows = []
    for name in costs.seconds:
        cells = {"seconds": Cell(costs.seconds[name])}
        if name in costs.memory:
            cells["memory"] = Cell(costs.memory[name] / 2**30)
        for quantity, base, title in ratios:
            ours = costs.seconds if quantity == "seconds" else costs.memory
            theirs = published.get(name, {}).get(quantity), published.get(base, {}).get(quantity)
            cells[title] = Cell(
                ours[name] / ours[base] if base in ours else None,
                paper=theirs[0] / theirs[1] if theirs[0] and theirs[1] else None,
            )
        rows.append(TableRow(name, cells))
    notes = [
        f"{job.classes} classes, {job.views} views of a 500×375 JPEG, {'AugMix' if job.augmix else 'crops only'}, "
        f"{torch.get_num_threads()} threads; an image that is not skipped",
        "the paper's are ratios of its table 10, which was measured on a GPU",
    ]
    return Table(f"Cost of an image ({model_name})", tuple(columns), tuple(rows), notes=tuple(notes))


def stages_table(costs: Costs) -> Table:
    """Where the time goes before a method begins."""
    whole = sum(costs.stages[stage] for stage in ("read", "views", "encode views"))
    columns = (Column("ms", "ms", 1, "none"), Column("share", "% of read + views + encode views", 1, "none"))
    rows = [
        TableRow(stage, {"ms": Cell(1000 * taken), "share": Cell(100 * taken / whole)})
        for stage, taken in costs.stages.items()
    ]
    return Table("Stages of an image", columns, tuple(rows), corner="stage")


def class_names(count: int) -> list[str]:
    """Made-up names of one to three words."""
    words = "cat owl fox crane eagle shark moth lion bear deer barn boat tower bridge lamp piano bowl coat lemon lake"
    rng = random.Random(0)  # noqa: S311
    return [f"{' '.join(rng.choices(words.split(), k=rng.choice((1, 1, 2))))} {i}" for i in range(count)]


def _possible(model: Model, say: Callable[[str], object]) -> list[str]:
    try:
        require_last_blocks(model)
    except ValueError as error:
        say(f"without ttl: {error}")
        return [name for name in METHODS if name != "ttl"]
    return list(METHODS)


def _recipe(name: str) -> Recipe:
    recipe = known.get("clip" if name == CLIP_64 else name)
    return replace(recipe, skip=False)


def _load(job: BenchSettings) -> Model:
    with warnings.catch_warnings():  # that weights are random was asked for
        warnings.simplefilter("ignore")
        return load_model(
            job.model, weights=job.weights, precision=job.precision, device=job.device, compiled=job.compiled
        )


@cache
def _image() -> bytes:
    """A JPEG of 500 × 375 with structure at several scales."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8)).resize((500, 375))
    noise = rng.integers(-20, 20, (375, 500, 3))
    stream = io.BytesIO()
    Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def _stages(
    job: BenchSettings, model: Model, prompts: ClassPrompts, repeat: int, *, hidden: bool
) -> tuple[dict[str, float], Episode]:
    """Seconds of the stages that methods share, and the views of the image as methods get them."""
    image = open_image(_image())
    recipe = ViewRecipe(views=job.views, size=model.image_size, augmix=job.augmix)
    weak, pixels = make_views(image, "image", replace(recipe, views=1)), make_views(image, "image", recipe)
    stages = {
        "read": _shortest(lambda: open_image(_image()), repeat),
        "one view": _shortest(lambda: make_views(image, "image", replace(recipe, views=1)), repeat),
        "views": _shortest(lambda: make_views(image, "image", recipe), repeat),
        "encode one view": _shortest(lambda: encode(model, weak), repeat),
        "encode views": _shortest(lambda: encode(model, pixels), repeat, warm_up=False),
        "text, once for a class list": _shortest(
            lambda: ClassPrompts(model.text, class_names(job.classes)).features(), 1, warm_up=False
        ),
    }
    if not hidden:
        return stages, Episode(encode(model, pixels))
    features, states = encode_with_hidden(model, pixels)
    return stages, Episode(features, hidden=states)


def _shortest(work: Callable[[], object], repeat: int, *, warm_up: bool = True) -> float:
    def runs() -> Iterator[float]:
        for _ in range(repeat):
            start = time.perf_counter()
            work()
            yield time.perf_counter() - start

    if warm_up:
        work()
    return min(runs())


def _alone(job: BenchSettings, name: str) -> int:
    """Peak memory of a process that classifies one image by one method and does nothing else."""
    command = [sys.executable, "-m", "usetta.bench", json.dumps(asdict(job)), name]
    told = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if told.returncode:
        raise RuntimeError(f"measuring the memory of '{name}' failed: {told.stderr.strip().splitlines()[-1:]}")
    return int(told.stdout.split()[-1])


def _main(arguments: Sequence[str]) -> None:
    job, name = BenchSettings(**json.loads(arguments[0])), arguments[1]
    model, recipe = _load(job), _recipe(name)
    views = 1 if recipe.weak_only and name != CLIP_64 else job.views
    shown = ViewRecipe(views=views, size=model.image_size, augmix=job.augmix)
    pixels = make_views(open_image(_image()), "image", shown)
    prompts = ClassPrompts(model.text, class_names(job.classes))
    if recipe.needs_hidden:
        features, states = encode_with_hidden(model, pixels)
        episode = Episode(features, hidden=states)
    else:
        episode = Episode(encode(model, pixels))
    answer(recipe, [episode], model, prompts)
    sys.stdout.write(f"{peak_memory() or 0}\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
