"""The weak view of a picture and its strong views (AugMix: Hendrycks et al., 2020).

Randomness belongs to the view: its generator is keyed by (seed, picture id, view number), so a view is the same in
any batch, order, worker or number of views. Drawing (`draw_view`) is apart from applying (`apply_view`), so that the
draws can be shown, tested, and applied by other code.

Geometry and rounding follow torchvision on PIL images, which the published numbers were computed with. A crop is cut
out before it is resized: Pillow's `resize(box=...)` lets pixels outside the box bleed in, and is not the same.
Pixels leave here un-normalised; the model owns its mean and standard deviation.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

_KEY_VERSION = 1  # raise it when the same recipe would give other views than before

_CHAINS = 3
_MAX_DEPTH = 3
_CROP_TRIES = 10


@dataclass(frozen=True)
class ViewRecipe:
    """Which views are made of a picture; the defaults are those of the paper's ImageNet experiments."""

    views: int = 64
    """The weak view and `views - 1` strong ones."""
    size: int = 224
    """Side of a view in pixels."""
    augmix: bool = False
    """Mix three chains of operations into each strong view, as the benchmark does for the fine-grained data sets."""
    seed: int = 0
    scale: tuple[float, float] = (0.08, 1.0)
    """Area of a crop, as a part of the picture."""
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
class Operation:
    """One drawn step of an AugMix chain."""

    name: str
    level: float
    """u ~ U(0.1, severity)"""
    sign: int
    """Direction of a geometric operation, +1 or -1; the others ignore it."""


@dataclass(frozen=True)
class ViewDraw:
    """Everything that is random about a strong view."""

    box: tuple[int, int, int, int]
    """The crop, in pixels of the picture: left, top, right, bottom."""
    flip: bool
    chains: tuple[tuple[Operation, ...], ...] = ()
    """AugMix: the operations of each chain, in order; empty for a plain crop."""
    weights: tuple[float, ...] = ()
    """AugMix: w, one weight per chain; they sum to one."""
    m: float = 1.0
    """AugMix: the part of the plain crop in the view."""


def make_views(image: Image.Image, picture_id: str, recipe: ViewRecipe) -> torch.Tensor:
    """Return the views of an RGB picture: (N, 3, S, S), the weak view first, not normalised.

    Crops are uint8 in 0..255; with AugMix all views are float32 in 0..1. `picture_id` keys the random draws: the
    picture's name in its data set, or `images.picture_id`.
    """
    if image.mode != "RGB":
        raise ValueError(f"views are made of RGB pictures, not of mode {image.mode}; see images.open_image")
    N, S = recipe.views, recipe.size
    pixels = np.empty((N, 3, S, S), dtype=np.float32 if recipe.augmix else np.uint8)
    pixels[0] = _channels_first(weak_view(image, S))
    if recipe.augmix:
        pixels[0] /= 255
    for view, draw in enumerate(draw_views(image.width, image.height, picture_id, recipe), start=1):
        pixels[view] = apply_view(image, draw, S)
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


