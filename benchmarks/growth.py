"""How the cost of an image grows: `python -m benchmarks.growth [--json] [--plots FOLDER] [numbers]`.

Seconds of an image against the number of classes, of its views, of the images of a run, and of workers (there seconds
times workers), and peak memory against the number of images. Each is fitted by a power law n^e over the whole range: e
is the slope of a line through the logarithms, 0 where more costs nothing more, 1 where twice as much costs twice as
much. The slope of the last step alone is given too, because at the small end constant costs hide what comes.

Models are small, with random weights, so that nothing constant hides what grows: a text tower of two layers for methods
on given features of 64 views; an image tower of two layers for views; one layer and one view of small JPEGs for
images, whose peak memory is that of a process of its own. Workers are processes of Ray that run ViT-B/16 in one thread
each, and only images that are done while all of them run count. `--most 100000` measures a longer run; plots need
matplotlib.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from benchmarks.common import log
from usetta import methods
from usetta.data import Dataset
from usetta.evaluate.runner import evaluate
from usetta.methods.recipe import Recipe, run
from usetta.models.base import encode_views
from usetta.models.clip import CLIP, random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, generated_image, generated_jpeg, run_alone, shortest
from usetta.views import ViewRecipe, make_views

CLASSES = (10, 30, 100, 300, 1000, 3000, 10_000, 20_000)
VIEWS = (2, 4, 8, 16, 32, 64, 128, 256)
IMAGES = (100, 1000, 10_000, 30_000, 100_000)
WORKERS = (1, 2)
METHODS = ("se", "tpt", "o-tpt", "use:skip=false:active=64")
NUMBERS = ("images", "classes", "views", "workers")
FLAT = ("images", "workers")
"""What should not matter, so that it is drawn from zero."""
_FILES = 50
"""Different images; the others of a run are links to them."""

Points = dict[int, float]
"""Costs of an image by what they depend on."""


@dataclass(frozen=True)
class Series:
    """Something that is measured against a number."""

    x: str
    y: str
    limit: str
    """What decides the slope at the far end."""


SERIES = {
    **{
        f"classes_{name.partition(':')[0]}{'_active' if 'active' in name else ''}": Series("classes", "s/image", limit)
        for name, limit in zip(
            METHODS,
            (
                "logits of every view and class",
                "the text tower, forth and back",
                "the text tower, forth and back",
                "logits; the tower sees 64 classes",
            ),
            strict=True,
        )
    },
    "views": Series("views", "s/image", "making and encoding views"),
    "images": Series("images", "s/image", "opening, encoding and storing each"),
    "images_memory": Series("images", "bytes", "the list of the images"),
    "workers": Series("workers", "s/image × workers", "the number of cores"),
}


def small(embed: int, width: int, layers: int, size: int = 32) -> CLIP:
    """A CLIP with random weights."""
    vision = ViTConfig(image_size=size, patch_size=16, width=width, layers=layers, heads=1)
    return random_model(CLIPConfig(embed, vision, TextConfig(width=width, layers=layers, heads=1)), name="small-random")


def by_classes() -> dict[str, Points]:
    """Seconds of methods on features of 64 views."""
    model, generator = small(512, 64, 2), torch.Generator().manual_seed(0)
    noise = 0.02 * torch.randn(1, 64, 512, generator=generator)
    points: dict[str, Points] = {key: {} for key in SERIES if key.startswith("classes")}
    for count in CLASSES:
        prompts = ClassPrompts(model.text, class_names(count))
        features = normalize(prompts.features().mean(dim=0) + noise, dim=-1)
        for key, name in zip(points, METHODS, strict=True):
            recipe = methods.get(name)

            def work(recipe: Recipe = recipe, prompts: ClassPrompts = prompts) -> object:
                return run(recipe, features, prompts, model.logit_scale)  # noqa: B023 - called before the next

            points[key][count] = shortest(work, 5 if count <= 3000 else 2)
        log(f"{count} classes: " + ", ".join(f"{key} {1000 * of[count]:.1f} ms" for key, of in points.items()))
    return points


def by_views() -> dict[str, Points]:
    """Seconds from an opened image to SE's answer among 100 classes."""
    model = small(512, 192, 2, size=224)
    prompts, image, points = ClassPrompts(model.text, class_names(100)), generated_image(0), Points()
    prompts.features()
    for count in VIEWS:

        def work(count: int = count) -> object:
            features = encode_views(model, make_views(image, "image", ViewRecipe(views=count)))
            return run(methods.get("se"), features[None], prompts, model.logit_scale)

        points[count] = shortest(work, 3)
        log(f"{count} views: {1000 * points[count]:.1f} ms")
    return {"views": points}


