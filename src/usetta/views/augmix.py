"""AugMix on the pixels of a crop (Hendrycks et al., 2020): each operation is Pillow's to the bit, most of them faster.

To the bit, because posterising and equalising make many grey levels of a difference of one. Tools were chosen by
measurement, see docs/notes/performance.md: bit operations on bytes are cheaper than any look-up table, whole lines
cheaper than single pixels, and what is left stays with Pillow. An operation that changes nothing returns its argument.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels: TypeAlias = NDArray[np.uint8]
"""An image (3, S, S), contiguous: channels lie apart, as models want them."""


class Operation(NamedTuple):
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
    np.multiply(crop, m / 255, out=out, dtype=np.float32)
    for weight, chain in zip(weights, chains, strict=True):
        end = crop
        for operation in chain:
            end = _OPERATIONS[operation.name](end, operation)
        (term,) = _scratch.floats(1, crop.size)
        out += np.multiply(end, (1 - m) * weight / 255, out=term.reshape(crop.shape), dtype=np.float32)
    np.clip(out, 0, 1, out=out)  # white may come out a rounding error above one


def write_channels(image: Image.Image, out: Pixels) -> None:
    """Write the pixels of an RGB image to `out` (3, H, W)."""
    for name, plane in zip("RGB", out, strict=True):
        plane[:] = np.frombuffer(image.tobytes("raw", name), np.uint8).reshape(plane.shape)


def _by_pillow(x: Pixels, function: Callable[[Image.Image], Image.Image]) -> Pixels:
    out = np.empty_like(x)
    write_channels(function(Image.merge("RGB", [Image.fromarray(plane) for plane in x])), out)
    return out


class _Scratch(threading.local):
    """Memory that a thread uses again and again: new memory may cost more than what is computed in it."""

    memory: NDArray[np.float32] = np.empty(0, np.float32)

    def floats(self, rows: int, count: int) -> NDArray[np.float32]:
        if len(self.memory) < rows * count:
            self.memory = np.empty(rows * count, np.float32)
        return self.memory[: rows * count].reshape(rows, count)


_scratch = _Scratch()


# --- grey levels -----------------------------------------------------------------------------------------------------


def _autocontrast(x: Pixels, operation: Operation) -> Pixels:
    """Stretch the levels of each channel to 0..255, by a table; a channel of one level stays as it is."""
    levels = x.reshape(3, -1)
    low, high = levels.min(axis=1), levels.max(axis=1)
    return x if ((low == high) | ((low == 0) & (high == 255))).all() else _looked_up(x, stretch(low, high))


def stretch(low: NDArray[np.integer[Any]], high: NDArray[np.integer[Any]]) -> Pixels:
    """Tables (n, 256) that take the levels low..high to 0..255; if they are equal, all levels stay as they are."""
    flat = low == high
    start, end = np.where(flat, 0.0, low)[:, None], np.where(flat, 255.0, high)[:, None]
    scale = 255 / (end - start)
    return (np.arange(256) * scale - start * scale).clip(0, 255).astype(np.uint8)


def _equalize(x: Pixels, operation: Operation) -> Pixels:
    """Spread the levels of each channel evenly, by a table; a channel of one level stays as it is."""
    counts = np.array([Image.fromarray(plane).histogram() for plane in x])
    darker = counts.cumsum(axis=1) - counts
    lightest = 255 - (counts[:, ::-1] > 0).argmax(axis=1)
    step = darker[[0, 1, 2], lightest][:, None] // 255
    table = np.where(step == 0, np.arange(256), (step // 2 + darker) // np.maximum(step, 1))
    return _looked_up(x, table.clip(max=255).astype(np.uint8))


def _looked_up(x: Pixels, table: Pixels) -> Pixels:
    """What a table (3, 256) has for the levels of an image."""
    out = np.empty_like(x)
    for levels, plane, new in zip(table, x, out, strict=True):
        levels.take(plane, out=new, mode="clip")  # with `out`, the default mode would compute in a copy of it
    return out


def _posterize(x: Pixels, operation: Operation) -> Pixels:
    return x & np.uint8(kept_bits(operation))


def kept_bits(operation: Operation) -> int:
    """Those that posterising does not set to 0."""
    bits = 4 - int(operation.level * 4 / 10)
    return 256 - (1 << (8 - bits))


def _solarize(x: Pixels, operation: Operation) -> Pixels:
    least = threshold(operation)
    return x if least == 256 else x ^ ((x >= least).view(np.uint8) * np.uint8(255))


def threshold(operation: Operation) -> int:
    """The least level that solarising inverts; 256 if none."""
    return 256 - int(operation.level * 256 / 10)


# --- geometry: black comes in from outside ---------------------------------------------------------------------------


def _translate_x(x: Pixels, operation: Operation) -> Pixels:
    return _translated(x, shift(operation, x.shape[-1]), vertical=False)


def _translate_y(x: Pixels, operation: Operation) -> Pixels:
    return _translated(x, shift(operation, x.shape[-1]), vertical=True)


def shift(operation: Operation, size: int) -> int:
    """How many pixels further on a translation finds each pixel."""
    return operation.sign * int(operation.level * (size / 3) / 10)


def _translated(x: Pixels, shift: int, *, vertical: bool) -> Pixels:
    if shift == 0:
        return x
    out = np.zeros_like(x)
    source, target = _upright(x, vertical), _upright(out, vertical)
    if shift > 0:
        target[:, :, :-shift] = source[:, :, shift:]
    else:
        target[:, :, -shift:] = source[:, :, :shift]
    return out


def _rotate(x: Pixels, operation: Operation) -> Pixels:
    angle = degrees(operation)
    return _by_pillow(x, lambda image: image.rotate(angle, resample=Image.Resampling.BILINEAR)) if angle else x


def degrees(operation: Operation) -> int:
    """The angle of a rotation, counter-clockwise."""
    return operation.sign * int(operation.level * 30 / 10)


def _shear_x(x: Pixels, operation: Operation) -> Pixels:
    return _sheared(x, slope(operation), vertical=False)


def _shear_y(x: Pixels, operation: Operation) -> Pixels:
    return _sheared(x, slope(operation), vertical=True)


def slope(operation: Operation) -> float:
    """By how many pixels each line of a shear is shifted against the one before it."""
    return operation.sign * operation.level * 0.3 / 10


class ShearedLines(NamedTuple):
    """How the lines of a shear are shifted, one number per line."""

    whole: NDArray[np.int64]
    """Pixels, rounded down."""
    part: NDArray[np.float32]
    """What stands in for the rest, see `sheared_lines`."""
    nearest: NDArray[np.int64]
    """Pixels, rounded to the nearest: what comes from outside by this measure is black."""


def sheared_lines(slope: float, size: int) -> ShearedLines | None:
    """How to shift line number i by slope · (i + 1/2) pixels with Pillow's rounding; None if only Pillow can.

    A shift is k whole pixels and a fraction f, and ⌊a + (b - a) · f⌋ comes between neighbours a and b. As b - a lies
    within ±255, all f between two neighbouring fractions with denominators up to 255 give the same, so the middle
    between these two can stand in for f. With it, (b - a) · f is at least 1/510 away from a whole number, too far for
    the rounding of float32 to matter. If an f is next to such a fraction, everything hangs on the order in which
    Pillow rounds, and Pillow must be asked.
    """
    return lines_of_shears([slope], size)[0]


def lines_of_shears(slopes: Sequence[float], size: int) -> list[ShearedLines | None]:
    """`sheared_lines` of several slopes."""
    shift = np.array(slopes)[:, None] * (np.arange(size) + 0.5)
    whole = np.floor(shift)
    f = shift - whole
    fractions, middles, cells = _fractions()
    above = cells[(f * _CELLS).astype(np.int64)]  # fast `searchsorted`: a cell has at most one fraction
    above += fractions[above] < f
    # 0 if f is 0: then the distance to the fraction "below" is negative
    distance = np.minimum(f - fractions[above - 1], fractions[above] - f).min(axis=1)
    columns = whole.astype(np.int64), middles[above - 1], np.floor(shift + 0.5).astype(np.int64)
    return [
        None if nearest < 1e-10 else ShearedLines(*lines)
        for nearest, *lines in zip(distance.tolist(), *columns, strict=True)
    ]


def _sheared(x: Pixels, slope: float, *, vertical: bool) -> Pixels:
    """Shift lines, rows or if `vertical` columns."""
    size = x.shape[-1]
    lines = sheared_lines(slope, size)
    if lines is None:
        matrix = (1, 0, 0, slope, 1, 0) if vertical else (1, slope, 0, 0, 1, 0)
        return _by_pillow(x, lambda image: _transformed(image, matrix))
    part = lines.part
    moved = _moved(x, lines.whole, vertical=vertical)
    a, values = _scratch.floats(2, moved.size)
    a[:] = moved.ravel()
    # In memory, the next pixel of a column is a line further. What follows on the last pixel of a line is not used.
    further = size if vertical else 1
    between = np.subtract(a[further:], a[:-further], out=values[:-further])
    between *= np.tile(part, 3 * (size + 1))[:-size] if vertical else np.tile(part.repeat(size + 1), 3)[:-1]
    between += a[:-further]
    sheared: Pixels = values.reshape(moved.shape)[:, :size, :size].astype(np.uint8)
    _blacken(sheared, lines.nearest, vertical=vertical)
    return sheared


_CELLS = 1 << 16  # two fractions are at least 1 / (254 · 255) apart


@cache
def _fractions() -> tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.int64]]:
    """All fractions in 0..1 with denominators up to 255, ascending; the middles between neighbours; for each of
    `_CELLS` equal parts of 0..1, how many fractions lie before it.
    """
    p, q = np.arange(256), np.arange(1, 256)[:, None]
    fractions = np.unique((p / q)[p <= q])
    middles = ((fractions[:-1] + fractions[1:]) / 2).astype(np.float32)
    return fractions, middles, np.searchsorted(fractions, np.arange(_CELLS + 1) / _CELLS)


def _moved(x: Pixels, shifts: NDArray[np.int64], *, vertical: bool) -> Pixels:
    """Lines that begin so many pixels further on, and end one later. The border goes on beyond itself by one pixel."""
    size = x.shape[-1]
    out = np.zeros((3, size + 1, size) if vertical else (3, size, size + 1), np.uint8)
    source, target = _upright(x, vertical), _upright(out, vertical)
    for lines, shift in _runs(shifts):
        k = min(max(shift, -size), size)  # all beyond is black
        left, right = max(0, -k), min(size + 1, size - k)
        target[:, lines, left:right] = source[:, lines, left + k : right + k]
        if k < 0:
            target[:, lines, left - 1] = source[:, lines, 0]
        else:
            target[:, lines, right] = source[:, lines, -1]
    return out


def _blacken(x: Pixels, shifts: NDArray[np.int64], *, vertical: bool) -> None:
    """Where lines, so shifted, come from outside."""
    target = _upright(x, vertical)
    for lines, n in _runs(shifts):
        if n:
            target[:, lines, slice(-n) if n < 0 else slice(-n, None)] = 0


def _upright(x: Pixels, vertical: bool) -> Pixels:
    """The image with its columns for rows if it is they that move."""
    return x.transpose(0, 2, 1) if vertical else x


def _runs(values: NDArray[np.int64]) -> Iterator[tuple[slice, int]]:
    """Where whole numbers stay the same, and which they are."""
    ends = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for first, last in pairwise(ends):
        yield slice(first, last), int(values[first])


def _transformed(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Sample (x, y) from (a x + b y + c, d x + e y + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR)


_OPERATIONS: dict[str, Callable[[Pixels, Operation], Pixels]] = {
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
