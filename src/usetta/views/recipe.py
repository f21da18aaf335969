"""Which views are made of an image, and everything that is random about them.

Randomness belongs to the view: its generator is keyed by (seed, image id, view number), so a view is the same in
any batch, order, worker or number of views. Drawing is apart from applying (`make`), so that draws can be shown,
tested, and applied by other code. Boxes and ranges follow torchvision, which the published numbers were computed with.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from usetta.views.augmix import OPERATION_NAMES, Operation

MAX_VIEWS = 1024
"""The paper uses 64. The views of an image are in memory at once, so a typing mistake must not ask for 100 000."""

_KEY_VERSION = 1  # to be raised when the same recipe gives other views than before

_CHAINS = 3
_MAX_DEPTH = 3
_CROP_TRIES = 10
_ZEROS = np.zeros(4, np.uint64)


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
        if not 1 <= self.views <= MAX_VIEWS:
            raise ValueError(f"views must be a number from 1 to {MAX_VIEWS}, not {self.views}")
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


def view_generator(seed: int, image_id: str, view: int) -> np.random.Generator:
    """Return the generator that belongs to one view of one image under one seed."""
    rng = new_generator()
    set_to_view(rng, seed, image_id, view)
    return rng


def draw_views(width: int, height: int, image_id: str, recipe: ViewRecipe) -> list[ViewDraw]:
    """Return the draws of the strong views 1 .. N-1 of an image of this size."""
    rng, draws = new_generator(), []
    for view in range(1, recipe.views):
        set_to_view(rng, recipe.seed, image_id, view)
        draws.append(draw_view(rng, width, height, recipe))
    return draws


def draw_view(rng: np.random.Generator, width: int, height: int, recipe: ViewRecipe) -> ViewDraw:
    """Draw one strong view of an image of this size."""
    box = _draw_box(rng, width, height, recipe)
    flip = bool(rng.random() < 0.5)
    if not recipe.augmix:
        return ViewDraw(box, flip)
    # float32 as in the published code, and so that a stored draw gives exactly the same view
    weights = _draw_weights(rng).astype(np.float32)
    m = np.float32(rng.beta(1.0, 1.0))
    chains = tuple(_draw_chain(rng, recipe.severity) for _ in range(_CHAINS))
    return ViewDraw(box, flip, chains, tuple(weights.tolist()), float(m))


def new_generator() -> np.random.Generator:
    """A generator to be set to a view by `set_to_view`."""
    return np.random.Generator(np.random.Philox(key=0))


def set_to_view(rng: np.random.Generator, seed: int, image_id: str, view: int) -> None:
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
    # No try fitted into this shape: take the largest central crop whose ratio is allowed.
    w, h = width, height
    if width / height < low:
        h = max(1, round(width / low))
    elif width / height > high:
        w = max(1, round(height * high))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _draw_weights(rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw from Dirichlet(1, 1, 1), as `rng.dirichlet` does, without its preparation, which takes ten times as long."""
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
