"""A single view as an image, for figures and reports; it is made again from its draw instead of being kept."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from usetta.views import ViewRecipe, make_views


def view_image(image: Image.Image, image_id: str, number: int, recipe: ViewRecipe) -> Image.Image:
    """View `number` of an image, as a run with this recipe has seen it."""
    pixels = make_views(image, image_id, recipe, part=range(number, number + 1))
    return Image.fromarray(as_bytes(pixels)[0])


def as_bytes(pixels: torch.Tensor) -> NDArray[Any]:
    """Views (N, 3, S, S), uint8 or float in 0..1, as images (N, S, S, 3) of bytes."""
    rounded = pixels if pixels.dtype == torch.uint8 else (pixels * 255).round().to(torch.uint8)
    images: NDArray[np.uint8] = rounded.permute(0, 2, 3, 1).numpy()
    return images
