"""What SE costs on top of encoding the views: `python -m benchmarks.se [--json]`.

Everything is measured in one run, with random weights, and reported as a ratio to encoding 64 views of one image:
absolute times of one machine say little about another.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from usetta import methods
from usetta.methods.recipe import run
from usetta.models import load_model
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views


def seconds(work: Callable[[], object], repeat: int, *, warm_up: bool = True) -> float:
    """The shortest of `repeat` runs, after one to warm up."""
    if warm_up:
        work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(model_name: str, classes: int, repeat: int) -> dict[str, float]:
    """The ratios, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(model_name, weights="random", precision="fp32")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (375, 500, 3), dtype=np.uint8))
    crops, mixed = (ViewRecipe(size=model.image_size, augmix=augmix) for augmix in (False, True))
    views = make_views(image, "image", crops)
    features = model.encode_images(views)[None]
    text = ClassPrompts(model.text, [f"thing {i}" for i in range(classes)]).features()
    encode = seconds(lambda: model.encode_images(views), repeat)
    return {
        "se_over_views": seconds(lambda: run(methods.get("se"), features, text, 100.0), 10) / encode,
        "crops_over_views": seconds(lambda: make_views(image, "image", crops), 3) / encode,
        "augmix_over_views": seconds(lambda: make_views(image, "image", mixed), 3) / encode,
        "one_view_over_views": seconds(lambda: model.encode_images(views[:1]), 3) / encode,
    }


MEANING = {
    "se_over_views": "SE itself, from features to answer",
    "crops_over_views": "making 64 views: crops and flips",
    "augmix_over_views": "making 64 views: with AugMix",
    "one_view_over_views": "encoding one view (zero-shot CLIP)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.model, options.classes, options.repeat)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "model": options.model} | figures))
        return
    print(f"{options.model}, {options.classes} classes, relative to encoding 64 views:")
    for name, figure in figures.items():
        print(f"  {figure:8.4f}  {MEANING[name]}")


if __name__ == "__main__":
    main()
