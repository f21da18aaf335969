"""What methods cost on this machine: time per image and memory, compared with encoding one view and 64.

The time of a method is the sum of its parts: reading the image, making and encoding its views, and the method on their
features. Text features and the graph at the initial prompt depend on the class list alone, so they are made before. A
method that skips images is measured on one that it does not skip. Memory is the peak of a process of its own, which
includes the model; on CUDA that of the GPU. A clock is read when the device has done its work.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from usetta import methods as known
from usetta.episode import Episode, answer, check
from usetta.evaluate.provenance import peak_device_memory
from usetta.images import open_image
from usetta.methods.recipe import Recipe
from usetta.models import Model
from usetta.models.base import encode_views, require_last_blocks, view_recipe
from usetta.models.devices import device_of
from usetta.pipeline import ImageRequest, Pipeline
from usetta.prompts import ClassPrompts
from usetta.report import paper
from usetta.report.tables import Cell, Column, Table, TableRow
from usetta.timing import class_names, generated_jpeg, load_quietly, run_alone, shortest
from usetta.views import ViewRecipe, make_views
from usetta.views.device import ViewPlan

CLIP_64 = "CLIP-64"
"""Encoding all views but answering from the weak one: the least that any method with views costs."""

METHODS = ("clip", CLIP_64, "zero", "mta", "sts", "se", "tpt", "r-tpt", "c-tpt", "rlcf", "ttl", "use")
"""The rows of the paper's efficiency table."""


@dataclass(frozen=True)
class BenchSettings:
    """What is measured: a model, how many classes it chooses from, and how many views of an image it sees."""

    model: str = "auto"
    weights: str | None = None
    """`random`, for the cost of an architecture whose weights are not available."""
    classes: int = 100
    views: int = 64
    augmix: bool = True
    precision: str = "fp32"
    device: str | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Costs:
    """What was measured."""

    seconds: dict[str, float]
    """Per image, by method."""
    memory: dict[str, int]
    """Peak of a process in bytes, by method."""
    stages: dict[str, float]
    """Seconds of each stage that methods share."""
    device: str = "cpu"
    """Where the model computed."""


def measure(
    job: BenchSettings,
    methods: Sequence[str] = (),
    *,
    repeat: int = 3,
    memory: bool = True,
    log: Callable[[str], object] = lambda text: None,
) -> Costs:
    """Measure methods, by default all that the model can run; `log` receives each result as soon as it is known."""
    model = _load(job)
    chosen = methods or _possible(model, log)
    names = [name if name == CLIP_64 else known.get(name).name for name in chosen]
    prompts = ClassPrompts(model.text, class_names(job.classes))
    for name in names:
        check(_recipe(name), model, prompts, job.views)
    # The peak of a process starts from its parent's, so these come first, while this one is small.
    peaks = {}
    for name in names if memory else ():
        peaks[name] = int(run_alone("usetta.bench", json.dumps(asdict(job)), name)[0])
        log(f"{name}: {peaks[name] / 2**30:.2f} GiB")
    stages, episode = _stages(job, model, prompts, repeat, hidden=any(_recipe(name).needs_hidden for name in names))
    seconds = {}
    for name in names:
        recipe = _recipe(name)
        weak_only = recipe.weak_only and name != CLIP_64
        shared = ("read", "one view", "encode one view") if weak_only else ("read", "views", "encode views")
        views = Episode(episode.features[:1]) if weak_only else episode
        work = partial(answer, recipe, [views], model, prompts)
        own = shortest(work, repeat, device=device_of(model))
        seconds[name] = sum(stages[stage] for stage in shared) + own
        log(f"{name}: {seconds[name]:.3f} s, {own:.3f} s of it after encoding the views")
    return Costs(seconds, peaks, stages, str(device_of(model)))


def seconds_of_methods(job: BenchSettings, methods: Sequence[str]) -> dict[str, float]:
    """Seconds of an image that methods add to encoding its views, which is `CLIP_64`; roughly, from one repetition.

    Variants of a method with other settings are not measured by themselves: of these only the number of tuning steps
    changes the cost.
    """
    bases = dict.fromkeys(known.get(method.partition(":")[0]).name for method in methods)
    model = _load(job)
    possible = [name for name in (*bases, CLIP_64) if not _recipe(name).needs_hidden or _has_last_blocks(model)]
    costs = measure(job, possible, repeat=1, memory=False)
    shared = costs.seconds[CLIP_64]
    seconds = {CLIP_64: shared}
    for method in methods:
        base = known.get(method.partition(":")[0]).name
        own = max(costs.seconds.get(base, shared) - shared, 0.0)
        seconds[method] = own * known.get(method).steps
    return seconds