def view_generator(seed: int, picture_id: str, view: int) -> np.random.Generator:
    """Return the generator that belongs to one view of one picture under one seed."""
    key = hashlib.blake2b(f"{seed}\0{view}\0{picture_id}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def draw_views(width: int, height: int, picture_id: str, recipe: ViewRecipe) -> list[ViewDraw]:
    """Return the draws of the strong views 1 .. N-1 of a picture of this size."""
    return [
        draw_view(view_generator(recipe.seed, picture_id, view), width, height, recipe)
        for view in range(1, recipe.views)
    ]


def draw_view(rng: np.random.Generator, width: int, height: int, recipe: ViewRecipe) -> ViewDraw:
    """Draw one strong view of a picture of this size."""
    box = _draw_box(rng, width, height, recipe)
    flip = bool(rng.random() < 0.5)
    if not recipe.augmix:
        return ViewDraw(box, flip)
    # float32 as in the published code, and so that a stored draw gives the very same view
    weights = rng.dirichlet((1.0,) * _CHAINS).astype(np.float32)
    m = np.float32(rng.beta(1.0, 1.0))
    chains = tuple(_draw_chain(rng, recipe.severity) for _ in range(_CHAINS))
    return ViewDraw(box, flip, chains, tuple(weights.tolist()), float(m))


def apply_view(image: Image.Image, draw: ViewDraw, size: int) -> NDArray[Any]:
    """Return the drawn strong view (3, S, S): uint8 in 0..255 for a plain crop, float32 in 0..1 for AugMix."""
    crop = image.crop(draw.box).resize((size, size), Image.Resampling.BILINEAR)
    if draw.flip:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _mix(crop, draw) if draw.chains else _channels_first(crop)


def _channels_first(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of an RGB picture as (3, H, W)."""
    return np.asarray(image).transpose(2, 0, 1)


def _without_far_ends(image: Image.Image, longest: int = 100) -> Image.Image:
    """Cut a picture more than `longest` times as long as wide to its middle.

    The weak view shows only the central square, but resizing the whole of a 1 x 5000 picture would take a gigabyte.
    """
    width, height = image.size
    x = max(0, width - longest * height) // 2
    y = max(0, height - longest * width) // 2
    return image.crop((x, y, width - x, height - y)) if x or y else image


def _draw_box(rng: np.random.Generator, width: int, height: int, recipe: ViewRecipe) -> tuple[int, int, int, int]:
    """Draw torchvision's RandomResizedCrop: left, top, right, bottom."""
    low, high = recipe.ratio
    for _ in range(_CROP_TRIES):
        area = width * height * rng.uniform(*recipe.scale)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
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


def _draw_chain(rng: np.random.Generator, severity: float) -> tuple[Operation, ...]:
    depth = rng.integers(1, _MAX_DEPTH, endpoint=True)
    return tuple(
        Operation(
            name=_OPERATION_NAMES[rng.integers(len(_OPERATION_NAMES))],
            level=float(rng.uniform(0.1, severity)),
            sign=-1 if rng.random() < 0.5 else 1,
        )
        for _ in range(depth)
    )


def _mix(crop: Image.Image, draw: ViewDraw) -> NDArray[np.float32]:
    """Return m · crop + (1 - m) · Σ_j w_j · chain_j(crop), (3, S, S) in 0..1.

    The published code normalises each term first. Normalisation is affine and the coefficients m and (1 - m) · w_j
    sum to one, so mixing pixels and normalising once gives the same.
    """
    mixed = np.multiply(_channels_first(crop), draw.m / 255, dtype=np.float32)
    for weight, chain in zip(draw.weights, draw.chains, strict=True):
        end = crop
        for operation in chain:
            end = _OPERATIONS[operation.name](end, operation.level, operation.sign)
        mixed += np.multiply(_channels_first(end), (1 - draw.m) * weight / 255, dtype=np.float32)
    return np.clip(mixed, 0, 1, out=mixed)  # white may come out a rounding error above one


def _autocontrast(image: Image.Image, u: float, sign: int) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, u: float, sign: int) -> Image.Image:
    return ImageOps.equalize(image)


def _posterize(image: Image.Image, u: float, sign: int) -> Image.Image:
    return ImageOps.posterize(image, 4 - int(u * 4 / 10))


def _rotate(image: Image.Image, u: float, sign: int) -> Image.Image:
    return image.rotate(sign * int(u * 30 / 10), resample=Image.Resampling.BILINEAR)


def _solarize(image: Image.Image, u: float, sign: int) -> Image.Image:
    return ImageOps.solarize(image, 256 - int(u * 256 / 10))


def _shear_x(image: Image.Image, u: float, sign: int) -> Image.Image:
    return _affine(image, (1, sign * u * 0.3 / 10, 0, 0, 1, 0))


def _shear_y(image: Image.Image, u: float, sign: int) -> Image.Image:
    return _affine(image, (1, 0, 0, sign * u * 0.3 / 10, 1, 0))


def _translate_x(image: Image.Image, u: float, sign: int) -> Image.Image:
    return _affine(image, (1, 0, sign * int(u * (image.width / 3) / 10), 0, 1, 0))


def _translate_y(image: Image.Image, u: float, sign: int) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, sign * int(u * (image.height / 3) / 10)))


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Sample (x, y) from (a x + b y + c, d x + e y + f); black comes in from outside."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


_OPERATIONS: dict[str, Callable[[Image.Image, float, int], Image.Image]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "posterize": _posterize,
    "rotate": _rotate,
    "solarize": _solarize,
    "shear_x": _shear_x,
    "shear_y": _shear_y,
    "translate_x": _translate_x,
    "translate_y": _translate_y,
}
_OPERATION_NAMES = tuple(_OPERATIONS)
