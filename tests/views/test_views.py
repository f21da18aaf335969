"""The views equal the plain Pillow chain of the published loaders, given the same random draws.

The reference below is written naively and apart from the code under test: torchvision's steps one by one, with
AugMix mixed in normalised space, as the published code does.
"""

import dataclasses
import hashlib
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from usetta.views import (
    Operation,
    ViewDraw,
    ViewRandom,
    ViewRecipe,
    apply_view,
    draw_view,
    draw_views,
    make_views,
    weak_view,
)
from usetta.views.augmix import OPERATION_NAMES
from usetta.views.digests import EXPECTED, view_digests

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
OPERATIONS = {
    "autocontrast",
    "equalize",
    "posterize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
}


def make_image(width, height, seed=0):
    """A smooth image with some noise, so that resampling and contrast both matter."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 9 + y / 17), np.cos(x / 23 - y / 7), np.sin(x / 5) * np.cos(y / 11)], -1)
    values = 110 + 70 * waves + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


# --- the naive reference -------------------------------------------------------------------------------------------


def naive_weak(image, size):
    """Resize(size, bicubic) and CenterCrop(size) of torchvision on a PIL image."""
    w, h = image.size
    short, long = (w, h) if w <= h else (h, w)
    new_short, new_long = size, int(size * long / short)
    new_w, new_h = (new_short, new_long) if w <= h else (new_long, new_short)
    image = image.resize((new_w, h), Image.BICUBIC).resize((new_w, new_h), Image.BICUBIC)  # rows first, on any Pillow
    crop_top = int(round((new_h - size) / 2.0))  # noqa: RUF046
    crop_left = int(round((new_w - size) / 2.0))  # noqa: RUF046
    return image.crop((crop_left, crop_top, crop_left + size, crop_top + size))


def naive_crop(image, draw, size):
    left, top, right, bottom = draw.box
    cut = Image.fromarray(np.asarray(image)[top:bottom, left:right].copy())
    rows_first = cut.resize((size, cut.height), Image.BILINEAR)
    resized = np.asarray(rows_first.resize((size, size), Image.BILINEAR))
    return Image.fromarray(resized[:, ::-1].copy() if draw.flip else resized)


def naive_operation(image, operation, size):
    u, name = operation.level, operation.name
    negative = operation.sign < 0
    if name == "autocontrast":
        return ImageOps.autocontrast(image)
    if name == "equalize":
        return ImageOps.equalize(image)
    if name == "posterize":
        return ImageOps.posterize(image, 4 - int(u * 4 / 10))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(u * 256 / 10))
    if name == "rotate":
        degrees = int(u * 30 / 10)
        return image.rotate(-degrees if negative else degrees, resample=Image.BILINEAR)
    if name.startswith("shear"):
        level = u * 0.3 / 10
        level = -level if negative else level
        matrix = (1, level, 0, 0, 1, 0) if name == "shear_x" else (1, 0, 0, level, 1, 0)
    else:
        level = int(u * (size / 3) / 10)
        level = -level if negative else level
        matrix = (1, 0, level, 0, 1, 0) if name == "translate_x" else (1, 0, 0, 0, 1, level)
    return image.transform((size, size), Image.AFFINE, matrix, resample=Image.BILINEAR)


def naive_normalised(image):
    """ToTensor and Normalize."""
    unit = np.asarray(image).astype(np.float32) / np.float32(255)
    return ((unit - MEAN) / STD).transpose(2, 0, 1)


def naive_augmix(image, draw, size):
    """The mixture in normalised space."""
    x = naive_crop(image, draw, size)
    mix = np.zeros((3, size, size), np.float32)
    for w, chain in zip(draw.weights, draw.chains, strict=True):
        y = x.copy()
        for operation in chain:
            y = naive_operation(y, operation, size)
        mix += np.float32(w) * naive_normalised(y)
    m = np.float32(draw.m)
    return m * naive_normalised(x) + (1 - m) * mix


def normalised(views):
    return (views.numpy() - MEAN[:, None, None]) / STD[:, None, None]


# --- parity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (224, 224), (90, 70), (300, 40), (1, 1)])
def test_crops_equal_the_plain_chain_bit_for_bit(width, height):
    image, recipe = make_image(width, height), ViewRecipe(views=12)
    views = make_views(image, "some/image", recipe)
    assert views.shape == (12, 3, 224, 224)
    assert views.dtype == torch.uint8
    assert views.is_contiguous()
    assert np.array_equal(views[0].numpy(), np.asarray(naive_weak(image, 224)).transpose(2, 0, 1))
    draws = draw_views(width, height, "some/image", recipe)
    assert len(draws) == 11
    for view, draw in zip(views[1:], draws, strict=True):
        assert np.array_equal(view.numpy(), np.asarray(naive_crop(image, draw, 224)).transpose(2, 0, 1))


@pytest.mark.parametrize("severity", [1.0, 3.0, 10.0])
def test_augmix_equals_the_mixture_in_normalised_space(severity):
    image, recipe = make_image(160, 120), ViewRecipe(views=40, size=96, augmix=True, severity=severity)
    views = make_views(image, "7", recipe)
    assert views.shape == (40, 3, 96, 96)
    assert views.dtype == torch.float32
    assert views.min() >= 0
    assert views.max() <= 1
    ours = normalised(views)
    np.testing.assert_allclose(ours[0], naive_normalised(naive_weak(image, 96)), atol=1e-5, rtol=0)
    draws = draw_views(160, 120, "7", recipe)
    assert {operation.name for draw in draws for chain in draw.chains for operation in chain} == OPERATIONS
    for view, draw in zip(ours[1:], draws, strict=True):
        np.testing.assert_allclose(view, naive_augmix(image, draw, 96), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", [0.1, 0.5, 1.0, 7.3, 9.99])
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation_alone(name, level, sign):
    image = make_image(64, 64)
    operation = Operation(name, level, sign)
    draw = ViewDraw((0, 0, 64, 64), False, ((operation,),), (1.0,), 0.0)
    expected = np.asarray(naive_operation(image, operation, 64)).transpose(2, 0, 1)
    assert np.array_equal(np.rint(apply_view(image, draw, 64) * 255), expected)


@pytest.mark.parametrize(
    ("name", "level", "changed"),
    [
        ("posterize", 0.999, lambda a: a & 0xF0),  # always 4 bits at severity 1
        ("solarize", 1.0, lambda a: np.where(a < 231, a, 255 - a)),
        ("solarize", 0.1, lambda a: np.where(a < 254, a, 255 - a)),
        ("rotate", 0.33, lambda a: a),  # less than one degree
        ("translate_x", 0.99, lambda a: np.pad(a[:, 7:], ((0, 0), (0, 7), (0, 0)))),
        ("translate_y", 0.99, lambda a: np.pad(a[7:], ((0, 7), (0, 0), (0, 0)))),
    ],
)
def test_operations_at_severity_one_have_the_numbers_of_the_spec(name, level, changed):
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    draw = ViewDraw((0, 0, 224, 224), False, ((Operation(name, level, 1),),), (1.0,), 0.0)
    view = apply_view(Image.fromarray(pixels), draw, 224)
    assert np.array_equal(np.rint(view * 255), changed(pixels).transpose(2, 0, 1))


def test_the_mixture_has_the_drawn_proportions():
    image = Image.new("RGB", (8, 8), (200, 100, 250))
    box = (0, 0, 8, 8)
    posterize, solarize = Operation("posterize", 1.0, 1), Operation("solarize", 1.0, 1)
    draw = ViewDraw(box, False, ((posterize,), (solarize,), (posterize, solarize)), (0.5, 0.25, 0.25), 0.2)
    # posterised (192, 96, 240); solarised (200, 100, 5); both (192, 96, 15)
    expected = [
        0.2 * 200 + 0.8 * (0.5 * 192 + 0.25 * 200 + 0.25 * 192),
        0.2 * 100 + 0.8 * (0.5 * 96 + 0.25 * 100 + 0.25 * 96),
        0.2 * 250 + 0.8 * (0.5 * 240 + 0.25 * 5 + 0.25 * 15),
    ]
    assert apply_view(image, draw, 8)[:, 0, 0] * 255 == pytest.approx(expected, abs=1e-3)


@settings(max_examples=150, deadline=None)
@given(width=st.integers(1, 330), height=st.integers(1, 330), size=st.sampled_from([1, 7, 32, 33]))
def test_weak_view_equals_the_plain_chain(width, height, size):
    # Longer shapes are cut to their middle first, see below.
    width, height = min(width, 100 * height), min(height, 100 * width)
    image = make_image(width, height)
    result = weak_view(image, size)
    assert result.size == (size, size)
    assert np.array_equal(np.asarray(result), np.asarray(naive_weak(image, size)))


@pytest.mark.parametrize(("width", "height"), [(90, 61), (61, 90), (20, 20), (3, 400), (400, 1)])
def test_weak_views_of_models_that_were_trained_otherwise(width, height):
    image = make_image(width, height)
    squashed = weak_view(image, 33, "squash", "bilinear")
    expected = image.resize((33, height), Image.BILINEAR).resize((33, 33), Image.BILINEAR)
    assert np.array_equal(squashed, expected)
    across, down = (max(1, round(33 * side / max(width, height))) for side in (width, height))
    small = image.resize((across, height), Image.BICUBIC).resize((across, down), Image.BICUBIC)
    framed = Image.new("RGB", (33, 33))
    framed.paste(small, ((33 - small.width) // 2, (33 - small.height) // 2))
    assert np.array_equal(weak_view(image, 33, "longest"), framed)


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 200), augmix=st.booleans(), seed=st.integers(0, 10**6))
def test_any_size_gives_views_within_the_image(width, height, augmix, seed):
    recipe = ViewRecipe(views=5, size=16, augmix=augmix, seed=seed)
    for draw in draw_views(width, height, "x", recipe):
        left, top, right, bottom = draw.box
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
    assert make_views(make_image(width, height), "x", recipe).shape == (5, 3, 16, 16)


@pytest.mark.parametrize("augmix", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 5000), (5000, 1), (2, 5000), (5000, 3)])
def test_extreme_shapes(width, height, augmix):
    """Brightness grows along the image, so that what is seen tells where it comes from: the middle."""
    along = np.linspace(0, 255, max(width, height))
    grey = np.broadcast_to(along if width >= height else along[:, None], (height, width)).astype(np.uint8)
    image = Image.fromarray(grey).convert("RGB")
    recipe = ViewRecipe(views=6, size=224, augmix=augmix)
    views = make_views(image, "x", recipe)
    assert views.shape == (6, 3, 224, 224)
    if max(width, height) > 1:
        weak = views[0].float() * (255 if augmix else 1)
        assert abs(weak.mean().item() - 127.5) < 1.5
        for draw in draw_views(width, height, "x", recipe):
            left, top, right, bottom = draw.box
            assert max(right - left, bottom - top) <= 4  # the fall-back: a crop of nearly square shape ...
            assert abs((left + right) - width) <= 1  # ... in the middle
            assert abs((top + bottom) - height) <= 1


def test_only_rgb():
    with pytest.raises(ValueError, match=r"RGB images, not of mode L; see images\.open_image"):
        make_views(Image.new("L", (9, 9)), "x", ViewRecipe())


# --- draws ---------------------------------------------------------------------------------------------------------


PINNED_BOXES = [
    ((59, 40, 350, 328), True),
    ((77, 33, 471, 368), True),
    ((39, 3, 492, 350), False),
    ((237, 21, 391, 198), False),
]
PINNED_AUGMIX_BOX = (29, 79, 386, 369)
PINNED_WEIGHTS = (0.6654941, 0.144209, 0.1902968)
PINNED_M = 0.1349936
PINNED_CHAINS = [
    [("translate_y", 0.880788, -1), ("autocontrast", 0.123804, 1)],
    [("translate_x", 0.230159, -1), ("equalize", 0.993123, 1)],
    [("translate_y", 0.650907, -1)],
]


def test_draws_are_pinned():
    """A change of keying or of the order of draws gives everybody other views: it must raise `_KEY_VERSION`."""
    draws = draw_views(500, 375, "n01440764/ILSVRC2012_val_00000293.JPEG", ViewRecipe(views=5))
    assert [(draw.box, draw.flip) for draw in draws] == PINNED_BOXES
    draw = draw_views(500, 375, "cat", ViewRecipe(views=2, seed=3, augmix=True))[0]
    assert draw.box == PINNED_AUGMIX_BOX
    assert draw.weights == pytest.approx(PINNED_WEIGHTS, abs=1e-6)
    assert draw.m == pytest.approx(PINNED_M, abs=1e-6)
    assert [[(o.name, round(o.level, 6), o.sign) for o in chain] for chain in draw.chains] == PINNED_CHAINS


def test_views_do_not_depend_on_how_many_or_in_which_order():
    a, b = make_image(80, 60), make_image(50, 90, seed=1)
    for augmix in (False, True):
        few, many = (ViewRecipe(views=n, size=32, augmix=augmix) for n in (4, 16))
        a_many, b_many = make_views(a, "a", many), make_views(b, "b", many)
        b_again, a_few = make_views(b, "b", many), make_views(a, "a", few)
        assert torch.equal(b_many, b_again)
        assert torch.equal(a_few, a_many[:4])


@pytest.mark.parametrize("augmix", [False, True])
def test_views_do_not_depend_on_the_number_of_threads(augmix: bool, tmp_path: Path) -> None:
    make_image(80, 60).save(tmp_path / "a.png")
    recipe = ViewRecipe(views=9, size=32, augmix=augmix)
    expected = make_views(make_image(80, 60), "a", recipe)
    for threads in (2, 12):
        with Image.open(tmp_path / "a.png") as not_read_yet:
            assert torch.equal(make_views(not_read_yet, "a", recipe, threads=threads), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_a_thread_is_an_error(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for a view")

    monkeypatch.setattr("usetta.views.make.mix", fail)
    with pytest.raises(MemoryError, match="no room for a view"):
        make_views(make_image(8, 8), "a", ViewRecipe(views=9, size=8, augmix=True), threads=threads)


def random_of(seed: int, image_id: str, view: int) -> ViewRandom:
    random = ViewRandom()
    random.set_to(seed, image_id, view)
    return random


def test_random_numbers_are_those_of_numpys_generator_with_the_key_of_the_view() -> None:
    ours = random_of(-3, "a/b.jpg", 7)
    key = hashlib.blake2b(b"-3\x007\0a/b.jpg", digest_size=16).digest()
    numpys = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    for sizes in np.random.default_rng(0).integers(1, 1000, (500, 3)).tolist():
        for low, high in ((0.0, 1.0), (0.08, 1.0), (math.log(3 / 4), math.log(4 / 3))):
            assert ours.uniform(low, high) == numpys.uniform(low, high)
        for n in (*sizes, 1, 9, 3_000_000_000):  # the last takes another try in 3 of 10 cases
            assert ours.below(n) == numpys.integers(n)
        weights, m = ours.mixing_weights()
        assert (list(weights), m) == (numpys.dirichlet((1.0, 1.0, 1.0)).tolist(), numpys.beta(1.0, 1.0))


@pytest.mark.parametrize("before", [0, 1])
def test_chains_are_those_of_numpys_generator(before: int) -> None:
    """Also where half a word is left over from a number that was drawn before."""
    for view in range(200):
        ours = random_of(0, "x", view)
        key = hashlib.blake2b(f"0\0{view}\0x".encode(), digest_size=16).digest()
        numpys = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        assert [ours.below(5) for _ in range(before)] == [numpys.integers(5) for _ in range(before)]
        for chain in ours.chains(severity=2.0):
            assert len(chain) == numpys.integers(1, 3, endpoint=True)
            for operation in chain:
                assert operation.name == OPERATION_NAMES[numpys.integers(len(OPERATION_NAMES))]
                assert operation.level == numpys.uniform(0.1, 2.0)
                assert operation.sign == (-1 if numpys.random() < 0.5 else 1)


def test_draws_leave_nothing_behind_for_the_next_view() -> None:
    recipe = ViewRecipe(views=60, augmix=True, seed=5)
    alone = [draw_view(random_of(5, "x", view), 90, 70, recipe) for view in range(1, 60)]
    assert draw_views(90, 70, "x", recipe) == alone


def test_global_random_state_is_neither_used_nor_changed():
    image, recipe = make_image(80, 60), ViewRecipe(views=4, size=32, augmix=True)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first = make_views(image, "a", recipe)
    after = np.random.random(), torch.rand(1).item()  # noqa: NPY002
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert after == (np.random.random(), torch.rand(1).item())  # noqa: NPY002
    assert torch.equal(make_views(image, "a", recipe), first)


def test_the_image_is_left_as_it_was():
    image = make_image(80, 60)
    before = image.tobytes()
    make_views(image, "a", ViewRecipe(views=8, size=32, augmix=True))
    assert image.tobytes() == before


def test_seed_image_and_view_each_change_the_draws():
    first = [random_of(seed, name, view).random() for seed in range(4) for name in "abc" for view in range(5)]
    assert len(set(first)) == 60
    # the three parts cannot run into each other
    assert random_of(1, "2", 3).random() != random_of(1, "23", 3).random()
    assert random_of(1, "x", 12).random() != random_of(11, "x", 2).random()
    assert 0 <= random_of(0, "bild_äß\udcff.jpg", 1).random() < 1  # names that are no valid UTF-8 exist


def test_augmix_does_not_change_the_crops():
    plain = draw_views(300, 200, "x", ViewRecipe(views=20))
    mixed = draw_views(300, 200, "x", ViewRecipe(views=20, augmix=True))
    assert [(d.box, d.flip) for d in plain] == [(d.box, d.flip) for d in mixed]
    assert all(not d.chains for d in plain)


def test_crops_are_distributed_as_in_torchvision():
    """Fixed seeds, so these numbers cannot flake; bounds are about four standard deviations."""
    n, recipe = 4000, ViewRecipe(views=1001)
    draws = [draw for image in "abcd" for draw in draw_views(1000, 1000, image, recipe)]
    boxes = np.array([draw.box for draw in draws])
    left, top, right, bottom = boxes.T
    w, h = right - left, bottom - top
    area, ratio = w * h / 1e6, w / h
    assert area.min() >= 0.079
    assert area.max() <= 1.0
    assert ratio.min() >= 0.745
    assert ratio.max() <= 1.342
    # Areas up to 3/4 fit whatever the ratio, so there the density is flat: compare thirds of that range.
    inside = area[area < 0.75]
    thirds = np.histogram(inside, bins=3, range=(0.08, 0.75))[0] / len(inside)
    assert thirds == pytest.approx(1 / 3, abs=0.04)
    assert np.log(ratio).mean() == pytest.approx(0, abs=0.012)
    # the logarithm of the ratio is uniform: standard deviation 2 log(4/3) / √12
    small = area < 0.5
    assert np.log(ratio[small]).std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)
    # the position is uniform over all that fit, both ends included
    slack = 1000 - w
    assert (left[slack > 0] / slack[slack > 0]).mean() == pytest.approx(0.5, abs=0.02)
    assert sum(draw.flip for draw in draws) / n == pytest.approx(0.5, abs=0.032)


def test_positions_include_both_ends():
    recipe = ViewRecipe(views=401, scale=(0.25, 0.25), ratio=(1, 1))
    boxes = [draw.box for draw in draw_views(4, 4, "x", recipe)]  # 2 x 2 pixels of 4 x 4
    counts = Counter((left, top) for left, top, _, _ in boxes)
    assert set(counts) == {(left, top) for left in range(3) for top in range(3)}
    assert max(counts.values()) < 80  # 400 / 9 each


def test_augmix_draws_are_distributed_as_in_the_paper():
    recipe = ViewRecipe(views=1001, augmix=True, severity=1.0)
    draws = [draw for image in "ab" for draw in draw_views(100, 100, image, recipe)]
    weights = np.array([draw.weights for draw in draws])
    assert weights.shape == (2000, 3)
    assert weights.sum(1) == pytest.approx(1, abs=1e-6)
    assert weights.mean(0) == pytest.approx(1 / 3, abs=0.02)
    assert weights.var(0) == pytest.approx(1 / 18, abs=0.006)  # of Dirichlet(1, 1, 1)
    m = np.array([draw.m for draw in draws])
    assert np.histogram(m, bins=4, range=(0, 1))[0] / 2000 == pytest.approx(0.25, abs=0.04)  # Beta(1, 1) is uniform
    chains = [chain for draw in draws for chain in draw.chains]
    assert len(chains) == 6000
    depths = Counter(len(chain) for chain in chains)
    assert sorted(depths) == [1, 2, 3]
    assert [depths[d] / 6000 for d in (1, 2, 3)] == pytest.approx([1 / 3] * 3, abs=0.025)
    operations = [operation for chain in chains for operation in chain]
    names = Counter(operation.name for operation in operations)
    assert set(names) == OPERATIONS
    assert [count / len(operations) for count in names.values()] == pytest.approx([1 / 9] * 9, abs=0.012)
    levels = np.array([operation.level for operation in operations])
    assert levels.min() >= 0.1
    assert levels.max() < 1
    assert levels.mean() == pytest.approx(0.55, abs=0.01)
    assert np.mean([operation.sign for operation in operations]) == pytest.approx(0, abs=0.04)


def test_drawn_weights_are_float32_values():
    draw = draw_view(random_of(0, "x", 1), 50, 50, ViewRecipe(augmix=True))
    assert all(float(np.float32(value)) == value for value in (*draw.weights, draw.m))


@pytest.mark.parametrize(
    ("size", "box"),
    [((100, 1000), (0, 433, 100, 566)), ((1000, 100), (433, 0, 566, 100)), ((1000, 1001), (0, 0, 1000, 1001))],
)
def test_fall_back_is_the_central_crop_with_the_nearest_ratio(size, box):
    """With a scale of one, nothing but the whole image could fit."""
    recipe = ViewRecipe(scale=(1.0, 1.0), views=2)
    assert draw_views(*size, "x", recipe)[0].box == box


# --- the recipe ----------------------------------------------------------------------------------------------------


def test_one_view_is_the_weak_view():
    image = make_image(70, 50)
    views = make_views(image, "x", ViewRecipe(views=1, size=32))
    assert views.shape == (1, 3, 32, 32)
    assert np.array_equal(views[0].numpy(), np.asarray(naive_weak(image, 32)).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"views": 0}, "views must be a number from 1 to 1024"),
        ({"size": 0}, "size must be at least 1"),
        ({"scale": (0.0, 1.0)}, "scale must be"),
        ({"scale": (0.5, 0.2)}, "scale must be"),
        ({"scale": (0.5, 1.2)}, "scale must be"),
        ({"ratio": (0.0, 1.0)}, "ratio must be"),
        ({"ratio": (2.0, 1.0)}, "ratio must be"),
        ({"ratio": (1.0, math.inf)}, "ratio must be"),
        ({"severity": 0.0}, "severity must lie"),
        ({"severity": math.nan}, "severity must lie"),
        ({"resize_mode": "fit"}, "resize_mode must be one of shortest, squash, longest, not 'fit'"),
        ({"interpolation": "nearest"}, "interpolation must be one of bicubic, bilinear, not 'nearest'"),
    ],
)
def test_wrong_settings(setting, message):
    with pytest.raises(ValueError, match=message):
        ViewRecipe(**setting)


def test_key_is_readable_and_pinned():
    assert ViewRecipe().key == "v1_n64_size224_seed0_scale0.08-1.0_ratio0.75-1.3333333333333333_crops"
    assert ViewRecipe(views=8, seed=-2, augmix=True, severity=3).key == (
        "v1_n8_size224_seed-2_scale0.08-1.0_ratio0.75-1.3333333333333333_augmix3.0"
    )


def test_key_tells_recipes_with_different_views_apart():
    base = ViewRecipe(augmix=True)
    changes = {"views": 8, "size": 32, "augmix": False, "seed": 1, "scale": (0.5, 1.0), "ratio": (1, 1), "severity": 2}
    changes |= {"resize_mode": "squash", "interpolation": "bilinear"}
    assert set(changes) == {field.name for field in dataclasses.fields(ViewRecipe)}
    keys = {dataclasses.replace(base, **{name: value}).key for name, value in changes.items()}
    assert len(keys | {base.key}) == len(changes) + 1
    assert ViewRecipe(severity=2).key == ViewRecipe().key  # without AugMix there is nothing to be severe about


def test_views_are_those_of_every_other_machine() -> None:
    assert view_digests() == EXPECTED
