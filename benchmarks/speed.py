"""How many times faster than plain code: `python -m benchmarks.speed [--json]`.

Each figure is a function of its own. It lets both sides take turns in one run and compares the best of each: absolute
times of one machine say little about another, and means depend on whatever else ran on it.

The plain side of the views is the published pipeline: one view after the other on Pillow images, with a normalised
tensor made of each crop and of the end of each AugMix chain, four per view, mixed and stacked. Both sides start at JPEG
files of 500 x 375 pixels and end with 64 normalised views of each, the plain side's in one tensor, ours four at a time,
as the tower takes them. Both make the same draws by the same code, which is faster than the published one. Ours has as
many images in flight as there are cores.
"""

import argparse
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from benchmarks.adaptive import ROOT, SETS, adaptive
from benchmarks.common import load, log, show
from benchmarks.start import start
from benchmarks.tuners import tuners
from usetta import Classifier, methods
from usetta.data import load_dataset
from usetta.images import open_image
from usetta.methods.recipe import run
from usetta.models import load_model, parallel
from usetta.models.base import encode_views
from usetta.models.config import OPENAI_MEAN, OPENAI_STD
from usetta.models.int8 import Int8Linear
from usetta.models.precision import computes_in_bf16
from usetta.models.towers import normalised
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, generated_jpeg, shortest_in_turns, speedup
from usetta.views import Operation, ViewDraw, ViewRecipe, draw_views, make_views, weak_view

MEAN, STD = (torch.tensor(values).view(3, 1, 1) for values in (OPENAI_MEAN, OPENAI_STD))
PRECISIONS = ("fp32", "bf16", "int8") if computes_in_bf16() else ("fp32", "int8")
"""Those that this processor has instructions for."""
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- views -----------------------------------------------------------------------------------------------------------


def augmix_speedup(rounds: int) -> float:
    return views_speedup(ViewRecipe(augmix=True), rounds)


def crop_speedup(rounds: int) -> float:
    return views_speedup(ViewRecipe(), rounds)


def views_speedup(recipe: ViewRecipe, rounds: int) -> float:
    """64 views of an image, from its file to what the model computes with."""
    # One pool for all rounds, as a run over a dataset has one for all images.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(CORES, "", torch.set_num_threads, (1,)) as pool:
        paths = [Path(folder, f"{number}.jpg") for number in range(2 * CORES)]
        for seed, path in enumerate(paths):
            path.write_bytes(generated_jpeg(seed))
        ours = torch.cat(list(fast_views(paths[0], recipe)))
        # Pillow 13 resizes some shapes in another order than ours, which moves some values by a level.
        assert (ours - plain_views(paths[0], recipe)).abs().mean() < 0.01

        def plain() -> None:
            for path in paths:
                plain_views(path, recipe)

        def fast() -> None:
            for _ in pool.map(lambda path: deque(fast_views(path, recipe), maxlen=0), paths):
                pass

        def plain_on_one() -> None:
            with torch_threads(1):
                plain()

        # The better of two plain sides: torch's threads may slow each other down, on a busy machine by a lot.
        *slow, quick = shortest_in_turns([plain, plain_on_one, fast], rounds)
        return min(slow) / quick


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def fast_views(path: Path, recipe: ViewRecipe) -> Iterator[Tensor]:
    """Ours."""
    pixels = make_views(open_image(path, for_benchmark=True), path.name, recipe)
    for few in torch.split(pixels, parallel.ON_CPU):
        yield normalised(few, OPENAI_MEAN, OPENAI_STD)


def plain_views(path: Path, recipe: ViewRecipe) -> Tensor:
    """The published pipeline."""
    image = Image.open(path).convert("RGB")
    views = [plain_tensor(weak_view(image, recipe.size))]
    for draw in draw_views(image.width, image.height, path.name, recipe):
        crop = image.crop(draw.box).resize((recipe.size, recipe.size), Image.Resampling.BILINEAR)
        if draw.flip:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        views.append(plain_mix(crop, draw) if draw.chains else plain_tensor(crop))
    return torch.stack(views)


