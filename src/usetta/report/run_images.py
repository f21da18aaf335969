"""The images of a run once more, with the views that its methods looked at.

A run keeps no pixels. Its images are opened again where they were, and their views made again from the same draws,
which belong to the seed and the image: so these are the very views that the answers came from.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from usetta.evaluate.store import Store, ViewRecord
from usetta.images import ImageError, open_image
from usetta.views import ViewRecipe, apply_view, draw_view, view_generator, weak_view


@dataclass(frozen=True)
class Shown:
    """An image with some of its views."""

    image: Image.Image
    views: tuple[tuple[ViewRecord, Image.Image], ...]
    """What was written down about a view, and the view itself; the weak one first."""


class Album:
    """Opens the images of a run again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._roots = store.facts("root")
        self._datasets = store.facts("dataset")
        self._views = store.facts("run").get("views", {})
        self._classes = store.facts("classes")

    def class_name(self, dataset: str, label: int) -> str:
        """What a label stands for."""
        names = self._classes.get(dataset, ())
        return str(names[label]) if label < len(names) else f"class {label}"

    def show(self, dataset: str, image_id: str, seed: int) -> Shown:
        """The image and the views of it that were written down; `ImageError` says why it cannot be shown."""
        if dataset not in self._roots:
            raise ImageError(image_id, "the run does not tell where its images are")
        image = open_image(Path(self._roots[dataset]) / image_id, for_benchmark=True)
        seen = self._store.seen(dataset, image_id, seed)
        if seen is None or not self._views:
            return Shown(image, ())
        recipe = self._recipe(dataset, seed)
        return Shown(image, tuple((view, _view(image, image_id, view.number, recipe)) for view in seen.views))

    def _recipe(self, dataset: str, seed: int) -> ViewRecipe:
        told = self._views
        return ViewRecipe(
            views=told["views"],
            size=told["size"],
            augmix=self._datasets[dataset]["augmix"],
            seed=seed,
            scale=tuple(told["scale"]),
            ratio=tuple(told["ratio"]),
            severity=told["severity"],
        )


def _view(image: Image.Image, image_id: str, number: int, recipe: ViewRecipe) -> Image.Image:
    if number == 0:
        return weak_view(image, recipe.size)
    draw = draw_view(view_generator(recipe.seed, image_id, number), image.width, image.height, recipe)
    pixels = apply_view(image, draw, recipe.size).transpose(1, 2, 0)
    return Image.fromarray(pixels if pixels.dtype == np.uint8 else (255 * pixels).round().astype(np.uint8))
