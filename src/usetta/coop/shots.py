"""The few labelled pictures that a context is learned from: drawn by seed, encoded once.

Drawing opens each picture, so that a bad one is reported and the next of its class takes its place. Which pictures were
drawn is known before anything is encoded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from usetta.images import ImageError, ImageSource, open_image, picture_id
from usetta.models.base import Model
from usetta.progress import track
from usetta.views import ViewRecipe, make_views


@dataclass(frozen=True)
class Shot:
    """A labelled picture that can be read."""

    picture: ImageSource
    label: int
    id: str
    """See `images.picture_id`."""


def generator(purpose: Literal["shots", "context", "order"], seed: int, number: int = 0) -> np.random.Generator:
    """The generator of one kind of draw under one seed: of the shots of a class, the context, the order in an epoch."""
    return np.random.default_rng([("shots", "context", "order").index(purpose) + 1, seed, number])


def draw_shots(
    pictures: Sequence[ImageSource],
    labels: Sequence[int],
    classes: Sequence[str],
    count: int,
    seed: int,
    say: Callable[[str], object],
) -> list[Shot]:
    """Up to `count` pictures of each class, drawn at random; one that cannot be read is told and replaced."""
    if len(pictures) != len(labels):
        raise ValueError(
            f"every picture needs a label, but there are {len(pictures)} pictures and {len(labels)} labels"
        )
    by_class: list[list[ImageSource]] = [[] for _ in classes]
    for picture, label in zip(pictures, labels, strict=True):
        if not 0 <= label < len(classes):
            raise ValueError(f"label {label} names none of the {len(classes)} classes, which count from 0")
        by_class[label].append(picture)
    shots = []
    for label, candidates in enumerate(by_class):
        drawn: list[Shot] = []
        for i in generator("shots", seed, label).permutation(len(candidates)):
            if len(drawn) == count:
                break
            try:
                drawn.append(Shot(candidates[i], label, picture_id(open_image(candidates[i]))))
            except ImageError as error:
                say(f"left out: {error}")
        if not drawn:
            have = "none of its pictures can be read" if candidates else "it has no pictures"
            raise ValueError(f"class {classes[label]!r} cannot be learned: {have}")
        shots += drawn
    return shots


def encode_shots(model: Model, shots: Sequence[Shot], views: int, seed: int, progress: bool | None) -> Tensor:
    """Features (n, V, D) of the weak view and V - 1 random crops, half of them flipped, of each picture."""
    recipe = ViewRecipe(views=views, size=model.image_size, seed=seed)
    rows = [
        model.encode_images(make_views(open_image(shot.picture), shot.id, recipe))
        for shot in track(shots, len(shots), "Encoding", progress)
    ]
    return torch.stack(rows)
