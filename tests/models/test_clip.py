"""The towers: shapes, invariants and the doors that later methods go through."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta.models.base import Model, TextTower
from usetta.models.clip import CLIP, VisionTransformer
from usetta.models.config import ARCHITECTURES, ResNetConfig
from usetta.models.random_weights import random_model

TEXTS = ["a photo of a cat.", "dog", "a very long description of an old stone bridge"]
VIT = disturbed(TINY_VIT)


def pixels_for(model: CLIP, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, 3, model.image_size, model.image_size), dtype=torch.uint8, generator=generator)


def test_meets_the_protocol(tiny: CLIP) -> None:
    assert isinstance(tiny, Model)
    assert isinstance(tiny.text, TextTower)
    assert not tiny.training
    assert not any(parameter.requires_grad for parameter in tiny.parameters())


def test_image_features_are_float32_of_unit_length(tiny: CLIP) -> None:
    features = tiny.encode_images(pixels_for(tiny, 11))
    assert features.shape == (11, 24)
    assert features.dtype == torch.float32
    assert not features.requires_grad
    torch.testing.assert_close(features.norm(dim=1), torch.ones(11))


def test_bytes_and_floats_are_the_same_image(tiny: CLIP) -> None:
    pixels = pixels_for(tiny, 3)
    torch.testing.assert_close(tiny.encode_images(pixels), tiny.encode_images(pixels / 255), atol=1e-6, rtol=0)


def test_images_do_not_depend_on_their_batch(tiny: CLIP) -> None:
    pixels = pixels_for(tiny, 10)
    one_by_one = torch.cat([tiny.encode_images(image[None]) for image in pixels])
    torch.testing.assert_close(tiny.encode_images(pixels), one_by_one, atol=1e-6, rtol=0)
    assert torch.equal(tiny.encode_images(pixels), tiny.encode_images(pixels))


def test_no_images_give_no_features(tiny_vit: CLIP) -> None:
    assert tiny_vit.encode_images(pixels_for(tiny_vit, 0)).shape == (0, 24)


def test_features_can_take_part_in_a_backward_pass(tiny_vit: CLIP) -> None:
    features = tiny_vit.encode_images(pixels_for(tiny_vit, 2))
    shift = torch.zeros(24, requires_grad=True)
    (features @ (shift + 1)).sum().backward()
    torch.testing.assert_close(shift.grad, features.sum(0))


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(1, 3, 16, 16), r"tiny wants pixels of shape \(n, 3, 32, 32\), got \(1, 3, 16, 16\)"),
        (torch.zeros(3, 32, 32), r"got \(3, 32, 32\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "wants pixels as uint8 or float, got torch.int64"),
    ],
)
def test_wrong_pixels_are_refused(tiny_vit: CLIP, pixels: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_vit.encode_images(pixels)


@settings(max_examples=8, deadline=None)
@given(length=st.integers(20, 77), tail=st.integers(0, 49405))
def test_nothing_after_the_end_of_a_text_matters(length: int, tail: int) -> None:
    ids = VIT.text.tokenize(TEXTS)
    whole = VIT.text.encode(VIT.text.embed(ids), ids)
    shorter = ids[:, :length].clone()
    shorter[:, 19:] = tail
    torch.testing.assert_close(VIT.text.encode(VIT.text.embed(shorter), shorter), whole, atol=1e-6, rtol=0)


def test_text_features_differentiate_in_the_embeddings(tiny_vit: CLIP) -> None:
    tower = tiny_vit.text
    ids = tower.tokenize(["a photo of a cat."])[:, :9]
    embeddings = tower.embed(ids).double().requires_grad_()
    tiny_vit.double()
    features = tower.encode(embeddings, ids)
    assert features.dtype == torch.float64
    direction = torch.ones_like(features)
    (gradient,) = torch.autograd.grad((features * direction).sum(), embeddings)
    with torch.no_grad():
        step = 1e-3 * gradient / gradient.norm()
        ahead, behind = (tower.encode(embeddings + sign * step, ids).double().sum() for sign in (1, -1))
    assert ((ahead - behind) / 2).item() == pytest.approx((gradient * step).sum().item(), rel=1e-3)
    assert gradient[:, 8:].abs().max() == 0, "padding after the end must get no gradient"
    assert gradient[:, 1:5].abs().min() > 0


def test_the_image_tower_can_be_run_in_parts(tiny_vit: CLIP) -> None:
    tower = tiny_vit.image_tower
    assert isinstance(tower, VisionTransformer)
    pixels = tiny_vit.normalize(pixels_for(tiny_vit, 2))
    hidden = tower.embed_patches(pixels)
    assert hidden.shape == (2, 17, 48)
    for block in tower.blocks:
        hidden = block(hidden)
    torch.testing.assert_close(tower.pool(hidden), tower(pixels), atol=1e-6, rtol=1e-5)


def test_the_activation_matters() -> None:
    gelu = CLIP.from_state(replace(TINY_VIT, activation="gelu"), VIT.state_dict(), name="gelu")
    pixels = pixels_for(VIT, 2)
    assert (gelu.encode_images(pixels) - VIT.encode_images(pixels)).abs().max() > 1e-4


def test_fingerprint_is_of_weights_and_configuration() -> None:
    model, same, other = (random_model(TINY_VIT, name=name, seed=seed) for name, seed in [("a", 0), ("b", 0), ("a", 1)])
    assert model.fingerprint == same.fingerprint != other.fingerprint
    gelu = random_model(replace(TINY_VIT, activation="gelu"), name="a", seed=0)
    assert gelu.fingerprint != model.fingerprint
    warmer = CLIP.from_state(TINY_VIT, model.state_dict(), name="a", logit_scale=50.0)
    assert warmer.fingerprint != model.fingerprint
    before = model.fingerprint
    assert model.to(torch.bfloat16).fingerprint != before


def test_half_precision_weights_give_float32_features_and_an_exact_scale(tiny: CLIP) -> None:
    pixels = pixels_for(tiny, 2)
    exact = tiny.encode_images(pixels)
    rounded = tiny.to(torch.bfloat16).encode_images(pixels)
    assert rounded.dtype == torch.float32
    assert tiny.logit_scale == math.exp(4.25)
    assert (exact * rounded).sum(1).min() > 0.99


@pytest.mark.parametrize("config", [TINY_VIT, TINY_RESNET], ids=["vit", "resnet"])
def test_random_weights_tell_inputs_apart(config: object) -> None:
    model = random_model(config, name="tiny")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(6, 3, 4, 4, generator=generator)
    size = model.image_size
    features = model.encode_images(torch.nn.functional.interpolate(coarse, size=(size, size)))
    ids = model.text.tokenize(TEXTS)
    for rows in (features, model.text.encode(model.text.embed(ids), ids)):
        assert rows.isfinite().all()
        assert torch.linalg.matrix_rank(rows) == len(rows)
        assert (rows @ rows.T - torch.eye(len(rows))).max() < 0.999
    assert model.is_random


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_named_architectures_have_the_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = CLIP(ARCHITECTURES[name], name=name)
    # Parameters in millions, as counted in the published models (with the logit scale, without buffers).
    published = {
        "ViT-B-32": 151.277313,
        "ViT-B-16": 149.620737,
        "ViT-L-14": 427.616513,
        "ViT-L-14-336": 427.944193,
        "RN50": 102.007137,
        "RN101": 119.688033,
    }
    count = sum(parameter.numel() for parameter in model.parameters()) + 1
    assert count / 1e6 == pytest.approx(published[name], abs=1e-6)
    if isinstance(model.config.vision, ResNetConfig):
        assert model.config.vision.pool_width // model.config.vision.heads == 64
