"""What the methods cost together on one encoding of the views: `python -m benchmarks.methods [--json]`.

ViT-B/16 with random weights in float32, 100 classes, one image on 64 views, none skipped. Every figure is relative to
SE alone, which is encoding the views and next to nothing else.
"""

import argparse
import json

import torch

from benchmarks.names import class_names
from benchmarks.se import seconds
from benchmarks.use import load, views
from usetta import methods
from usetta.methods.recipe import run
from usetta.prompts import ClassPrompts

SIX = ("clip", "mta", "zero", "se", "tps", "sts")
"""The methods that tune no prompt, and nothing in the image tower."""
TEN = (*SIX, "tpt", "c-tpt", "r-tpt", "use:skip=false")


def measure(repeat: int) -> dict[str, float]:
    """Ratios to SE alone, by method and for the groups."""
    model = load()
    pixels = views(model)
    prompts = ClassPrompts(model.text, class_names(100))
    features = model.encode_images(pixels)[None]
    encode = seconds(lambda: model.encode_images(pixels), repeat, warm_up=False)
    own = {}
    for name in TEN:
        recipe = methods.get(name)
        own[name] = seconds(lambda r=recipe: run(r, features, prompts, model.logit_scale), 3)  # type: ignore[misc]
    alone = encode + own["se"]
    return {
        "six_methods_over_se": (encode + sum(own[name] for name in SIX)) / alone,
        "ten_methods_over_se": (encode + sum(own.values())) / alone,
        **{f"{name.partition(':')[0]}_alone_over_se": (encode + own[name]) / alone for name in TEN if name != "clip"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    figures = measure(options.repeat)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads()} | figures))
        return
    for name, figure in figures.items():
        print(f"{figure:8.4f}  {name}")


if __name__ == "__main__":
    main()
