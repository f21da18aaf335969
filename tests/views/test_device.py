"""Views made by tensor operations are those that Pillow makes, to the bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from usetta.views import Interpolation, ResizeMode, ViewRecipe, make_views
from usetta.views import device as device_views
from usetta.views.device import ViewPlan
from usetta.views.digests import generated_image

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 150),
    height=st.integers(1, 150),
    size=st.sampled_from([1, 2, 31, 32, 64]),
    augmix=st.booleans(),
    severity=st.sampled_from([1.0, 10.0]),
    seed=st.integers(0, 10**6),
    resize_mode=st.sampled_from(["shortest", "squash", "longest"]),
    interpolation=st.sampled_from(["bicubic", "bilinear"]),
)
def test_views_are_those_of_the_host(
    width: int,
    height: int,
    size: int,
    augmix: bool,
    severity: float,
    seed: int,
    resize_mode: ResizeMode,
    interpolation: Interpolation,
) -> None:
    image = generated_image(width, height)
    weak = {"resize_mode": resize_mode, "interpolation": interpolation}
    recipe = ViewRecipe(6, size, augmix, seed, severity=severity, **weak)
    views = ViewPlan(image, "id", recipe).make(CPU)
    expected = make_views(image, "id", recipe)
    assert views.dtype == expected.dtype
    assert torch.equal(views, expected)


@pytest.mark.parametrize(("width", "height"), [(500, 375), (224, 224), (224, 300), (1, 3000), (2500, 9), (1200, 1600)])
@pytest.mark.parametrize("augmix", [False, True])
def test_so_are_views_of_full_size(width: int, height: int, augmix: bool) -> None:
    image, recipe = generated_image(width, height), ViewRecipe(8, augmix=augmix, severity=3.0)
    assert torch.equal(ViewPlan(image, "id", recipe).make(CPU), make_views(image, "id", recipe))


@pytest.mark.parametrize("part", [range(1), range(1, 4), range(4, 12)])
def test_a_part_of_the_views(part: range) -> None:
    image, recipe = generated_image(90, 60), ViewRecipe(12, 32)
    assert torch.equal(ViewPlan(image, "id", recipe, part=part).make(CPU), make_views(image, "id", recipe, part=part))


def test_a_large_image_is_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    image, recipe = generated_image(90, 60), ViewRecipe(12, 32, augmix=True)
    monkeypatch.setattr(device_views, "_MOST_VALUES", 3 * 60 * 32 * 5)
    assert torch.equal(ViewPlan(image, "id", recipe).make(CPU), make_views(image, "id", recipe))


def test_a_view_that_only_pillow_can_make_is_made_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    image, recipe = generated_image(90, 60), ViewRecipe(12, 32, augmix=True)
    expected = make_views(image, "id", recipe)
    monkeypatch.setattr("usetta.views.augmix.lines_of_shears", lambda slopes, size: [None] * len(slopes))
    plan = ViewPlan(image, "id", recipe)
    assert plan._by_host
    assert torch.equal(plan.make(CPU), expected)


def test_without_double_precision_a_rotation_differs_by_one_level_in_few_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = device_views._rotation
    image, recipe = generated_image(500, 375), ViewRecipe(33, augmix=True, severity=10.0)
    monkeypatch.setattr(device_views, "_rotation", lambda *args: exact(*args[:3], False))
    difference = (ViewPlan(image, "id", recipe).make(CPU) - make_views(image, "id", recipe)).abs() * 255
    assert 0 < (difference > 1e-3).float().mean() < 1e-3
    assert difference.max() < 1
