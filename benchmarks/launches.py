"""What a GPU would be asked to do for an image: `python -m benchmarks.launches [--json]`.

There is no GPU here. A pretended one (`tests/pretend_device`) counts operations, which a GPU would launch, and moments
at which the host waits for it. The text tower is that of ViT-B/16 with random weights; the image tower is small where
only waiting is counted. Batches of 16 images, everything that is done once for a class list before the count. None of
the images is skipped where launches are counted. Takes some minutes, most of them for 1000 classes.
"""

# ruff: noqa: I001
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pretend_device.devices import pretended  # before torch

import argparse
from dataclasses import replace

import torch
from torch.nn.functional import normalize

from benchmarks.common import log, show
from usetta import methods
from usetta.classifier import Classifier
from usetta.methods.recipe import run
from usetta.models.clip import CLIP, random_model
from usetta.models.config import ARCHITECTURES, ViTConfig
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, generated_image

BATCH = 16
VIEWS = 64
TARGETS = {
    "use_launches_100": ("launches of USE per image, 100 classes, from features", "≤ 600"),
    "use_launches_1000": ("the same, 1000 classes", "≤ 1100"),
    "se_syncs": ("waits of the host per image for SE, from file to answer", "≤ 1"),
    "use_syncs": ("the same for USE", "≤ 2"),
    "se_launches": ("launches per image for SE, from file to answer, without the image tower's blocks", ""),
    "uploaded_bytes": ("bytes per image that are uploaded for 64 views", ""),
}


def load() -> CLIP:
    """ViT-B/16 with random weights, but for an image tower of one small block."""
    config = ARCHITECTURES["ViT-B-16"]
    vision = ViTConfig(config.vision.image_size, 32, width=64, layers=1, heads=1)
    return random_model(replace(config, vision=vision), name="text-of-ViT-B-16")


def use_launches(model: CLIP, classes: int) -> float:
    """Launches per image of USE on the features of a batch."""
    generator = torch.Generator().manual_seed(0)
    features = normalize(torch.randn(BATCH, VIEWS, model.embed_dim, generator=generator), dim=-1)
    with pretended() as counts:
        tower, recipe = model.to("cuda"), methods.get("use:skip=false")
        prompts, on_device = ClassPrompts(tower.text, class_names(classes)), features.to("cuda")
        run(recipe, on_device[:1], prompts, tower.logit_scale)  # keeps the graph of the initial prompt
        counts.clear()
        run(recipe, on_device, prompts, tower.logit_scale)
        return sum(counts.launches.values()) / BATCH


def end_to_end(model: CLIP, method: str) -> tuple[float, float, float]:
    """Waits, launches and uploaded bytes per image of two batches, from image to answer."""
    images = [generated_image(seed) for seed in range(2 * BATCH)]
    with pretended() as counts:
        names = class_names(100)
        classifier = Classifier(names, model.to("cuda"), method, views=VIEWS, batch_size=BATCH)
        classifier.predict_proba(images[:2], progress=False)
        counts.clear()
        classifier.predict_proba(images, progress=False)
        log(f"{method}: {dict(counts.syncs)}")
        totals = sum(counts.syncs.values()), sum(counts.launches.values()), counts.uploaded
        waits, launches, uploaded = (total / len(images) for total in totals)
    return waits, launches, uploaded


def measure() -> dict[str, float]:
    """All figures, per image."""
    model = load()
    figures: dict[str, float] = {}
    for classes in (100, 1000):
        figures[f"use_launches_{classes}"] = use_launches(model, classes)
        log(f"USE, {classes} classes: {figures[f'use_launches_{classes}']:.0f} launches")
    figures["use_syncs"] = end_to_end(model, "use")[0]
    figures["se_syncs"], figures["se_launches"], figures["uploaded_bytes"] = end_to_end(model, "se")
    return {name: figures[name] for name in TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    show(measure(), TARGETS, as_json=options.json, batch=BATCH, views=VIEWS)


if __name__ == "__main__":
    main()