def seconds_per_image(seconds: Mapping[str, float], methods: Sequence[str]) -> float:
    """Of an image whose views are encoded once for all methods, by what `seconds_of_methods` measured."""
    return seconds[CLIP_64] + sum(seconds[method] for method in methods)


def efficiency_table(costs: Costs, job: BenchSettings, model_name: str) -> Table:
    """The paper's efficiency table for this machine, with the paper's ratios below ours."""
    published = {row.method or row.name: row.values for row in paper.table("table-10").rows}
    columns = [Column("seconds", "s/image", 3, "none")]
    ratios = [("seconds", base, f"time ÷ {base}") for base in ("clip", CLIP_64)]
    if costs.memory:
        title = "GPU memory, GiB" if costs.device.startswith("cuda") else "memory, GiB"
        columns.append(Column("memory", title, 2, "none"))
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
        f"{costs.device}, {torch.get_num_threads()} threads; an image that is not skipped",
        "paper: ratios from its table 10, which was measured on a GPU",
    ]
    return Table(f"Cost of an image ({model_name})", tuple(columns), tuple(rows), notes=tuple(notes))


def stages_table(costs: Costs) -> Table:
    """Where the time goes before a method begins."""
    whole = sum(costs.stages[stage] for stage in ("read", "views", "encode views"))
    columns = (Column("ms", "ms", 1, "none"), Column("share", "% of read + views + encode views", 1, "none"))
    rows = [
        TableRow(stage, {"ms": Cell(1000 * seconds), "share": Cell(100 * seconds / whole)})
        for stage, seconds in costs.stages.items()
    ]
    return Table("Stages of an image", columns, tuple(rows), corner="stage")


def _load(job: BenchSettings) -> Model:
    return load_quietly(
        job.model, weights=job.weights, precision=job.precision, device=job.device, compiled=job.compiled
    )


def _possible(model: Model, log: Callable[[str], object]) -> list[str]:
    try:
        require_last_blocks(model)
    except ValueError as error:
        log(f"left out: ttl; {error}")
        return [name for name in METHODS if name != "ttl"]
    return list(METHODS)


def _has_last_blocks(model: Model) -> bool:
    try:
        require_last_blocks(model)
    except ValueError:
        return False
    return True


def _recipe(name: str) -> Recipe:
    """A method as it is measured: on an image that it does not skip."""
    recipe = known.get("clip" if name == CLIP_64 else name)
    return replace(recipe, skip=False)


def _stages(
    job: BenchSettings, model: Model, prompts: ClassPrompts, repeat: int, *, hidden: bool
) -> tuple[dict[str, float], Episode]:
    """Seconds of the stages that methods share, and the views of the image as methods get them."""
    file = generated_jpeg(0)
    image = open_image(file)
    recipe = view_recipe(model, job.views, augmix=job.augmix)
    one_view = replace(recipe, views=1)
    device = device_of(model)

    def views(recipe: ViewRecipe) -> torch.Tensor:
        """As the pipeline makes them."""
        if device.type == "cpu":
            return make_views(image, "image", recipe)
        return ViewPlan(image, "image", recipe, pin=device.type == "cuda").make(device)

    def seconds(work: Callable[[], object], repeat: int = repeat, *, warm_up: bool = True) -> float:
        return shortest(work, repeat, warm_up=warm_up, device=device)

    weak, pixels = views(one_view), views(recipe)
    stages = {
        "read": seconds(lambda: open_image(file)),
        "one view": seconds(lambda: views(one_view)),
        "views": seconds(lambda: views(recipe)),
        "encode one view": seconds(lambda: encode_views(model, weak)),
        "encode views": seconds(lambda: encode_views(model, pixels), warm_up=False),  # one view has warmed up
        "text, once for a class list": seconds(
            lambda: ClassPrompts(model.text, class_names(job.classes)).features(), 1, warm_up=False
        ),
    }
    return stages, _episode(model, file, recipe, hidden=hidden)


def _episode(model: Model, file: bytes, views: ViewRecipe, *, hidden: bool) -> Episode:
    (episode,) = Pipeline(model).stream([ImageRequest(file, views, id="image", hidden=hidden)])
    assert isinstance(episode, Episode)
    return episode


def _main(arguments: Sequence[str]) -> None:
    """Classify one image by one method, and print the peak memory of this process."""
    job, name = BenchSettings(**json.loads(arguments[0])), arguments[1]
    model, recipe = _load(job), _recipe(name)
    views = 1 if recipe.weak_only and name != CLIP_64 else job.views
    recipe_for_views = view_recipe(model, views, augmix=job.augmix)
    prompts = ClassPrompts(model.text, class_names(job.classes))
    answer(recipe, [_episode(model, generated_jpeg(0), recipe_for_views, hidden=recipe.needs_hidden)], model, prompts)
    sys.stdout.write(f"{peak_device_memory(device_of(model)) or 0}\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
