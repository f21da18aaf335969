"""Views from their draws: crops are cut, resized and flipped here; `augmix` does the rest.

Geometry and rounding follow torchvision on PIL images, which the published numbers were computed with. A crop is cut
out before it is resized: Pillow's `resize(box=...)` lets pixels outside the box bleed in, and is not the same.
Pixels are returned un-normalised; the model owns its mean and standard deviation.
"""

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from usetta.cancellation import current_check
from usetta.views.augmix import mix, write_channels
from usetta.views.recipe import Interpolation, ResizeMode, ViewDraw, ViewRandom, ViewRecipe, draw_view

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def make_views(
    image: Image.Image, image_id: str, recipe: ViewRecipe, *, part: range | None = None, threads: int = 1
) -> torch.Tensor:
    """Return the views of an RGB image: (N, 3, S, S), the weak view first, not normalised.

    Crops are uint8 in 0..255; with AugMix all views are float32 in 0..1. `image_id` keys the random draws: the
    image's name in its dataset, or `images.image_id`. With `part`, only the views of these numbers are made. The
    result does not depend on the number of `threads`; a caller that makes views of several images at a time needs only
    one thread for each.
    """
    if image.mode != "RGB":
        raise ValueError(f"views are made of RGB images, not of mode {image.mode}; see images.open_image")
    image.load()  # decode once, before several threads would
    part, S = range(recipe.views) if part is None else part, recipe.size
    pixels = np.empty((len(part), 3, S, S), dtype=np.float32 if recipe.augmix else np.uint8)
    pending: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    check = current_check()
    for place in (*enumerate(part), *[None] * threads):  # a None ends one thread
        pending.put(place)

    def work() -> None:
        rng = ViewRandom()
        for place, view in iter(pending.get, None):
            check()
            if view == 0:
                write_channels(weak_view(image, S, recipe.resize_mode, recipe.interpolation), pixels[place])
                if recipe.augmix:
                    pixels[place] /= 255
            else:
                rng.set_to(recipe.seed, image_id, view)
                _apply(image, draw_view(rng, image.width, image.height, recipe), pixels[place])

    if threads == 1:
        work()
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="usetta-view") as pool:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()  # raises what the thread raised
    return torch.from_numpy(pixels)


def weak_view(
    image: Image.Image, size: int, resize_mode: ResizeMode = "shortest", interpolation: Interpolation = "bicubic"
) -> Image.Image:
    """The whole image as a square: by default, resize the shorter side to `size` and cut out the central square."""
    x, y = far_ends(image.width, image.height) if resize_mode == "shortest" else (0, 0)
    middle = image.crop((x, y, image.width - x, image.height - y)) if x or y else image
    width, height, left, top = weak_geometry(middle.width, middle.height, size, resize_mode)
    resized = _resize(middle, width, height, _RESAMPLING[interpolation])
    return resized.crop((left, top, left + size, top + size))  # black where the square is larger than the image


def weak_geometry(width: int, height: int, size: int, resize_mode: ResizeMode) -> tuple[int, int, int, int]:
    """The size to which the weak view resizes an image, and where it cuts out its square: width, height, left, top."""
    if resize_mode == "squash":
        return size, size, 0, 0
    if resize_mode == "longest":
        ratio = max(width / size, height / size)
        width, height = max(1, round(width / ratio)), max(1, round(height / ratio))
        return width, height, -((size - width) // 2), -((size - height) // 2)
    if width <= height:
        width, height = size, int(size * height / width)
    else:
        width, height = int(size * width / height), size
    return width, height, round((width - size) / 2), round((height - size) / 2)


def apply_view(image: Image.Image, draw: ViewDraw, size: int) -> NDArray[Any]:
    """Return the drawn strong view (3, S, S): uint8 in 0..255 for a plain crop, float32 in 0..1 for AugMix."""
    out = np.empty((3, size, size), dtype=np.float32 if draw.chains else np.uint8)
    _apply(image, draw, out)
    return out


def _apply(image: Image.Image, draw: ViewDraw, out: NDArray[Any]) -> None:
    size = out.shape[-1]
    crop = _resize(image.crop(draw.box), size, size, Image.Resampling.BILINEAR)
    if draw.flip:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if not draw.chains:
        write_channels(crop, out)
        return
    pixels = np.empty(out.shape, np.uint8)
    write_channels(crop, pixels)
    mix(pixels, draw.chains, draw.weights, draw.m, out)


def _resize(image: Image.Image, width: int, height: int, method: Image.Resampling) -> Image.Image:
    """Resize the rows, then the columns, each rounded to bytes. Left to choose, Pillow 13 takes some columns first."""
    return image.resize((width, image.height), method).resize((width, height), method)


def far_ends(width: int, height: int, longest: int = 100) -> tuple[int, int]:
    """Columns and rows that the weak view cuts off at each end of an image over `longest` times as long as wide.

    Only the central square is shown, but resizing the whole of a 1 x 5000 image would take a gigabyte.
    """
    return max(0, width - longest * height) // 2, max(0, height - longest * width) // 2
