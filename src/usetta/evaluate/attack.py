"""Adversarial images, as robustness is measured: the weak view, moved against its label by projected gradients (PGD).

The attack goes through the image tower of zero-shot CLIP, and its images are written once, so every method answers the
same ones. They are square PNGs of the model's size: their weak view is the very pixels that were attacked, and ε is a
whole number of grey levels, so nothing is lost by rounding.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from usetta.data import DataError, Dataset
from usetta.files import atomic_file, write_atomically
from usetta.images import ImageError, open_image
from usetta.models import Model
from usetta.models.base import view_recipe
from usetta.models.devices import device_of
from usetta.progress import bar
from usetta.prompts import DEFAULT_TEMPLATE
from usetta.text_head import TextHead
from usetta.views import make_views
from usetta.views.show import as_bytes

_IMAGES = "images"


@dataclass(frozen=True)
class AttackSettings:
    """How far and how long an image is moved."""

    epsilon: int = 1
    """Grey levels, of 255, that a pixel may change by."""
    steps: int = 7
    """Each by a quarter of ε, from a random start."""
    seed: int = 0


@dataclass(frozen=True)
class AttackSummary:
    """What an attack has done."""

    images: int
    before: float
    """Accuracy of zero-shot CLIP in percent, on the images as they were."""
    after: float
    """The same on those that were written."""
    failed: tuple[str, ...]
    """Images that could not be read, with the reason."""


def attack(
    model: Model,
    dataset: Dataset,
    out: Path,
    settings: AttackSettings | None = None,
    *,
    limit: int | None = None,
    templates: Sequence[str] = (DEFAULT_TEMPLATE,),
    progress: bool | None = None,
    log: Callable[[str], object] = lambda text: None,
) -> AttackSummary:
    """Write a dataset of attacked images to the folder `out`; images that are there already are kept."""
    settings = settings or AttackSettings()
    if dataset.labels is None:
        raise DataError(f"the images of {dataset.name} have no labels to attack")
    if not hasattr(model, "image_features") or getattr(model, "precision", "fp32") != "fp32":
        raise ValueError("an attack needs gradients through the image tower: use a model of usetta in fp32")
    numbers = range(len(dataset))
    if limit is not None and limit < len(dataset):
        numbers = [i * len(dataset) // limit for i in range(limit)]  # type: ignore[assignment]
    lacking = set(dataset.labels) - {dataset.labels[i] for i in numbers}
    if lacking:
        raise ValueError(f"so few images leave some classes without any ({len(lacking)}): raise --limit")
    _fix(out, dataset, model, settings)
    text = TextHead(dataset.classes, model, list(templates)).prompts.features().float()
    views = view_recipe(model, 1)
    right = [0, 0]
    items, failed = [], []
    with bar(len(numbers), "Attacking", progress) as tick:
        for i in numbers:
            label, path = dataset.labels[i], out / _IMAGES / f"{i:06}.png"
            source = dataset.source(dataset.ids[i])
            try:
                image = open_image(source() if callable(source) else source, for_benchmark=True)
                clean = make_views(image, dataset.ids[i], views)
                if path.is_file():
                    moved = make_views(open_image(path), dataset.ids[i], views)
                else:
                    moved = perturbed(model, clean, text, label, settings, dataset.ids[i])
                    with atomic_file(path) as file:
                        Image.fromarray(as_bytes(moved)[0]).save(file, "PNG")
            except ImageError as error:
                failed.append(f"{dataset.ids[i]}: {error.reason}")
                log(f"{dataset.name}: {failed[-1]}")
                continue
            for place, pixels in enumerate((clean, moved)):
                answer = int((model.encode_images(pixels) @ text.T).argmax())
                right[place] += answer == label
            items.append([f"{_IMAGES}/{path.name}", label, dataset.classes[label], dataset.ids[i]])
            tick(1, "")
    if not items:
        raise DataError(f"no image of {dataset.name} could be read")
    if empty := sorted(set(dataset.labels) - {label for _, label, *_ in items}):  # a list has to name every class
        first = dataset.classes[empty[0]]
        raise DataError(
            f"no image of {first} in {dataset.name} could be read", "restore one and rerun the same command"
        )
    about = asdict(settings) | {"model": model.name, "dataset": dataset.name}
    write_atomically(out / "manifest.json", json.dumps({"items": items, "attack": about}, indent=1).encode())
    before, after = (100 * hits / len(items) for hits in right)
    return AttackSummary(len(items), before, after, tuple(failed))


def perturbed(model: Any, pixels: Tensor, text: Tensor, label: int, settings: AttackSettings, image_id: str) -> Tensor:
    """Pixels (1, 3, S, S), uint8, that differ from `pixels` by at most ε and look as unlike `label` as PGD finds."""
    seed = hashlib.blake2b(f"{settings.seed}\0{image_id}".encode("utf-8", "surrogateescape"), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
    clean = (pixels.float() / 255).to(device_of(model))
    epsilon = settings.epsilon / 255
    low, high = (clean - epsilon).clamp(min=0), (clean + epsilon).clamp(max=1)
    noise = epsilon * (2 * torch.rand(pixels.shape, generator=generator) - 1)
    moved = (clean + noise.to(clean.device)).clamp(low, high)
    target = torch.tensor([label], device=clean.device)
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(settings.steps):
            leaf = moved.detach().clone().requires_grad_()
            features = torch.nn.functional.normalize(model.image_features(model.normalize(leaf)).float(), dim=-1)
            loss = torch.nn.functional.cross_entropy(model.logit_scale * (features @ text.T), target)
            (grad,) = torch.autograd.grad(loss, leaf)
            moved = (leaf.detach() + epsilon / 4 * grad.sign()).clamp(low, high)
    return (255 * moved).round().to(torch.uint8).cpu()


def _fix(out: Path, dataset: Dataset, model: Model, settings: AttackSettings) -> None:
    """Refuse a folder that holds images of another attack."""
    about = {**asdict(settings), "model": model.fingerprint, "dataset": dataset.fingerprint}
    written, file = json.dumps(about, sort_keys=True), out / "attack.json"
    (out / _IMAGES).mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.read_text(encoding="utf-8") != written:
        raise ValueError(f"{out} holds images of another attack: choose another directory with --out")
    write_atomically(file, written.encode())
