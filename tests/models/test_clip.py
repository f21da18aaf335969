"""The towers: shapes, invariants and the parts that test-time methods reach into."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta.models.base import Model, TextTower
from usetta.models.clip import CLIP, LoraDelta, LowRank, VisionTransformer, random_model
from usetta.models.config import ARCHITECTURES, ResNetConfig, ViTConfig
from usetta.models.towers import TwoTowers

TEXTS = ["a photo of a cat.", "dog", "a very long description of an old stone bridge"]
VIT = disturbed(TINY_VIT)


def pixels_for(model: TwoTowers, n: int) -> Tensor:
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
        (torch.zeros(1, 3, 16, 16), r"tiny expects pixels of shape \(n, 3, 32, 32\), got \(1, 3, 16, 16\)"),
        (torch.zeros(3, 32, 32), r"got \(3, 32, 32\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "expects pixels as uint8 or float, got torch.int64"),
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


def test_the_fingerprint_of_the_image_tower_outlives_a_change_of_the_text_tower() -> None:
    model = random_model(TINY_VIT, name="a")
    changed = {
        "text": {key: value + key.startswith("text_tower.") for key, value in model.state_dict().items()},
        "images": {key: value + key.startswith("image_tower.") for key, value in model.state_dict().items()},
    }
    other_text = CLIP.from_state(TINY_VIT, changed["text"], name="a", logit_scale=50.0)
    assert other_text.fingerprint != model.fingerprint
    assert other_text.image_fingerprint == model.image_fingerprint
    for config, state in ((TINY_VIT, changed["images"]), (replace(TINY_VIT, activation="gelu"), model.state_dict())):
        other_images = CLIP.from_state(config, state, name="a", logit_scale=model.logit_scale)
        assert other_images.image_fingerprint != model.image_fingerprint
    before = model.image_fingerprint
    assert model.to(torch.bfloat16).image_fingerprint != before


def test_half_precision_weights_give_float32_features_and_an_exact_scale(tiny: CLIP) -> None:
    pixels = pixels_for(tiny, 2)
    exact = tiny.encode_images(pixels)
    rounded = tiny.to(torch.bfloat16).encode_images(pixels)
    assert rounded.dtype == torch.float32
    assert tiny.logit_scale == math.exp(4.25)
    assert (exact * rounded).sum(1).min() > 0.99


@pytest.mark.parametrize("config", [TINY_VIT, TINY_RESNET], ids=["vit", "resnet"])
def test_random_weights_separate_inputs(config: object) -> None:
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


# The image tower in two parts: hidden states, and the last blocks from there


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_the_two_parts_are_the_tower(layers: int) -> None:
    assert isinstance(TINY_VIT.vision, ViTConfig)
    model = disturbed(replace(TINY_VIT, vision=replace(TINY_VIT.vision, layers=layers)))
    pixels = pixels_for(model, 11)
    hidden = model.hidden_states(pixels)
    assert hidden.shape == (11, 17, 48)
    assert not hidden.requires_grad
    assert len(model.last_blocks()) == min(3, layers)
    assert torch.equal(model.last_blocks().encode(hidden), model.encode_images(pixels))  # to the last bit


def test_the_last_block_without_its_other_tokens_is_exact() -> None:
    model = disturbed(TINY_VIT).double()
    tower, hidden = model.image_tower, model.hidden_states(pixels_for(model, 4))
    assert isinstance(tower, VisionTransformer)
    whole = hidden
    for block in tower.blocks[-3:]:
        whole = block(whole)
    features = model.last_blocks()(hidden)
    assert features.dtype == torch.float64
    expected = tower.pool(whole)
    torch.testing.assert_close(features, expected / expected.norm(dim=1, keepdim=True), atol=1e-13, rtol=0)


def test_a_lora_delta_is_a_change_of_the_weights() -> None:
    model = disturbed(TINY_VIT).double()
    hidden = model.hidden_states(pixels_for(model, 3))
    generator = torch.Generator().manual_seed(0)

    def low_rank() -> LowRank:
        down, up = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((48, 2), (2, 48)))
        return LowRank(0.1 * down, 0.1 * up)

    changes = [LoraDelta(low_rank(), low_rank()) for _ in range(3)]
    changed = model.last_blocks()(hidden, changes)
    assert (changed - model.last_blocks()(hidden)).abs().max() > 1e-3
    assert isinstance(model.image_tower, VisionTransformer)
    for block, change in zip(model.image_tower.blocks, changes, strict=True):
        weight = block.attention.qkv.weight  # type: ignore[union-attr]
        weight[:48] += (change.queries.down @ change.queries.up).T  # type: ignore[index, operator]
        weight[96:] += (change.values.down @ change.values.up).T  # type: ignore[index, operator]
    torch.testing.assert_close(changed, model.last_blocks()(hidden), atol=1e-12, rtol=0)


def test_views_do_not_depend_on_how_they_are_split() -> None:
    model = disturbed(TINY_VIT)
    pixels = pixels_for(model, 10)
    one_by_one = torch.cat([model.hidden_states(image[None]) for image in pixels])
    torch.testing.assert_close(model.hidden_states(pixels), one_by_one, atol=1e-5, rtol=0)
    assert model.hidden_states(pixels[:0]).shape == (0, 17, 48)
    assert model.last_blocks().encode(model.hidden_states(pixels[:0])).shape == (0, 24)


def test_last_blocks_in_half_precision_give_float32_features() -> None:
    model = disturbed(TINY_VIT).to(torch.bfloat16)
    hidden = model.hidden_states(pixels_for(model, 3))
    assert hidden.dtype == torch.bfloat16
    assert model.last_blocks().encode(hidden).dtype == torch.float32


def test_hidden_states_of_wrong_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expects pixels of shape \(n, 3, 32, 32\), got \(1, 3, 16, 16\)"):
        disturbed(TINY_VIT).hidden_states(torch.zeros(1, 3, 16, 16))


class Other(TwoTowers):
    """A model from elsewhere."""

    def image_features(self, pixels: Tensor) -> Tensor:
        return pixels.mean(dim=(2, 3))

    def describe(self) -> str:
        return "other"


def other() -> Other:
    half = (0.5, 0.5, 0.5)
    return Other(name="siglip", embed_dim=3, image_size=8, mean=half, std=half, logit_scale=1.0)


@pytest.mark.parametrize("model", [disturbed(TINY_RESNET), other()], ids=["resnet", "adapter"])
def test_other_towers_say_that_they_have_no_such_blocks(model: TwoTowers) -> None:
    for ask in (lambda: model.hidden_states(torch.zeros(1, 3, 8, 8)), model.last_blocks):
        with pytest.raises(
            ValueError, match=f"the image tower of {model.name} has no attention blocks that can be run"
        ):
            ask()
