"""Accuracy of a model on folders of labelled images: `python tools/measure.py DIR [DIR ...]`.

Each folder holds images and a `manifest.json` whose `items` are `[file, label, class name, ...]`. Zero-shot accuracy
and calibration use every image (weak view only); with `--images N`, N images of each folder, evenly spaced, are
also classified by every method of `--methods`. Features are kept in `--cache`, so a run that was stopped goes on.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from usetta import methods
from usetta.images import image_id, open_image
from usetta.methods.recipe import run
from usetta.models import Model, load_model
from usetta.models.cached import CachedImages
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views


def read_manifest(folder: Path) -> tuple[list[Path], Tensor, list[str]]:
    """Images, labels (n,) and class names of a folder; a name that occurs twice counts under its first label."""
    items = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["items"]
    names = [name for _, name in sorted({(label, name) for _, label, name, *_ in items})]
    return [folder / item[0] for item in items], torch.tensor([names.index(item[2]) for item in items]), names


def features(model: Model, paths: list[Path], recipe: ViewRecipe) -> Tensor:
    """Features (n, N, D) of the views of the images."""
    rows = []
    for path in paths:
        image = open_image(path, for_benchmark=True)
        rows.append(model.encode_images(make_views(image, image_id(image), recipe)))
    return torch.stack(rows)


def calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error of (n, C) probabilities: the gap between confidence and accuracy, over equal bins."""
    confidence, answer = probs.max(1)
    place = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [
        ((answer == labels)[place == b].double().mean() - confidence[place == b].double().mean()).abs()
        * (place == b).double().mean()
        for b in range(bins)
        if (place == b).any()
    ]
    return float(sum(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--images", type=int, default=0, help="images of each folder for the methods with views")
    parser.add_argument("--methods", default="clip,strong,average,uniform,se")
    parser.add_argument("--views", type=int, default=64)
    parser.add_argument("--augmix", action="store_true", help="as the paper does on fine-grained sets")
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    model = CachedImages(load_model(options.model), options.cache)
    names = options.methods.split(",")
    print(f"{'set':<14}{'classes':>8}{'images':>9}{'zero-shot':>10}{'ECE':>7}", end="")
    print("   on n:" + "".join(f"{name:>9}" for name in names) if options.images else "")
    totals = []
    for folder in options.folders:
        paths, labels, classes = read_manifest(folder)
        prompts = ClassPrompts(model.text, classes)
        weak = run(methods.get("clip"), features(model, paths, ViewRecipe(views=1)), prompts, model.logit_scale).probs
        accuracy = 100 * (weak.argmax(1) == labels).double().mean().item()
        error = 100 * calibration_error(weak, labels)
        print(f"{folder.name:<14}{len(classes):>8}{len(paths):>9}{accuracy:>10.1f}{error:>7.1f}", end="", flush=True)
        if options.images:
            chosen = [int(i * len(paths) / options.images) for i in range(options.images)]
            views = features(model, [paths[i] for i in chosen], ViewRecipe(options.views, augmix=options.augmix))
            right = [
                run(methods.get(m), views, prompts, model.logit_scale).probs.argmax(1) == labels[chosen] for m in names
            ]
            totals.append([100 * r.double().mean().item() for r in right])
            print(f"{len(chosen):>8}" + "".join(f"{value:>9.1f}" for value in totals[-1]), end="")
        print(flush=True)
    if totals:
        means = torch.tensor(totals).mean(0).tolist()
        print(f"{'mean':<56}" + "".join(f"{value:>9.1f}" for value in means))


if __name__ == "__main__":
    main()