def by_images(most: int) -> dict[str, Points]:
    """Seconds per image of `evaluate` by CLIP, and bytes of the process at its peak."""
    seconds, memory = Points(), Points()
    for count in (count for count in IMAGES if count <= most):
        peak, taken = run_alone("benchmarks.growth", "--crowd", str(count))
        seconds[count], memory[count] = float(taken), float(peak)
        log(f"{count} images: {1000 * seconds[count]:.2f} ms each, {memory[count] / 2**20:.0f} MB")
    return {"images": seconds, "images_memory": memory}


def crowd(count: int) -> tuple[int, float]:
    """Peak bytes of this process after a run over so many images, and the seconds that each took."""
    model = small(16, 32, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = [f"{i}.jpg" for i in range(count)]
        for i, own in enumerate(ids):
            if i < _FILES:
                (folder / own).write_bytes(generated_jpeg(i, (64, 48)))
            else:
                os.link(folder / ids[i % _FILES], folder / own)
        labels = tuple(i % 10 for i in range(count))
        dataset = Dataset("links", "Links", "other", tuple(class_names(10)), tuple(ids), labels, folder, "generated")
        done = evaluate(model, [dataset], ("clip",), folder / "run", progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, done.seconds / count


def by_workers() -> dict[str, Points]:
    """Seconds of an image times workers, while all of them are busy."""
    from benchmarks.scaling import throughput

    points = Points()
    for count in WORKERS:
        points[count] = count / throughput(count, 12 * count, 4)
        log(f"{count} workers: {1000 * points[count]:.0f} ms × workers")
    return {"workers": points}


def exponent(points: Mapping[int, float]) -> float:
    """The slope of a line through the logarithms."""
    return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])


def last_exponent(points: Mapping[int, float]) -> float:
    """The slope of the last step."""
    return exponent(dict(list(points.items())[-2:]))


def draw(points: Mapping[str, Points], folder: Path) -> None:
    """One small figure for each number that costs depend on."""
    from usetta.report.style import BLUE, GREEN, GREY, MEDIUM, ORANGE, SMALL, finish, new_figure, plain

    for x in dict.fromkeys(SERIES[key].x for key in points):
        own = {key: of for key, of in points.items() if SERIES[key].x == x and SERIES[key].y != "bytes"}
        first, values = next(iter(own.values())), [[1000 * value for value in of.values()] for of in own.values()]
        figure = new_figure(4.4, 3.0)
        axes = figure.subplots()
        for (key, of), colour, marker in zip(own.items(), (GREEN, BLUE, ORANGE, GREY), "Ds^o", strict=False):
            slope = f"$n^{{{exponent(of):.2f}}}$"
            name = key.removeprefix("classes_").replace("_active", ":active=64")
            line: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "label": f"{name}  {slope}"}
            axes.plot(list(of), [1000 * value for value in of.values()], **line)
        axes.set_xscale("log")
        if x in FLAT:
            axes.set_ylim(0, 1.6 * max(max(shown) for shown in values))
        else:
            ends, low = np.array([min(first), max(first)], dtype=float), min(shown[0] for shown in values)
            axes.plot(ends, low * ends / ends[0], color=GREY, linestyle=":", label="$n^{1}$")
            axes.set_yscale("log")
        axes.set_xlabel(x, fontsize=MEDIUM)
        axes.set_ylabel("ms an image" if x != "workers" else "ms an image × workers", fontsize=MEDIUM)
        if x == "workers":
            axes.set_xticks(list(WORKERS), [str(count) for count in WORKERS])
            axes.minorticks_off()
        plain(axes, "both")
        axes.legend(fontsize=SMALL, frameon=False, loc="upper left")
        folder.mkdir(parents=True, exist_ok=True)
        finish(figure).savefig(folder / f"growth-{x}.png", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "numbers", nargs="*", choices=["classes", "views", "images", "workers", []], help="default: all"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--most", type=int, default=10_000, help="images of the longest run")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write a plot of each")
    parser.add_argument("--crowd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.crowd:
        print(*crowd(options.crowd))
        return
    wanted = options.numbers or NUMBERS
    points: dict[str, Points] = {}
    if "images" in wanted:  # first: the peak of a process starts from its parent's
        points |= by_images(options.most)
    points |= by_classes() if "classes" in wanted else {}
    points |= by_views() if "views" in wanted else {}
    points |= by_workers() if "workers" in wanted else {}
    if options.plots:
        draw(points, options.plots)
    if options.json:
        slopes = {f"{key}_exponent": exponent(of) for key, of in points.items()}
        last = {f"{key}_last_exponent": last_exponent(of) for key, of in points.items()}
        json.dump({"threads": torch.get_num_threads(), **slopes, **last, "points": points}, sys.stdout)
        print()
        return
    for key, of in points.items():
        series = SERIES[key]
        print(
            f"{exponent(of):6.2f}  ≤ 1.0  {key}: {series.y} against {series.x}, {min(of)} to {max(of)}; "
            f"last step {last_exponent(of):.2f}; limit: {series.limit}"
        )


if __name__ == "__main__":
    main()
