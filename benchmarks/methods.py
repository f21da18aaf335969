"""What the methods cost together on one encoding of the views: `python -m benchmarks.methods [--json]`.

ViT-B/16 with random weights in float32, 100 classes, one image on 64 views, none skipped. Every figure is relative to
SE alone, whose cost is that of encoding the views and next to nothing else. What each method costs alone on your
machine, in seconds and gigabytes, is measured by `usetta bench`.
"""

import argparse

from benchmarks.common import load, show
from benchmarks.use import views
from usetta import methods
from usetta.methods.recipe import run
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, shortest

SIX = ("clip", "mta", "zero", "se", "tps", "sts")
"""The methods that tune neither the prompt nor the image tower."""
TEN = (*SIX, "tpt", "c-tpt", "r-tpt", "use:skip=false")


def measure(repeat: int) -> dict[str, float]:
    """Ratios to SE alone, by method and for the groups."""
    model = load()
    pixels = views(model)
    prompts = ClassPrompts(model.text, class_names(100))
    features = model.encode_images(pixels)[None]
    encode = shortest(lambda: model.encode_images(pixels), repeat, warm_up=False)
    own = {}
    for name in TEN:
        recipe = methods.get(name)
        own[name] = shortest(lambda r=recipe: run(r, features, prompts, model.logit_scale), 3)  # type: ignore[misc]
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
    show(measure(options.repeat), {}, as_json=options.json)


if __name__ == "__main__":
    main()