def plain_mix(crop: Image.Image, draw: ViewDraw) -> Tensor:
    original = plain_tensor(crop)
    mixed = torch.zeros_like(original)
    for weight, chain in zip(draw.weights, draw.chains, strict=True):
        end = crop.copy()
        for operation in chain:
            end = plain_operation(end, operation)
        mixed += weight * plain_tensor(end)
    return draw.m * original + (1 - draw.m) * mixed


def plain_tensor(image: Image.Image) -> Tensor:
    """ToTensor and Normalize of torchvision."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.float().div(255).clone().sub_(MEAN).div_(STD)


def plain_operation(image: Image.Image, operation: Operation) -> Image.Image:
    u, sign, size = operation.level, operation.sign, image.width
    slope, shift = sign * u * 0.3 / 10, sign * int(u * (size / 3) / 10)
    match operation.name:
        case "autocontrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "posterize":
            return ImageOps.posterize(image, 4 - int(u * 4 / 10))
        case "solarize":
            return ImageOps.solarize(image, 256 - int(u * 256 / 10))
        case "rotate":
            return image.rotate(sign * int(u * 30 / 10), resample=Image.Resampling.BILINEAR)
        case "shear_x":
            matrix: tuple[float, ...] = (1, slope, 0, 0, 1, 0)
        case "shear_y":
            matrix = (1, 0, 0, slope, 1, 0)
        case "translate_x":
            matrix = (1, 0, shift, 0, 1, 0)
        case _:  # translate_y
            matrix = (1, 0, 0, 0, 1, shift)
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


# --- from the file to the answer --------------------------------------------------------------------------------------


def se_over_tower(rounds: int) -> float:
    """SE from a JPEG file to its answer ÷ the bare tower on 64 views, ViT-B/16 with random weights in float32."""
    model = load()
    classifier = Classifier(class_names(100), model, "se", views=64, augmix=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "image.jpg")
        path.write_bytes(generated_jpeg(0))
        pixels = make_views(open_image(path), path.name, ViewRecipe(augmix=True))
        return 1 / speedup(lambda: model.encode_images(pixels), lambda: classifier(path), min(rounds, 3))


def classes_over_few(rounds: int) -> float:
    """SE on 64 views with 1000 classes ÷ with 10; text features of a class list are made before."""
    model = load()
    pixels = torch.randint(0, 256, (64, 3, model.image_size, model.image_size), dtype=torch.uint8)
    many, few = (ClassPrompts(model.text, class_names(count)).features() for count in (1000, 10))

    def answer(text: Tensor) -> object:
        return run(methods.get("se"), model.encode_images(pixels)[None], text, model.logit_scale)

    return speedup(lambda: answer(many), lambda: answer(few), min(rounds, 3))


# --- precision of the image tower ------------------------------------------------------------------------------------


@cache
def tower(rounds: int) -> dict[str, float]:
    """Seconds that 64 views take in each precision, and by the tower as it is usually run.

    That is all views at once, all tokens in all blocks, in fp32.
    """
    pixels, exact = random_views(), embedded("fp32")

    @torch.no_grad()
    def plain() -> None:
        hidden = exact.image_tower.embed_patches(exact.normalize(pixels))
        for block in exact.image_tower.blocks:
            hidden = block(hidden)
        exact.image_tower.pool(hidden)

    ways = [partial(encode_views, embedded(precision), pixels) for precision in PRECISIONS]
    seconds = shortest_in_turns([plain, *ways], min(rounds, 3))
    return dict(zip(("plain", *PRECISIONS), seconds, strict=True))


def tower_speedup(precision: str, rounds: int) -> float:
    """How many times faster than the plain tower."""
    return tower(rounds)["plain"] / tower(rounds)[precision]


def share_of_limit(precision: str, rounds: int) -> float:
    """Operations per second of the tower ÷ of nothing but one large matrix product in its precision."""
    size, generator = 4096, torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, size, generator=generator) for _ in range(2))
    if precision == "int8":
        layer, levels = Int8Linear(weight.double(), torch.zeros(size)), torch.full((size, size), 77, dtype=torch.uint8)
        product: Callable[[], object] = partial(layer, levels)
    else:
        product = partial(torch.matmul, x.to(_TYPES[precision]), weight.to(_TYPES[precision]))
    product()
    (taken,) = shortest_in_turns([product], 3 * rounds)
    return operations(embedded("fp32")) / tower(rounds)[precision] * taken / (2 * size**3)


_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def operations(model: Any) -> float:
    """Additions and multiplications of 64 views, without those that the last block leaves out."""
    vision = model.config.vision
    tokens, width = vision.tokens, vision.width
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    last = 2 * tokens * width**2 + 10 * width**2 + 2 * tokens * width
    patches = (tokens - 1) * 3 * vision.patch_size**2 * width
    return float(2 * 64 * ((vision.layers - 1) * block + last + patches))


@cache
def embedded(precision: str) -> Any:
    return load_model("embedded", device="cpu", precision=precision)


def random_views() -> Tensor:
    return torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8)


def weak_agreement(precision: str, images: int) -> float:
    """Share of equal answers in a precision and in fp32 by the weak view of real images, encoded as crops are."""
    exact, other, same, cosines = embedded("fp32"), embedded(precision), 0, []
    for name in (*SETS, "imagenet1000"):
        dataset = load_dataset(ROOT / name)
        text = ClassPrompts(exact.text, dataset.classes).features()
        for i in range(images):
            item = dataset[i * len(dataset) // images]
            pixels = make_views(open_image(item.path, for_benchmark=True), item.id, ViewRecipe(views=1))
            ours, theirs = exact.encode_images(pixels), (other.encode_crops or other.encode_images)(pixels)
            same += int((ours @ text.T).argmax() == (theirs @ text.T).argmax())
            cosines.append(float((ours * theirs).sum()))
    log(f"{precision}: cosine {np.mean(cosines):.5f}, at least {min(cosines):.5f}")
    return same / len(cosines)


def tower_agreement(images: int) -> float:
    """Share of real images for which CLIP and SE, on 64 views, both answer in int8 as they do in fp32."""
    exact, other, same = embedded("fp32"), embedded("int8"), 0
    for name in SETS:
        dataset = load_dataset(ROOT / name)
        text = ClassPrompts(exact.text, dataset.classes).features()
        for i in range(images):
            item = dataset[i * len(dataset) // images]
            pixels = make_views(open_image(item.path, for_benchmark=True), item.id, ViewRecipe(augmix=True))
            ours, theirs = (
                [
                    int(run(methods.get(method), features[None], text, exact.logit_scale).probs.argmax())
                    for method in ("clip", "se")
                ]
                for features in (encode_views(exact, pixels), encode_views(other, pixels))
            )
            same += ours == theirs
    return same / (len(SETS) * images)


# --- all of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    measure: Callable[[int], float]
    """Takes the number of rounds, or for real images their number per dataset."""
    target: str
    meaning: str


FIGURES = {
    "augmix_speedup": Figure(augmix_speedup, "≥ 3", "64 AugMix views, against the published pipeline"),
    "crop_speedup": Figure(crop_speedup, "≥ 2", "64 views by crops and flips, likewise"),
    "se_over_tower": Figure(se_over_tower, "≤ 1.1", "SE from file to answer, ÷ the bare tower on 64 views"),
    "classes_over_few": Figure(classes_over_few, "≤ 1.25", "SE with 1000 classes ÷ with 10"),
    "first_answer_seconds": Figure(
        lambda n: start(n)["first_answer"], "≤ 4", "`usetta classify` of one image, 10 views, from the shell, seconds"
    ),
    "first_answer_over_least": Figure(
        lambda n: start(n)["first_answer"] / start(n)["least"], "≤ 3", "the same ÷ loading weights plus ten views"
    ),
    "plain_torch_seconds": Figure(
        lambda n: start(n)["plain"], "", "one view by plain PyTorch in a process of its own, seconds"
    ),
    "help_seconds": Figure(lambda n: start(n)["help"], "≤ 0.3", "`usetta --help`, seconds"),
    "five_tuners_over_one": Figure(
        lambda n: tuners(n)["five_tuners"], "≤ 2.2", "five methods that tune the prompt ÷ one, 1000 classes"
    ),
    "five_tuners_active_over_one": Figure(
        lambda n: tuners(n)["five_tuners_active"], "", "the same five with 64 active classes ÷ one with all"
    ),
    "ablation_over_one": Figure(lambda n: tuners(n)["ablation"], "", "the ablation's six that tune ÷ one"),
    "tower_speedup": Figure(partial(tower_speedup, "int8"), "≥ 4", "image tower in int8, against PyTorch in fp32"),
    "tower_agreement": Figure(tower_agreement, "≥ 0.99", "equal answers of CLIP and SE in int8 and fp32 (real images)"),
    "int8_agreement": Figure(
        partial(weak_agreement, "int8"), "", "equal answers if the weak view were in int8 too (real images)"
    ),
    "fp32_speedup": Figure(partial(tower_speedup, "fp32"), "", "our own image tower in fp32, against plain PyTorch"),
    "int8_share_of_limit": Figure(
        partial(share_of_limit, "int8"), "", "operations per second of the tower in int8 ÷ of a large matrix product"
    ),
    "fp32_share_of_limit": Figure(partial(share_of_limit, "fp32"), "", "the same in fp32"),
    **{
        f"adaptive_{name}": Figure(partial(lambda name, n: adaptive(n)[name], name), target, meaning)
        for name, target, meaning in (
            ("speedup", "≥ 6", "SE with adaptive views, against 64, by the clock (real images)"),
            ("views_mean", "≤ 8", "views that it takes on the fine-grained sets"),
            ("views_imagenet", "≤ 16", "views that it takes on ImageNet's 1000 classes"),
            ("agreement", "≥ 0.995", "answers as with 64 views, on all of these"),
            ("accuracy_change", "≥ −0.3", "points of accuracy, likewise"),
        )
    },
}
if "bf16" in PRECISIONS:
    FIGURES |= {
        "bf16_speedup": Figure(partial(tower_speedup, "bf16"), "≥ 2.9", "image tower in bf16, likewise"),
        "bf16_share_of_limit": Figure(partial(share_of_limit, "bf16"), "", "the same as for int8, in bf16"),
        "bf16_agreement": Figure(
            partial(weak_agreement, "bf16"), "", "equal answers by the weak view in bf16 and fp32 (real images)"
        ),
    }


def takes_images(name: str) -> bool:
    """Whether a figure is about real images, and is given their number."""
    return name.startswith("adaptive_") or name.endswith("_agreement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", metavar="figure", help="some of them; all if none is named")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--images", type=int, default=6, help="per dataset of real images, for figures that need them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.figures or list(FIGURES)
    if unknown := set(names) - set(FIGURES):
        parser.error(f"unknown figures: {', '.join(sorted(unknown))}; known: {', '.join(FIGURES)}")
    measured = {}
    for name in names:
        measured[name] = FIGURES[name].measure(options.images if takes_images(name) else options.rounds)
        log(f"{name}: {measured[name]:.3f}")
    meanings = {name: (figure.meaning, figure.target) for name, figure in FIGURES.items()}
    show(measured, meanings, as_json=options.json, cores=CORES)


if __name__ == "__main__":
    main()
