"""What adaptive views do for SE with the embedded model, on real images; a part of `benchmarks.speed`.

Views of the fine-grained sets are encoded stage by stage to the last, with AugMix, and the clock is read where adaptive
views would have ended. ImageNet's features are given (500 images, crops only); the rule was chosen on them.
"""

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import log
from usetta import methods
from usetta.adaptive import is_settled, stages
from usetta.data import load_dataset
from usetta.images import open_image
from usetta.methods.recipe import run
from usetta.models import load_model
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

SETS = ("caltech101", "flowers102", "oxford_pets", "dtd10")
ROOT = Path(os.environ.get("USETTA_TEST_IMAGES", "../shared/data"))


@cache
def adaptive(images: int) -> dict[str, float]:
    """Figures of so many images of each fine-grained set and of ImageNet's features."""
    model = load_model("embedded", device="cpu", precision="auto")
    sets = {}
    for name in SETS:
        dataset = load_dataset(ROOT / name)
        text = ClassPrompts(model.text, dataset.classes).features()
        sums = np.zeros(6)
        for i in range(images):
            item = dataset[i * len(dataset) // images]
            assert item.label is not None
            started, settled = time.perf_counter(), 0.0
            image, views, seen = open_image(item.path, for_benchmark=True), 0, torch.empty(0, model.embed_dim)
            for part in stages():
                pixels = make_views(image, item.id, ViewRecipe(augmix=True), part=part)
                seen = torch.cat([seen, model.encode_images(pixels)])
                if not views and (is_settled(seen, text, model.logit_scale) or len(seen) == 64):
                    settled, views = time.perf_counter() - started, len(seen)
            whole = time.perf_counter() - started
            sums += [settled, whole, *answers_by(views, seen, text, model.logit_scale, item.label)]
        sets[name] = log_adaptive(name, sums, images)
    fine = sum(sets.values())
    features, labels, text = imagenet_views(model)
    sums = np.zeros(6)
    for seen, label in zip(features, labels, strict=True):
        views = next(n for n in ends() if n == 64 or is_settled(seen[:n], text, model.logit_scale))
        sums += [views, 64, *answers_by(views, seen, text, model.logit_scale, label)]
    both = fine + log_adaptive("imagenet1000", sums, len(labels))
    count = len(SETS) * images
    return {
        "speedup": fine[1] / fine[0],
        "views_mean": fine[2] / count,
        "views_imagenet": sums[2] / len(labels),
        "agreement": both[3] / (count + len(labels)),
        "accuracy_change": 100 * (both[4] - both[5]) / (count + len(labels)),
    }


def ends() -> list[int]:
    """The numbers of views after each stage."""
    return [part.stop for part in stages()]


def answers_by(views: int, features: Tensor, text: Tensor, logit_scale: float, label: int) -> list[float]:
    """The views, whether SE's answer by them is the one by all, and whether each of the two is right."""
    few, every = (
        # A settled weak view is an answer by itself.
        int(run(methods.get("se" if n > 1 else "clip"), features[None, :n], text, logit_scale).probs.argmax())
        for n in (views, 64)
    )
    return [views, few == every, few == label, every == label]


def log_adaptive(name: str, sums: Any, images: int) -> Any:
    """The same sums, logged: costs until settled and to the end, and what `answers_by` returns."""
    early, late, used, same, few, every = sums.tolist()
    log(
        f"{name}: {used / images:.1f} views instead of 64, {late / early:.2f} times as fast, "
        f"{same:.0f} of {images} answers as with 64, {few:.0f} right instead of {every:.0f}"
    )
    return sums


def imagenet_views(model: Any) -> tuple[Tensor, list[int], Tensor]:
    """Features (n, 64, D), labels, and the text features (1000, D)."""
    tensors = load_file(ROOT.parent / "views" / "imagenet_views.safetensors")
    text = ClassPrompts(model.text, load_dataset(ROOT / "imagenet1000").classes).features()
    return tensors["features"].float(), tensors["labels"].tolist(), text
