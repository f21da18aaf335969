"""Views made on the device that encodes them, equal to those of `make`, so that the host uploads one image, not 64.

Resizing is Pillow's integer arithmetic: coefficients of 22 bits, rows first, rounded to bytes between the passes. All
that is random or depends on sizes is prepared on the host in small tables; nothing is read back, so nothing waits.

AugMix is equal to the bit too, where the device computes in double precision, as Pillow does to rotate. On MPS, which
does not, a rotation rounds a few pixels to the next grey level.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from usetta.views import augmix
from usetta.views.augmix import Operation, ShearedLines
from usetta.views.make import apply_view, far_ends, weak_geometry
from usetta.views.recipe import Interpolation, ResizeMode, ViewDraw, ViewRandom, ViewRecipe, draw_view

_BITS = 22
_MOST_VALUES = 1 << 26
"""Of an intermediate result; the views of a very large image are made in several parts."""

Array: TypeAlias = NDArray[Any]


class ViewPlan:
    """Views of an image that a device will make: see `make_views` for the arguments.

    A plan is made by a thread of the host, while the device is busy with other images. With `pin`, the image waits in
    memory from which a GPU can copy it while it computes.
    """

    def __init__(
        self, image: Image.Image, image_id: str, recipe: ViewRecipe, *, part: range | None = None, pin: bool = False
    ) -> None:
        part, rng = range(recipe.views) if part is None else part, ViewRandom()
        self.recipe = recipe
        self._image = torch.empty((image.height, image.width, 3), dtype=torch.uint8, pin_memory=pin)
        self._image.numpy()[:] = np.asarray(image)
        weak = recipe.size, recipe.resize_mode, recipe.interpolation
        self._weak = [_weak_taps(image.width, image.height, *weak)] if 0 in part else []
        self._draws: list[ViewDraw] = []
        for view in part:
            if view:
                rng.set_to(recipe.seed, image_id, view)
                self._draws.append(draw_view(rng, image.width, image.height, recipe))
        if self._draws:
            self._strong = _crop_taps(self._draws, recipe.size)
        shears = [o for draw in self._draws for chain in draw.chains for o in chain if o.name in _SHEARS]
        lines = augmix.lines_of_shears([augmix.slope(operation) for operation in shears], recipe.size)
        self._lines = dict(zip(shears, lines, strict=True))
        self._by_host: dict[int, Array] = {}
        """Views, by their place in the result, that only Pillow can make to the bit."""
        hard = {operation for operation, own in self._lines.items() if own is None}
        for place, draw in enumerate(self._draws, start=len(self._weak)):
            if hard and any(operation in hard for chain in draw.chains for operation in chain):
                self._by_host[place] = apply_view(image, draw, recipe.size)

    def make(self, device: torch.device) -> Tensor:
        """The views (N, 3, S, S) on the device."""
        image = self._image.to(device, non_blocking=True).permute(2, 0, 1)
        weak = [_resized(image, *axes) for axes in self._weak]
        strong = [_resized(image, *self._strong)] if self._draws else []
        if self.recipe.augmix:
            # By a tensor: PyTorch multiplies by the reciprocal of a number instead, which has other last bits.
            weak = [view / torch.full((), 255.0, device=device) for view in weak]
            strong = [_mixed(crops, self._draws, self._lines) for crops in strong]
        views = torch.cat(weak + strong)
        for place, view in self._by_host.items():
            views[place] = _to(view, device)
        return views


class Taps(NamedTuple):
    """One axis of a resize: pixel j of the result is Σ_k weights[j, k] · source[first[j] + k], ÷ 2²²."""

    first: Array
    """(n, S) int64"""
    weights: Array
    """(n, S, taps) int32"""


def taps(sizes: Sequence[int] | Array, out: int, kernel: Callable[[Array], Array], reach: int) -> Taps:
    """Pillow's coefficients to resize each of n axes of these sizes to `out`, by a kernel that is 0 beyond `reach`."""
    size = np.asarray(sizes, np.int64)[:, None]
    scale = size / out
    stretch = np.maximum(scale, 1.0)
    centre = (np.arange(out) + 0.5) * scale
    first = np.maximum((centre - reach * stretch + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + reach * stretch + 0.5).astype(np.int64), size) - first
    k = np.arange(int(count.max()))
    weights = kernel((k + first[..., None] - centre[..., None] + 0.5) * (1.0 / stretch)[..., None])
    weights = np.where(k < count[..., None], weights, 0.0)
    total = np.zeros(count.shape)
    for part in np.moveaxis(weights, -1, 0):  # one after the other, as Pillow adds them
        total = total + part
    weights = weights * (1.0 / total)[..., None]
    scaled = weights * (1 << _BITS)
    integers = np.trunc(np.where(weights < 0, scaled - 0.5, scaled + 0.5)).astype(np.int32)
    same = np.broadcast_to(size == out, first.shape)  # Pillow leaves out a pass that changes nothing
    integers[same] = (k == 0) << _BITS
    return Taps(np.where(same, np.arange(out), first), integers)


