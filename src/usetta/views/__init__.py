"""The weak view of an image and its strong views (AugMix: Hendrycks et al., 2020).

Randomness belongs to the view: its generator is keyed by (seed, image id, view number), so a view is the same in
any batch, order, worker or number of views. Drawing (`draw_view`) is apart from applying (`apply_view`, and `augmix`
for what it does to a crop), so that the draws can be shown, tested, and applied by other code.

Geometry and rounding follow torchvision on PIL images, which the published numbers were computed with. A crop is cut
out before it is resized: Pillow's `resize(box=...)` lets pixels outside the box bleed in, and is not the same.
Pixels leave here un-normalised; the model owns its mean and standard deviation.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from usetta.views.augmix import OPERATION_NAMES, Operation, mix, write_channels

__all__ = [
    "Operation",
    "ViewDraw",
    "ViewRecipe",
    "apply_view",
    "draw_view",
    "draw_views",
    "make_views",
    "view_generator",
    "weak_view",
]

_KEY_VERSION = 1  # raise it when the same recipe would give other views than before

_CHAINS = 3
_MAX_DEPTH = 3
_CROP_TRIES = 10


@dataclass(frozen=True)
class ViewRecipe:
    """Which views are made of an image; the defaults are those of the paper's ImageNet experiments."""

    views: int = 64
    """The weak view and `views - 1` strong ones."""
    size: int = 224
    """Side of a view in pixels."""
    augmix: bool = False
    """Mix three chains of operations into each strong view, as the benchmark does for the fine-grained datasets."""
    seed: int = 0
    scale: tuple[float, float] = (0.08, 1.0)
    """Area of a crop, as a part of the image."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width of a crop over its height."""
    severity: float = 1.0
    """Upper end of AugMix's operation level, up to 10."""

    def __post_init__(self) -> None:
        if self.views < 1:
            raise ValueError(f"views must be at least 1 (the weak view alone), not {self.views}")
        if self.size < 1:
            raise ValueError(f"size must be at least 1 pixel, not {self.size}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale must be a range within 0..1, low end above 0, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1] < math.inf:
            raise ValueError(f"ratio must be a range of positive numbers, not {self.ratio}")
        if not 0.1 <= self.severity <= 10:
            raise ValueError(f"severity must lie in 0.1..10, not {self.severity}")

    @property
    def key(self) -> str:
        """A string that is equal for equal views and fit for a file name, to key a cache with."""
        parts = [
            f"v{_KEY_VERSION}",
            f"n{self.views}",
            f"size{self.size}",
            f"seed{self.seed}",
            "scale{}-{}".format(*map(float, self.scale)),
            "ratio{}-{}".format(*map(float, self.ratio)),
            f"augmix{float(self.severity)}" if self.augmix else "crops",
        ]
        return "_".join(parts)


@dataclass(frozen=True)
class ViewDraw:
    """Everything that is random about a strong view."""

    box: tuple[int, int, int, int]
    """The crop, in pixels of the image: left, top, right, bottom."""
    flip: bool
    chains: tuple[tuple[Operation, ...], ...] = ()
    """AugMix: the operations of each chain, in order; empty for a plain crop."""
    weights: tuple[float, ...] = ()
    """AugMix: w, one weight per chain; they sum to one."""
    m: float = 1.0
    """AugMix: the part of the plain crop in the view."""


def make_views(
    image: Image.Image, image_id: str, recipe: ViewRecipe, *, part: range | None = None, threads: int = 1
) -> torch.Tensor:
    """Return the views of an RGB image: (N, 3, S, S), the weak view first, not normalised.

    Crops are uint8 in 0..255; with AugMix all views are float32 in 0..1. `image_id` keys the random draws: the
    image's name in its dataset, or `images.image_id`. With `part`, only the views of these numbers are made. They
    are shared out to `threads` and do not depend on their number; who makes views of several images at a time needs
    one for each.
    """
    if image.mode != "RGB":
        raise ValueError(f"views are made of RGB images, not of mode {image.mode}; see images.open_image")
    image.load()  # before several threads would
    part, S = range(recipe.views) if part is None else part, recipe.size
    pixels = np.empty((len(part), 3, S, S), dtype=np.float32 if recipe.augmix else np.uint8)
    waiting: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
    for place in (*enumerate(part), *[None] * threads):  # who takes a None goes home
        waiting.put(place)

    def work() -> None:
        rng = _new_generator()
        for place, view in iter(waiting.get, None):
            if view == 0:
                write_channels(weak_view(image, S), pixels[place])
                if recipe.augmix:
                    pixels[place] /= 255
            else:
                _key(rng, recipe.seed, image_id, view)
                _apply(image, draw_view(rng, image.width, image.height, recipe), pixels[place])

    if threads == 1:
        work()
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="usetta-view") as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()
    return torch.from_numpy(pixels)


