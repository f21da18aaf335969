"""AugMix on the pixels of a crop (Hendrycks et al., 2020): each operation is Pillow's to the bit, most of them faster.

To the bit, because posterising and equalising make many grey levels of a difference of one. Tools were chosen by
measurement, see docs/performance.md: bit operations on bytes are cheaper than any look-up table, whole lines cheaper
than single pixels, and what is left stays with Pillow. An operation that changes nothing returns its argument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Pixels: TypeAlias = NDArray[np.uint8]
"""A picture (S, S, 3), contiguous."""


@dataclass(frozen=True)
class Operation:
    """One drawn step of an AugMix chain."""

    name: str
    level: float
    """u ~ U(0.1, severity)"""
    sign: int
    """Direction of a geometric operation, +1 or -1; the others ignore it."""


def mix(
    crop: Pixels, chains: Sequence[Sequence[Operation]], weights: Sequence[float], m: float, out: NDArray[np.float32]
) -> None:
    """Write m · crop + (1 - m) · Σ_j w_j · chain_j(crop), in 0..1, to `out` (3, S, S).

    The published code normalises each term first. Normalisation is affine and the coefficients m and (1 - m) · w_j
    sum to one, so mixing pixels and normalising once gives the same.
    """
    mixed = np.multiply(crop, m / 255, dtype=np.float32)
    term = np.empty_like(mixed)
    for weight, chain in zip(weights, chains, strict=True):
        end = crop
        for operation in chain:
            end = _OPERATIONS[operation.name](end, operation.level, operation.sign)
        mixed += np.multiply(end, (1 - m) * weight / 255, out=term, dtype=np.float32)
    np.clip(mixed, 0, 1, out=mixed)  # white may come out a rounding error above one
    out[:] = mixed.transpose(2, 0, 1)


def _by_pillow(x: Pixels, function: Callable[[Image.Image], Image.Image]) -> Pixels:
    return np.asarray(function(Image.fromarray(x)))


# --- grey levels -----------------------------------------------------------------------------------------------------


def _autocontrast(x: Pixels, u: float, sign: int) -> Pixels:
    """Stretch the levels of each channel to 0..255, by a table; a channel of one level stays as it is."""
    rows = x.reshape(len(x), -1)
    low = rows.min(axis=0).reshape(-1, 3).min(axis=0).astype(np.float64)
    high = rows.max(axis=0).reshape(-1, 3).max(axis=0).astype(np.float64)
    flat = low == high
    low[flat], high[flat] = 0, 255
    if not low.any() and (high == 255).all():
        return x
    scale = 255 / (high - low)
    levels = np.arange(256) * scale[:, None] - (low * scale)[:, None]
    table = levels.clip(0, 255).astype(np.uint8).ravel()
    stretched: Pixels = table.take(rows + np.tile(np.array([0, 256, 512], np.uint16), len(x))).reshape(x.shape)
    return stretched


def _equalize(x: Pixels, u: float, sign: int) -> Pixels:
    return _by_pillow(x, ImageOps.equalize)


def _posterize(x: Pixels, u: float, sign: int) -> Pixels:
    bits = 4 - int(u * 4 / 10)
    return x & np.uint8(256 - (1 << (8 - bits)))


def _solarize(x: Pixels, u: float, sign: int) -> Pixels:
    threshold = 256 - int(u * 256 / 10)
    if threshold == 256:
        return x
    return x ^ ((x >= threshold).view(np.uint8) * np.uint8(255))


# --- geometry: black comes in from outside ---------------------------------------------------------------------------


def _translate_x(x: Pixels, u: float, sign: int) -> Pixels:
    return _translated(x, u, sign, vertical=False)


def _translate_y(x: Pixels, u: float, sign: int) -> Pixels:
    return _translated(x, u, sign, vertical=True)


def _translated(x: Pixels, u: float, sign: int, *, vertical: bool) -> Pixels:
    shift = int(u * (len(x) / 3) / 10)
    if shift == 0:
        return x
    out = np.zeros_like(x)
    lines, out_lines = (x, out) if vertical else (x.transpose(1, 0, 2), out.transpose(1, 0, 2))
    if sign > 0:
        out_lines[:-shift] = lines[shift:]
    else:
        out_lines[shift:] = lines[:-shift]
    return out


def _rotate(x: Pixels, u: float, sign: int) -> Pixels:
    degrees = sign * int(u * 30 / 10)
    return _by_pillow(x, lambda image: image.rotate(degrees, resample=Image.Resampling.BILINEAR)) if degrees else x


def _shear_x(x: Pixels, u: float, sign: int) -> Pixels:
    return _sheared(x, sign * u * 0.3 / 10, vertical=False)


def _shear_y(x: Pixels, u: float, sign: int) -> Pixels:
    return _sheared(x, sign * u * 0.3 / 10, vertical=True)


def _sheared(x: Pixels, slope: float, *, vertical: bool) -> Pixels:
    """Shift line number i, a row or if `vertical` a column, by slope · (i + 1/2) pixels.

    A shift is k whole pixels and a fraction f, and ⌊a + (b - a) · f⌋ comes between neighbours a and b. As b - a lies
    within ±255, all f between two neighbouring fractions with denominators up to 255 give the same, so the middle
    between these two can stand in for f. With it, (b - a) · f is at least 1/510 away from a whole number, too far for
    the rounding of float32 to matter. If an f is next to such a fraction, everything hangs on the order in which
    Pillow rounds, and Pillow is asked.
    """
    shift = slope * (np.arange(len(x)) + 0.5)
    f = shift - np.floor(shift)
    fractions, middles = _fractions()
    above = np.searchsorted(fractions, f)  # 0 if f is 0: then the distance to the fraction "below" is negative
    if min((f - fractions[above - 1]).min(), (fractions[above] - f).min()) < 1e-10:
        matrix = (1, 0, 0, slope, 1, 0) if vertical else (1, slope, 0, 0, 1, 0)
        return _by_pillow(x, lambda image: _transformed(image, matrix))
    a, b = _neighbours(x, np.floor(2 * shift).astype(int).tolist(), vertical=vertical)
    part = middles[above - 1]
    values = np.subtract(b, a, dtype=np.float32)
    values *= part.repeat(3) if vertical else part[:, None]
    values += a
    sheared: Pixels = values.astype(np.uint8).reshape(x.shape)
    return sheared


@cache
def _fractions() -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """All fractions in 0..1 with denominators up to 255, ascending, and the middles between neighbours."""
    p, q = np.arange(256), np.arange(1, 256)[:, None]
    fractions = np.unique((p / q)[p <= q])
    return fractions, ((fractions[:-1] + fractions[1:]) / 2).astype(np.float32)


def _neighbours(x: Pixels, halves: list[int], *, vertical: bool) -> tuple[Pixels, Pixels]:
    """The pixels on either side of each place that a sheared picture is sampled at, both (S, 3 S).

    `halves` are the shifts of the lines in half pixels, rounded down. A place up to half a pixel outside counts as on
    the border.
    """
    size, axis = len(x), 0 if vertical else 1
    padded = np.concatenate([x.take([0], axis), x, x.take([-1], axis)], axis)
    a, b = np.zeros_like(x), np.zeros_like(x)
    lines, a_lines, b_lines = (each.transpose(1, 0, 2) if vertical else each for each in (padded, a, b))
    first = 0
    for half, members in groupby(halves):
        last = first + len(list(members))
        k, nearest = half // 2, (half + 1) // 2
        left = max(0, -nearest)
        right = max(left, min(size, size - nearest))
        a_lines[first:last, left:right] = lines[first:last, left + k + 1 : right + k + 1]
        b_lines[first:last, left:right] = lines[first:last, left + k + 2 : right + k + 2]
        first = last
    return a.reshape(size, -1), b.reshape(size, -1)


def _transformed(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Sample (x, y) from (a x + b y + c, d x + e y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


_OPERATIONS: dict[str, Callable[[Pixels, float, int], Pixels]] = {
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
OPERATION_NAMES = tuple(_OPERATIONS)
"""In the order in which they are drawn: another order gives other views."""