def bilinear(x: Array) -> Array:
    """The kernel of strong views, which reaches 1 pixel far. A weak view may use it too."""
    return np.where(np.abs(x) < 1, 1 - np.abs(x), 0.0)


def bicubic(x: Array) -> Array:
    """The kernel of the weak view, which reaches 2 pixels far; in Pillow's order of operations."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _crop_taps(draws: Sequence[ViewDraw], size: int) -> tuple[Taps, Taps]:
    left, top, right, bottom = np.array([draw.box for draw in draws]).T
    across, down = _known_taps(right - left, size), _known_taps(bottom - top, size)
    for axis, start in ((across, left), (down, top)):
        axis.first[:] += start[:, None]
    flipped = np.array([draw.flip for draw in draws])
    for table in across:  # a flip is a reversed table
        table[flipped] = table[flipped][:, ::-1]
    return across, down


def _known_taps(sizes: Array, out: int) -> Taps:
    """`taps` of crops of these sizes: the same sizes come again and again."""
    rows = [(_taps_of_group(size // _GROUP, out), size % _GROUP) for size in sizes.tolist()]
    first = np.empty((len(rows), out), np.int64)
    weights = np.zeros((len(rows), out, max([group.weights.shape[2] for group, _ in rows])), np.int32)
    for row, (group, place) in enumerate(rows):
        first[row] = group.first[place]
        weights[row, :, : group.weights.shape[2]] = group.weights[place]
    return Taps(first, weights)


_GROUP = 32


@lru_cache(maxsize=128)  # at most 136 MB, for crops of 4000 pixels
def _taps_of_group(number: int, out: int) -> Taps:
    return taps(np.arange(number * _GROUP, (number + 1) * _GROUP).clip(1), out, bilinear, 1)


@lru_cache(maxsize=64)
def _weak_taps(
    width: int, height: int, size: int, resize_mode: ResizeMode, interpolation: Interpolation
) -> tuple[Taps, Taps]:
    x, y = far_ends(width, height) if resize_mode == "shortest" else (0, 0)
    across, down, left, top = weak_geometry(width - 2 * x, height - 2 * y, size, resize_mode)
    kernel, reach = (bicubic, 2) if interpolation == "bicubic" else (bilinear, 1)
    axes = []
    for whole, end, after, start in ((width, x, across, left), (height, y, down, top)):
        first, weights = taps([whole - 2 * end], after, kernel, reach)
        margins = max(0, -start), max(0, start + size - after)  # weights of 0 make them black
        first, weights = np.pad(first, ((0, 0), margins)), np.pad(weights, ((0, 0), margins, (0, 0)))
        cut = slice(start + margins[0], start + margins[0] + size)
        axes.append(Taps(first[:, cut] + end, weights[:, cut]))
    return axes[0], axes[1]


def _resized(image: Tensor, across: Taps, down: Taps) -> Tensor:
    """Views (n, 3, S, S) of an image (3, H, W), both uint8."""
    step = max(1, _MOST_VALUES // (3 * image.shape[1] * across.first.shape[1]))
    parts = [slice(start, start + step) for start in range(0, len(across.first), step)]
    return torch.cat(
        [_resized_part(image, *(Taps(*(t[part] for t in axis)) for axis in (across, down))) for part in parts]
    )


def _resized_part(image: Tensor, across: Taps, down: Taps) -> Tensor:
    _, height, width = image.shape
    columns, x_weights, rows, y_weights = (_to(table, image.device) for table in (*across, *down))
    pixels = image.to(torch.int32)

    # A weight beyond the end of an axis is 0, so it does not matter which pixel it is multiplied with.
    def pixels_of_rows(k: int) -> Tensor:
        return pixels[:, :, (columns + k).clamp_(max=width - 1)].permute(2, 0, 1, 3)

    short = _weighted(pixels_of_rows, x_weights[:, None, None])

    def pixels_of_columns(k: int) -> Tensor:
        return short.take_along_dim((rows + k).clamp_(max=height - 1)[:, None, :, None], dim=2)

    return _weighted(pixels_of_columns, y_weights[:, None, :, None]).to(torch.uint8)


def _weighted(source: Callable[[int], Tensor], weights: Tensor) -> Tensor:
    """Σ_k source(k) · weights[..., k], rounded to whole numbers in 0..255."""
    total = source(0).mul_(weights[..., 0]).add_(1 << (_BITS - 1))
    for k in range(1, weights.shape[-1]):
        total.add_(source(k).mul_(weights[..., k]))
    return total.bitwise_right_shift_(_BITS).clamp_(0, 255)


def _to(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


# --- AugMix: one function for all views that have an operation in the same place --------------------------------------


def _mixed(crops: Tensor, draws: Sequence[ViewDraw], lines: Mapping[Operation, ShearedLines | None]) -> Tensor:
    """AugMix of crops (n, 3, S, S): see `augmix.mix`. `lines` are those of the shears."""
    device, chains = crops.device, len(draws[0].chains)
    ends = crops.repeat_interleave(chains, dim=0)
    every = [chain for draw in draws for chain in draw.chains]
    for depth in range(max(map(len, every))):
        groups: dict[str, list[int]] = defaultdict(list)
        for number, chain in enumerate(every):
            if depth < len(chain):
                groups[chain[depth].name].append(number)
        for name, numbers in groups.items():
            index = _to(np.array(numbers), device)
            operations = [every[number][depth] for number in numbers]
            if name in _SHEARS:
                ends[index] = _SHEARS[name](ends[index], [lines[operation] for operation in operations])
            else:
                ends[index] = _OPERATIONS[name](ends[index], operations)
    m = np.array([draw.m for draw in draws])
    shares = np.array([[(1 - draw.m) * weight / 255 for weight in draw.weights] for draw in draws])
    mixed = crops * _to((m / 255).astype(np.float32), device)[:, None, None, None]
    for number, share in enumerate(_to(shares.T.astype(np.float32), device)):
        mixed += ends[number::chains] * share[:, None, None, None]
    return mixed.clamp_(0, 1)


def _autocontrast(x: Tensor, operations: Sequence[Operation]) -> Tensor:
    low, high = (levels.to(torch.int64) for levels in x.flatten(2).aminmax(dim=2))
    return _looked_up(x, _stretches(x.device)[low * 256 + high])


@cache
def _stretches(device: torch.device) -> Tensor:
    """The table (256) of every darkest and lightest level: it takes double precision, which not all devices have."""
    low, high = (levels.ravel() for levels in np.mgrid[:256, :256])
    return _to(augmix.stretch(low, np.maximum(low, high)), device)


def _equalize(x: Tensor, operations: Sequence[Operation]) -> Tensor:
    levels = x.flatten(2).to(torch.int64)
    counts = torch.zeros((*levels.shape[:2], 256), dtype=torch.int32, device=x.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels, dtype=torch.int32))
    darker = counts.cumsum(dim=2, dtype=torch.int32) - counts
    step = darker.gather(2, levels.amax(dim=2, keepdim=True)) // 255
    table = torch.where(step == 0, _to(np.arange(256, dtype=np.int32), x.device), (step // 2 + darker) // step.clamp(1))
    return _looked_up(x, table.clamp_(max=255).to(torch.uint8))


def _looked_up(x: Tensor, table: Tensor) -> Tensor:
    """What tables (n, 3, 256) have for the levels of images."""
    return table.gather(2, x.flatten(2).to(torch.int64)).view_as(x)


def _posterize(x: Tensor, operations: Sequence[Operation]) -> Tensor:
    return x & _each(x, [augmix.kept_bits(operation) for operation in operations], np.uint8)


def _solarize(x: Tensor, operations: Sequence[Operation]) -> Tensor:
    bright = x >= _each(x, [augmix.threshold(operation) for operation in operations], np.int16)
    return x ^ (bright * 255).to(torch.uint8)


def _each(x: Tensor, values: Sequence[int], dtype: type[np.integer[Any]]) -> Tensor:
    return _to(np.array(values, dtype), x.device)[:, None, None, None]


def _translate(x: Tensor, operations: Sequence[Operation]) -> Tensor:
    size = x.shape[-1]
    source = np.arange(size) + np.array([[augmix.shift(operation, size)] for operation in operations])
    inside = _to((source >= 0) & (source < size), x.device)[:, None, None, :]
    return x.take_along_dim(_to(source.clip(0, size - 1), x.device)[:, None, None, :], dim=3) * inside


def _shear(x: Tensor, lines: Sequence[ShearedLines | None]) -> Tensor:
    size = x.shape[-1]
    unmoved = ShearedLines(
        np.zeros(size, np.int64), np.zeros(size, np.float32), np.zeros(size, np.int64)
    )  # the host makes that view
    whole, part, nearest = (
        _to(np.stack(values), x.device) for values in zip(*(line or unmoved for line in lines), strict=True)
    )
    places = torch.arange(size, device=x.device)
    a, b = (
        x.take_along_dim((places + whole[..., None] + further).clamp_(0, size - 1)[:, None], dim=3).float()
        for further in (0, 1)
    )
    source = places + nearest[..., None]
    inside = ((source >= 0) & (source < size))[:, None]
    return ((b - a).mul_(part[:, None, :, None]).add_(a).to(torch.uint8)) * inside


def _upright(operation: Callable[[Tensor, Sequence[Any]], Tensor]) -> Callable[..., Tensor]:
    """The same for columns."""
    return lambda x, operations: operation(x.transpose(2, 3), operations).transpose(2, 3)


def _rotate(x: Tensor, operations: Sequence[Operation]) -> Tensor:
    size, double = x.shape[-1], x.device.type != "mps"
    tables = [_rotation(augmix.degrees(operation), size, x.device, double) for operation in operations]
    corners, x_part, y_part, inside = (torch.stack(parts)[:, None] for parts in zip(*tables, strict=True))
    flat, wanted = x.flatten(2), x_part.dtype
    upper_left, upper_right, lower_left, lower_right = (
        flat.take_along_dim(corners[:, :, corner], dim=2).to(wanted) for corner in range(4)
    )
    upper = (upper_right - upper_left) * x_part + upper_left
    lower = (lower_right - lower_left) * x_part + lower_left
    return (((lower - upper) * y_part + upper).to(torch.uint8) * inside).view_as(x)


@cache
def _rotation(degrees: int, size: int, device: torch.device, double: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the pixels of a rotated square come from: four neighbours (4, S²), two fractions (S²), whether inside."""
    a, b, c, d, e, f = _rotation_matrix(degrees, size)
    y, x = (axis.ravel() + 0.5 for axis in np.mgrid[:size, :size])
    from_x, from_y = a * x + b * y + c, d * x + e * y + f
    inside = (from_x >= 0) & (from_x < size) & (from_y >= 0) & (from_y < size)
    left, top = np.floor(from_x - 0.5), np.floor(from_y - 0.5)
    fractions = (from_x - 0.5 - left, from_y - 0.5 - top)
    columns, rows = ([(first + more).clip(0, size - 1) for more in (0, 1)] for first in (left, top))
    corners = np.stack([row * size + column for row in rows for column in columns]).astype(np.int64)
    wanted = np.float64 if double else np.float32
    x_part, y_part = (_to(fraction.astype(wanted), device) for fraction in fractions)
    return _to(corners, device), x_part, y_part, _to(inside, device)


def _rotation_matrix(degrees: int, size: int) -> tuple[float, ...]:
    """The matrix that Pillow rotates by: (x, y) comes from (a x + b y + c, d x + e y + f)."""
    angle, middle = -math.radians(degrees), size / 2
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    c = cosine * -middle + sine * -middle + 0.0 + middle
    f = -sine * -middle + cosine * -middle + 0.0 + middle
    return cosine, sine, c, -sine, cosine, f


_OPERATIONS: dict[str, Callable[[Tensor, Sequence[Operation]], Tensor]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "posterize": _posterize,
    "rotate": _rotate,
    "solarize": _solarize,
    "translate_x": _translate,
    "translate_y": _upright(_translate),
}
_SHEARS: dict[str, Callable[[Tensor, Sequence[ShearedLines | None]], Tensor]] = {
    "shear_x": _shear,
    "shear_y": _upright(_shear),
}