def weak_view(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side to `size` (bicubic) and cut out the central square."""
    image = _without_far_ends(image)
    width, height = image.size
    if width <= height:
        width, height = size, int(size * height / width)
    else:
        width, height = int(size * width / height), size
    left, top = round((width - size) / 2), round((height - size) / 2)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + size, top + size))


def view_generator(seed: int, image_id: str, view: int) -> np.random.Generator:
    """Return the generator that belongs to one view of one image under one seed."""
    rng = _new_generator()
    _key(rng, seed, image_id, view)
    return rng


def draw_views(width: int, height: int, image_id: str, recipe: ViewRecipe) -> list[ViewDraw]:
    """Return the draws of the strong views 1 .. N-1 of an image of this size."""
    rng, draws = _new_generator(), []
    for view in range(1, recipe.views):
        _key(rng, recipe.seed, image_id, view)
        draws.append(draw_view(rng, width, height, recipe))
    return draws


def draw_view(rng: np.random.Generator, width: int, height: int, recipe: ViewRecipe) -> ViewDraw:
    """Draw one strong view of an image of this size."""
    box = _draw_box(rng, width, height, recipe)
    flip = bool(rng.random() < 0.5)
    if not recipe.augmix:
        return ViewDraw(box, flip)
    # float32 as in the published code, and so that a stored draw gives the very same view
    weights = _draw_weights(rng).astype(np.float32)
    m = np.float32(rng.beta(1.0, 1.0))
    chains = tuple(_draw_chain(rng, recipe.severity) for _ in range(_CHAINS))
    return ViewDraw(box, flip, chains, tuple(weights.tolist()), float(m))


def apply_view(image: Image.Image, draw: ViewDraw, size: int) -> NDArray[Any]:
    """Return the drawn strong view (3, S, S): uint8 in 0..255 for a plain crop, float32 in 0..1 for AugMix."""
    out = np.empty((3, size, size), dtype=np.float32 if draw.chains else np.uint8)
    _apply(image, draw, out)
    return out


def _apply(image: Image.Image, draw: ViewDraw, out: NDArray[Any]) -> None:
    size = out.shape[-1]
    crop = image.crop(draw.box).resize((size, size), Image.Resampling.BILINEAR)
    if draw.flip:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if not draw.chains:
        write_channels(crop, out)
        return
    pixels = np.empty(out.shape, np.uint8)
    write_channels(crop, pixels)
    mix(pixels, draw.chains, draw.weights, draw.m, out)


def _without_far_ends(image: Image.Image, longest: int = 100) -> Image.Image:
    """Cut an image more than `longest` times as long as wide to its middle.

    The weak view shows only the central square, but resizing the whole of a 1 x 5000 image would take a gigabyte.
    """
    width, height = image.size
    x = max(0, width - longest * height) // 2
    y = max(0, height - longest * width) // 2
    return image.crop((x, y, width - x, height - y)) if x or y else image


def _new_generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=0))


def _key(rng: np.random.Generator, seed: int, image_id: str, view: int) -> None:
    """Set a generator to the start of one view; cheaper than a new one, which asks the system for a seed first."""
    name = f"{seed}\0{view}\0{image_id}".encode("utf-8", "surrogateescape")
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), "<u8").astype(np.uint64)
    rng.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": key},
        "buffer": _ZEROS,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }


_ZEROS = np.zeros(4, np.uint64)


def _draw_box(rng: np.random.Generator, width: int, height: int, recipe: ViewRecipe) -> tuple[int, int, int, int]:
    """Draw torchvision's RandomResizedCrop: left, top, right, bottom."""
    low, high = recipe.ratio
    for _ in range(_CROP_TRIES):
        area = width * height * _uniform(rng, *recipe.scale)
        ratio = math.exp(_uniform(rng, math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(rng.integers(0, height - h, endpoint=True))
            left = int(rng.integers(0, width - w, endpoint=True))
            return left, top, left + w, top + h
    # No try fitted into this shape: the largest central crop whose ratio is allowed.
    w, h = width, height
    if width / height < low:
        h = max(1, round(width / low))
    elif width / height > high:
        w = max(1, round(height * high))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _draw_weights(rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw from Dirichlet(1, 1, 1), as `rng.dirichlet` does after ten times as long a preparation."""
    parts: NDArray[np.float64] = rng.standard_exponential(_CHAINS)
    first, second, third = parts.tolist()
    parts *= 1 / (first + second + third)
    return parts


def _draw_chain(rng: np.random.Generator, severity: float) -> tuple[Operation, ...]:
    depth = rng.integers(1, _MAX_DEPTH, endpoint=True)
    return tuple(
        Operation(
            name=OPERATION_NAMES[rng.integers(len(OPERATION_NAMES))],
            level=_uniform(rng, 0.1, severity),
            sign=-1 if rng.random() < 0.5 else 1,
        )
        for _ in range(depth)
    )


def _uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """Draw the number that `rng.uniform` does, which takes three times as long."""
    return low + (high - low) * rng.random()
