"""The operations are Pillow's to the bit, for every size, level and direction, one by one and in chains."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from usetta.views import ViewRecipe, augmix, draw_views, make_views
from usetta.views.augmix import OPERATION_NAMES, Operation, mix
from views.test_views import make_image, naive_augmix, naive_operation, normalised

KINDS = ["noise", "extremes", "smooth", "flat", "dull"]
SHEARS = ["shear_x", "shear_y"]


def pixels(kind: str, size: int, seed: int = 0) -> NDArray[np.uint8]:
    """(3, S, S)"""
    rng = np.random.default_rng(seed)
    if kind == "noise":  # all differences between neighbours
        return rng.integers(0, 256, (3, size, size), dtype=np.uint8)
    if kind == "extremes":
        return rng.choice(np.array([0, 255], np.uint8), (3, size, size))
    if kind == "smooth":
        return np.ascontiguousarray(np.asarray(make_image(size, size, seed)).transpose(2, 0, 1))
    if kind == "flat":
        return np.full((size, size, 3), rng.integers(0, 256, 3), dtype=np.uint8).transpose(2, 0, 1).copy()
    return rng.integers(100, 140, (3, size, size), dtype=np.uint8)  # few levels: contrast has something to do


def ours(x: NDArray[np.uint8], *operations: Operation) -> NDArray[np.uint8]:
    for operation in operations:
        x = augmix._OPERATIONS[operation.name](x, operation)
    return x


def pillows(x: NDArray[np.uint8], *operations: Operation) -> NDArray[np.uint8]:
    image = Image.fromarray(np.ascontiguousarray(x.transpose(1, 2, 0)))
    for operation in operations:
        image = naive_operation(image, operation, image.width)
    return np.asarray(image).transpose(2, 0, 1)


# Levels with few digits put shears next to simple fractions of a pixel.
levels = st.one_of(
    st.floats(0.1, 10, exclude_max=True),
    st.floats(0.1, 1),
    st.integers(10, 999).map(lambda hundredths: hundredths / 100),
)
operations = st.builds(Operation, st.sampled_from(OPERATION_NAMES), levels, st.sampled_from([-1, 1]))


@settings(max_examples=500, deadline=None)
@given(operations, st.sampled_from(KINDS), st.integers(1, 40), st.integers(0, 10**6))
def test_each_operation_is_pillows_to_the_bit(operation: Operation, kind: str, size: int, seed: int) -> None:
    x = pixels(kind, size, seed)
    before = x.copy()
    np.testing.assert_array_equal(ours(x, operation), pillows(x, operation))
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("name", OPERATION_NAMES)
def test_each_operation_is_pillows_at_full_size(name: str) -> None:
    rng = np.random.default_rng(1)
    for size in (224, 225):
        for kind in ("noise", "smooth"):
            x = pixels(kind, size)
            for level in (0.1, 1.0, *rng.uniform(0.1, 1, 3), *rng.uniform(1, 10, 2)):
                for sign in (-1, 1):
                    operation = Operation(name, float(level), sign)
                    np.testing.assert_array_equal(ours(x, operation), pillows(x, operation), str(operation))


@settings(max_examples=200, deadline=None)
@given(st.lists(operations, min_size=2, max_size=3), st.sampled_from(KINDS), st.integers(1, 40))
def test_so_are_chains(chain: list[Operation], kind: str, size: int) -> None:
    x = pixels(kind, size)
    expected = pillows(x, *chain)
    np.testing.assert_array_equal(ours(x, *chain), expected)
    out = np.empty((3, size, size), np.float32)
    mix(x, [chain], [1.0], 0.0, out)
    np.testing.assert_array_equal(np.rint(out * 255), expected)


@pytest.mark.parametrize("seed", range(3))
def test_views_are_those_of_the_plain_chain(seed: int) -> None:
    image, recipe = make_image(300, 220, seed), ViewRecipe(views=13, augmix=True, seed=seed)
    views = normalised(make_views(image, "x", recipe)[1:])
    for view, draw in zip(views, draw_views(300, 220, "x", recipe), strict=True):
        np.testing.assert_allclose(view, naive_augmix(image, draw, 224), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SHEARS)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("slope", [1 / 2, 1 / 5, 1 / 8, 0.1, 2 / 255, 0.03, 0.0])
def test_shears_by_simple_fractions_of_a_pixel_round_as_pillow_does(name: str, sign: int, slope: float) -> None:
    x = pixels("noise", 96)
    operation = Operation(name, slope * 10 / 0.3, sign)
    np.testing.assert_array_equal(ours(x, operation), pillows(x, operation))


@pytest.mark.parametrize("sign", [-1, 1])
def test_what_is_moved_out_of_the_image_leaves_black(sign: int) -> None:
    x = pixels("noise", 20) | np.uint8(1)
    for name in (*SHEARS, "translate_x", "translate_y"):
        operation = Operation(name, 77.712345678, sign)  # steeper than any that is drawn
        found = ours(x, operation)
        np.testing.assert_array_equal(found, pillows(x, operation))
        assert (found == 0).mean() > 0.3


def test_the_rounding_of_floats_cannot_matter_to_a_shear() -> None:
    """For every difference of levels and every gap between fractions, float32 and exact arithmetic round alike."""
    fractions, middles, _ = augmix._fractions()
    assert len(fractions) == 19821  # 1 + Σ φ(q) for q = 1..255
    assert fractions[0] == 0
    assert fractions[-1] == 1
    differences = np.arange(-255, 256)
    nearest = 1.0
    for low, high, middle in zip(fractions[:-1:7], fractions[1::7], middles[::7], strict=True):
        exact = differences * ((low + high) / 2)
        apart = np.abs(exact - np.rint(exact))[differences != 0].min()
        nearest = min(nearest, float(apart))
        for level in (0, 1, 254, 255):
            values = np.float32(level) + differences.astype(np.float32) * middle
            possible = (level + differences >= 0) & (level + differences <= 255)
            assert np.array_equal(values.astype(int)[possible], (level + np.floor(exact))[possible])
    assert nearest >= 1 / 510 - 1e-9


def test_every_fraction_is_found_in_its_cell() -> None:
    fractions, _, cells = augmix._fractions()
    ends = [np.nextafter(fractions, 0), fractions, np.nextafter(fractions[:-1], 1), np.linspace(0, 1, 100_000)]
    for f in ends:
        above = cells[(f * augmix._CELLS).astype(np.int64)]
        assert np.array_equal(above + (fractions[above] < f), np.searchsorted(fractions, f))


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (Operation("rotate", 0.33, -1), "noise"),
        (Operation("translate_x", 0.13, 1), "noise"),
        (Operation("translate_y", 0.13, -1), "noise"),
        (Operation("solarize", 0.03, 1), "noise"),
        (Operation("autocontrast", 0.5, 1), "extremes"),
    ],
)
def test_an_operation_that_changes_nothing_returns_its_argument(operation: Operation, kind: str) -> None:
    x = pixels(kind, 224)
    assert ours(x, operation) is x
    np.testing.assert_array_equal(pillows(x, operation), x)


def test_a_chain_that_changes_nothing_is_a_part_of_the_crop() -> None:
    x = pixels("dull", 16)
    still, solarize = Operation("rotate", 0.2, 1), Operation("solarize", 9.0, 1)  # from level 26 on
    out = np.empty((3, 16, 16), np.float32)
    mix(x, [[still], [solarize], [still, still]], [0.5, 0.3, 0.2], 0.25, out)
    expected = (0.25 + 0.75 * 0.7) * x + 0.75 * 0.3 * (255 - x.astype(float))
    np.testing.assert_allclose(out * 255, expected, atol=1e-4)


def test_white_stays_within_the_range() -> None:
    """Products of drawn weights with 1/255 sum up to a little more than one at times."""
    white, rng = np.full((3, 2, 2), 255, np.uint8), np.random.default_rng(0)
    out = np.empty((3, 2, 2), np.float32)
    for _ in range(200):
        weights = rng.dirichlet((1.0, 1.0, 1.0)).astype(np.float32).tolist()
        mix(white, [[Operation("equalize", 0.5, 1)]] * 3, weights, float(np.float32(rng.random())), out)
        assert 1 - 1e-6 < out.min() <= out.max() <= 1


@pytest.fixture
def nervous() -> Iterator[None]:
    """Threads that take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("nervous")
def test_threads_do_not_get_into_each_others_way() -> None:
    work = [(seed, size) for size in (160, 150) for seed in range(8)]

    def views(each: tuple[int, int]) -> NDArray[np.float32]:
        seed, size = each
        recipe = ViewRecipe(views=5, size=size, augmix=True)
        found: NDArray[np.float32] = make_views(make_image(60, 50, seed), str(seed), recipe).numpy()
        return found

    alone = [views(each) for each in work]
    with ThreadPoolExecutor(4) as pool:
        for together, expected in zip(pool.map(views, work), alone, strict=True):
            np.testing.assert_array_equal(together, expected)
