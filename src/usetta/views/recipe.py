"""Which views are made of an image, and everything that is random about them.

Randomness belongs to the view: its generator is keyed by (seed, image id, view number), so a view is the same in
any batch, order, worker or number of views. Drawing is apart from applying (`make`), so that draws can be shown,
tested, and applied by other code. Boxes and ranges follow torchvision, which the published numbers were computed with.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from usetta.views.augmix import OPERATION_NAMES, Operation

MAX_VIEWS = 1024
"""The paper uses 64. The views of an image are in memory at once, so a typing mistake must not ask for 100 000."""

_KEY_VERSION = 1  # to be raised when the same recipe gives other views than before

ResizeMode = Literal["shortest", "squash", "longest"]
"""How the weak view becomes a square: the ends of the longer side cut off, distorted, or with black margins."""

Interpolation = Literal["bicubic", "bilinear"]

_CHAINS = 3
_MAX_DEPTH = 3
_CROP_TRIES = 10
_HALF = 0xFFFFFFFF
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
    resize_mode: ResizeMode = "shortest"
    """Of the weak view, as the model was trained; strong views are crops of the image in any case."""
    interpolation: Interpolation = "bicubic"
    """Of the weak view; strong views are bilinear."""

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
        for name, known in (("resize_mode", get_args(ResizeMode)), ("interpolation", get_args(Interpolation))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")

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
        # Only what differs from CLIP's weak view, so that caches from before there was a choice stay valid.
        parts += [value for value in (self.resize_mode, self.interpolation) if value not in ("shortest", "bicubic")]
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


class ViewRandom:
    """Random numbers of views, set to one view after another.

    They are those of numpy's `Generator` on Philox. Single numbers are taken from Philox's words here, because
    `Generator.integers` takes ten times as long, and because only the words are promised to stay the same in
    later versions of numpy.
    """

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._half: int | None = None
        """The upper half of a word whose lower half was used."""

    def set_to(self, seed: int, image_id: str, view: int) -> None:
        """Go to the start of one view; cheaper than a new generator, which asks the system for a seed first."""
        name = f"{seed}\0{view}\0{image_id}".encode("utf-8", "surrogateescape")
        key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), "<u8").astype(np.uint64)
        self._bits.state = {
            "bit_generator": "Philox",
            "state": {"counter": _ZEROS, "key": key},
            "buffer": _ZEROS,
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        self._half = None

    def random(self) -> float:
        """Draw from 0 ≤ x < 1."""
        return _unit(self._bits.random_raw())

    def uniform(self, low: float, high: float) -> float:
        """Draw from low ≤ x < high."""
        return low + (high - low) * self.random()

    def below(self, n: int) -> int:
        """Draw one of 0 .. n-1 (at most 2³²) by Lemire's method, from half a word."""
        drawn, self._half = _below(n, self._half, self._bits.random_raw)
        return drawn

    def mixing_weights(self) -> tuple[tuple[float, ...], float]:
        """Draw from Dirichlet(1, 1, 1) and from Beta(1, 1)."""
        # `Generator.dirichlet` draws the same, but prepares for it ten times as long.
        first, second, third = self._generator.standard_exponential(_CHAINS).tolist()
        scale = 1 / (first + second + third)
        return (first * scale, second * scale, third * scale), self._generator.beta(1.0, 1.0)

    def chains(self, severity: float) -> tuple[tuple[Operation, ...], ...]:
        """Draw AugMix's chains, the last that is drawn of a view: so all words can be taken at once, and are left over.

        Each is a depth of 1 to 3, then for each operation its name, level and sign.
        """
        word, half = iter(self._bits.random_raw(32).tolist()).__next__, self._half
        chains, span, names = [], severity - 0.1, len(OPERATION_NAMES)
        for _ in range(_CHAINS):
            depth, half = _below(_MAX_DEPTH, half, word)
            chain = []
            for _ in range(1 + depth):
                name, half = _below(names, half, word)
                level, sign = 0.1 + span * _unit(word()), 1 if word() >> 63 else -1
                chain.append(Operation(OPERATION_NAMES[name], level, sign))
            chains.append(tuple(chain))
        return tuple(chains)


def _unit(word: int) -> float:
    """A number in 0 ≤ x < 1."""
    return (word >> 11) * 2.0**-53


def _below(n: int, half: int | None, word: Callable[[], int]) -> tuple[int, int | None]:
    """One of 0 .. n-1, from a half that was left over or from the next word; and the half that is left over now."""
    if n == 1:
        return 0, half
    while True:
        if half is None:
            both = word()
            used, half = both & _HALF, both >> 32
        else:
            used, half = half, None
        product = used * n
        rest = product & _HALF
        if rest >= n or rest >= (1 << 32) % n:  # else this result would be more probable than others
            return product >> 32, half


def draw_views(width: int, height: int, image_id: str, recipe: ViewRecipe) -> list[ViewDraw]:
    """Return the draws of the strong views 1 .. N-1 of an image of this size."""
    rng, draws = ViewRandom(), []
    for view in range(1, recipe.views):
        rng.set_to(recipe.seed, image_id, view)
        draws.append(draw_view(rng, width, height, recipe))
    return draws


def draw_view(rng: ViewRandom, width: int, height: int, recipe: ViewRecipe) -> ViewDraw:
    """Draw one strong view of an image of this size."""
    box = _draw_box(rng, width, height, recipe)
    flip = rng.random() < 0.5
    if not recipe.augmix:
        return ViewDraw(box, flip)
    # float32 as in the published code, and so that a stored draw gives exactly the same view
    weights, m = rng.mixing_weights()
    first, second, third, m = np.array((*weights, m), np.float32).tolist()
    return ViewDraw(box, flip, rng.chains(recipe.severity), (first, second, third), m)


def _draw_box(rng: ViewRandom, width: int, height: int, recipe: ViewRecipe) -> tuple[int, int, int, int]:
    """Draw torchvision's RandomResizedCrop: left, top, right, bottom."""
    low, high = recipe.ratio
    for _ in range(_CROP_TRIES):
        area = width * height * rng.uniform(*recipe.scale)
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = rng.below(height - h + 1)
            left = rng.below(width - w + 1)
            return left, top, left + w, top + h
    # No try fitted into this shape: take the largest central crop whose ratio is allowed.
    w, h = width, height
    if width / height < low:
        h = max(1, round(width / low))
    elif width / height > high:
        w = max(1, round(height * high))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
