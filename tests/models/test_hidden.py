"""The image tower in two parts: hidden states, and the last blocks from there."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta.models.cached import CachedImages
from usetta.models.clip import CLIP, LoraDelta, LowRank, VisionTransformer
from usetta.models.config import ViTConfig
from usetta.models.towers import TwoTowers


def pixels_for(model: TwoTowers, n: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, 3, model.image_size, model.image_size), dtype=torch.uint8, generator=generator)


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


def test_a_change_is_one_of_the_weights() -> None:
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


def test_half_precision_gives_float32_features() -> None:
    model = disturbed(TINY_VIT).to(torch.bfloat16)
    hidden = model.hidden_states(pixels_for(model, 3))
    assert hidden.dtype == torch.bfloat16
    assert model.last_blocks().encode(hidden).dtype == torch.float32


def test_wrong_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wants pixels of shape \(n, 3, 32, 32\), got \(1, 3, 16, 16\)"):
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


def test_a_model_with_a_cache_passes_the_question_on(tmp_path: object) -> None:
    model = disturbed(TINY_VIT)
    cached = CachedImages(model, tmp_path)  # type: ignore[arg-type]
    pixels = pixels_for(model, 2)
    assert torch.equal(cached.hidden_states(pixels), model.hidden_states(pixels))
    assert isinstance(model, CLIP)
