"""The few labelled images that a context is learned from: drawn by seed, encoded once.

Drawing opens each image, so that a bad one is reported and the next of its class is drawn instead. So it is known which
images a context is learned from before anything is encoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from usetta.feature_cache import FeatureCache
from usetta.images import ImageError, ImageSource, image_id, open_image
from usetta.models.base import Model, view_recipe
from usetta.pipeline import ImageRequest, Pipeline
from usetta.progress import track


@dataclass(frozen=True)
class Shot:
    """A labelled image that can be read."""

    image: ImageSource
    label: int
    id: str
    """See `images.image_id`."""


def generator(purpose: Literal["shots", "context", "order"], seed: int, number: int = 0) -> np.random.Generator:
    """The generator of one kind of draw under one seed: of the shots of a class, the context, the order in an epoch."""
    return np.random.default_rng([("shots", "context", "order").index(purpose) + 1, seed, number])


def draw_shots(
    images: Sequence[ImageSource],
    labels: Sequence[int],
    classes: Sequence[str],
    count: int,
    seed: int,
    log: Callable[[str], object],
) -> list[Shot]:
    """Up to `count` images of each class, drawn at random; one that cannot be read is logged and replaced."""
    if len(images) != len(labels):
        raise ValueError(f"every image needs a label, but there are {len(images)} images and {len(labels)} labels")
    by_class: list[list[ImageSource]] = [[] for _ in classes]
    for image, label in zip(images, labels, strict=True):
        if not 0 <= label < len(classes):
            raise ValueError(f"label {label} is out of range: there are {len(classes)} classes, counted from 0")
        by_class[label].append(image)
    shots = []
    for label, candidates in enumerate(by_class):
        drawn: list[Shot] = []
        for i in generator("shots", seed, label).permutation(len(candidates)):
            if len(drawn) == count:
                break
            try:
                drawn.append(Shot(candidates[i], label, image_id(open_image(candidates[i]))))
            except ImageError as error:
                log(f"left out: {error}")
        if not drawn:
            why = "none of its images can be read" if candidates else "it has no images"
            raise ValueError(f"class {classes[label]!r} cannot be learned: {why}")
        shots += drawn
    return shots


def encode_shots(
    model: Model, shots: Sequence[Shot], views: int, seed: int, progress: bool | None, cache: FeatureCache | None = None
) -> Tensor:
    """Features (n, V, D) of the weak view and V - 1 random crops, half of them flipped, of each image."""
    recipe = view_recipe(model, views, seed=seed)
    episodes = Pipeline(model, cache=cache).stream(ImageRequest(shot.image, recipe, id=shot.id) for shot in shots)
    rows = []
    for episode in track(episodes, len(shots), "Encoding", progress):
        if isinstance(episode, ImageError):  # it was opened before, when the shots were drawn
            raise episode
        rows.append(episode.features)
    return torch.stack(rows)
