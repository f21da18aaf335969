"""Precisions of the image tower."""

import copy
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta import Classifier
from usetta.models import ModelError, load_model
from usetta.models.base import encode_views, encode_views_together
from usetta.models.clip import CLIP, VisionTransformer, random_model
from usetta.models.config import ARCHITECTURES, CLIPConfig, ViTConfig
from usetta.models.int8 import Int8Blocks, Int8Linear, rotation, round_rows, scale_rows
from usetta.models.onednn import pack_blocks
from usetta.models.precision import computes_in_bf16, prepare, resolve_device, resolve_precision
from usetta.models.towers import TwoTowers


def pixels_for(model: CLIP, n: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, 3, model.image_size, model.image_size), dtype=torch.uint8, generator=generator)


def cosines(config: CLIPConfig, precision: str, outlier: float = 1.0) -> Tensor:
    """Of features in fp32 and in another precision, one channel of the stream being `outlier` times as large."""
    model = disturbed(config)
    assert isinstance(model.image_tower, VisionTransformer)
    model.image_tower.class_embedding.data[5] *= outlier
    model.image_tower.positional_embedding.data[:, 5] *= outlier
    model.image_tower.ln_pre.weight.data[5] *= outlier
    before = model.encode_images(pixels_for(model))
    prepare(model, precision)
    return (before * (model.encode_crops or model.encode_images)(pixels_for(model))).sum(dim=1)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_int8_is_close_to_fp32(activation: str) -> None:
    config = replace(TINY_VIT, activation=activation)  # type: ignore[arg-type]
    assert cosines(config, "int8").min() > 0.9995


def test_bf16_is_close_to_fp32() -> None:
    assert cosines(TINY_VIT, "bf16").min() > 0.9995


@pytest.mark.skipif(not computes_in_bf16(), reason="this processor has no bf16 instructions")
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_packed_blocks_are_the_blocks(activation: str) -> None:
    """They round less often than PyTorch's linear layers in bf16, so they are at least as close to fp32."""
    config = replace(TINY_VIT, activation=activation)  # type: ignore[arg-type]
    assert isinstance(config.vision, ViTConfig)
    tower = VisionTransformer(config, config.vision).requires_grad_(False)
    for parameter in tower.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 8)
    hidden = torch.randn(3, config.vision.tokens, config.vision.width, generator=torch.Generator().manual_seed(0))
    exact = tower.blocks[0](hidden)
    tower.to(torch.bfloat16)
    plain = tower.blocks[0](hidden.bfloat16()).float()
    keys = list(tower.state_dict())
    pack_blocks(tower)
    packed = copy.deepcopy(tower).blocks[0](hidden.bfloat16()).float()
    assert list(tower.state_dict()) == keys
    assert torch.equal(tower.blocks[0](hidden.bfloat16()).float(), packed)
    assert not torch.equal(packed, plain)
    assert (packed - exact).square().mean() <= (plain - exact).square().mean()
    torch.testing.assert_close(tower.float().blocks[0](hidden), exact, atol=0.1, rtol=0)


def test_an_outlier_in_the_stream_does_no_harm() -> None:
    assert cosines(TINY_VIT, "int8", outlier=30.0).min() > 0.9995


@pytest.mark.parametrize("width", [4, 48, 64, 320, 768, 1024])
def test_rotation_is_orthogonal_and_flat(width: int) -> None:
    turn = rotation(width)
    torch.testing.assert_close(turn @ turn.T, torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    assert turn.abs().max() * width**0.5 < 1.5


def linear(weight: Tensor, bias: Tensor, x: Tensor, lowest: float | None = None) -> Tensor:
    """x @ weight.T + bias with 8-bit levels."""
    layer = Int8Linear(weight, bias, lowest)
    if lowest is None:
        levels, step = round_rows(x)
    else:
        step = (x.amax(dim=1, keepdim=True) - lowest) / 255
        levels = ((x - lowest) / step + 0.5).to(torch.uint8)
    return scale_rows(layer(levels), step, layer.bias)


@pytest.mark.parametrize("lowest", [None, -0.27847])
def test_a_linear_layer_errs_by_its_levels_only(lowest: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = whole_weights(24, 40, generator).double()  # so that the weights themselves are exact
    bias = torch.randn(24, generator=generator, dtype=torch.float64)
    x = torch.randn(50, 40, generator=generator)
    if lowest is not None:
        x = x.clamp(min=lowest)
    exact = x.double() @ weight.T + bias
    step = (x.amax(dim=1) - lowest) / 255 if lowest is not None else x.abs().amax(dim=1) / 127
    worst = 0.5001 * step.double()[:, None] * weight.abs().sum(dim=1)
    assert ((linear(weight, bias, x, lowest) - exact).abs() <= worst + 1e-4).all()


def whole_weights(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Whole numbers that need a scale of 1: neighbours of one sign have a sum of at most 127, which is reached."""
    weight = torch.randint(-127, 128, (rows, width), generator=generator)
    even, odd = weight[:, ::2], weight[:, 1::2]
    odd[:] = torch.where(even * odd > 0, odd.sign() * torch.minimum(odd.abs(), 127 - even.abs()), odd)
    weight[:, :2] = torch.tensor([-100, -27])
    return weight


@pytest.mark.parametrize("extreme", [False, True])
def test_sums_are_exact(extreme: bool) -> None:
    """Processors without VNNI add neighbouring products in 16 bits, and would silently cut off what does not fit."""
    generator = torch.Generator().manual_seed(1)
    weight = whole_weights(32, 768, generator)
    levels = torch.randint(0, 256, (50, 768), generator=generator)
    if extreme:
        levels = 255 * (levels > 127)
        levels[0], levels[1] = 255, 0
    layer = Int8Linear(weight.double(), torch.zeros(32, dtype=torch.float64))
    assert torch.equal(layer.weight.long(), weight)
    assert torch.equal(layer(levels.to(torch.uint8)).long(), (levels - 128) @ weight.T)


def test_a_token_of_zeros_is_no_division_by_zero() -> None:
    bias = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert linear(torch.ones(2, 3, dtype=torch.float64), bias, torch.zeros(1, 3)).tolist() == [[1.0, -2.0]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch needs a C++ compiler for this")
def test_a_compiled_tower_gives_the_same_features() -> None:
    assert isinstance(TINY_VIT.vision, ViTConfig)
    model = disturbed(replace(TINY_VIT, vision=replace(TINY_VIT.vision, layers=1)))  # each layer is compiled anew
    pixels = pixels_for(model, 2)
    eager = model.encode_images(pixels)
    prepare(model, compiled=True)
    torch.testing.assert_close(model.encode_images(pixels), eager, atol=1e-5, rtol=0)


def test_int8_features_do_not_depend_on_the_batch() -> None:
    model = disturbed(TINY_VIT)
    prepare(model, "int8")
    assert model.encode_crops is not None
    pixels = pixels_for(model, 6)
    together = model.encode_crops(pixels)
    alone = torch.cat([model.encode_crops(crop[None]) for crop in pixels])
    torch.testing.assert_close(together, alone, atol=2e-3, rtol=0)
    assert (together * alone).sum(dim=1).min() > 0.99999


def test_int8_is_for_crops_only() -> None:
    model = disturbed(TINY_VIT)
    pixels = pixels_for(model)
    exact = model.encode_images(pixels)
    prepare(model, "int8")
    assert isinstance(model.int8_blocks, Int8Blocks)
    weights = [tensor for tensor in model.state_dict().values() if tensor.dtype == torch.int8]
    assert len(weights) == 4 * len(model.int8_blocks.blocks)
    assert model.encode_crops is not None
    rough = model.encode_crops(pixels)
    assert not torch.allclose(rough, exact, atol=1e-4, rtol=0)
    assert torch.equal(model.encode_images(pixels), exact)
    torch.testing.assert_close(encode_views(model, pixels), torch.cat([exact[:1], rough[1:]]), atol=2e-3, rtol=0)
    assert torch.equal(encode_views(model, pixels, weak=0), rough)  # a later stage of adaptive views
    together = encode_views_together(model, [pixels[:3], pixels[3:]])
    torch.testing.assert_close(torch.stack([features[0] for features in together]), exact[[0, 3]])


def test_text_stays_as_it_is() -> None:
    for precision in ("bf16", "int8"):
        model = disturbed(TINY_VIT)
        ids = model.text.tokenize(["a photo of a cat."])
        before = model.text.encode(model.text.embed(ids), ids)
        prepare(model, precision)
        assert torch.equal(model.text.encode(model.text.embed(ids), ids), before)
        assert model.encode_images(pixels_for(model)).dtype == torch.float32


def test_fingerprints_of_precisions_differ() -> None:
    fingerprints = set()
    for precision in ("fp32", "bf16", "int8"):
        model = disturbed(TINY_VIT)
        assert model.fingerprint  # which must not outlast the change
        prepare(model, precision)
        assert model.precision == precision
        fingerprints.add(model.fingerprint)
    assert len(fingerprints) == 3


def test_int8_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ModelError, match="int8 works only with CLIP's vision transformers"):
        prepare(disturbed(TINY_RESNET), "int8")
    model = disturbed(TINY_VIT)
    prepare(model, "int8")
    with pytest.raises(ValueError, match="TTL tunes the image encoder, which is not possible in int8"):
        Classifier(["cat", "dog"], model, "ttl")
    with pytest.raises(ModelError, match="int8 cannot be combined with --compile"):
        prepare(disturbed(TINY_VIT), "int8", compiled=True)


def test_fp16_is_for_gpus() -> None:
    with pytest.raises(ModelError, match="fp16 needs a GPU"):
        prepare(disturbed(TINY_VIT), "fp16")


def test_unknown_precision() -> None:
    with pytest.raises(ValueError, match="unknown precision 'fp8'; known: auto, fp32, bf16, fp16, int8"):
        load_model("ViT-B-16", weights="random", precision="fp8")


def test_slow_bf16_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for supported in (True, False):
        monkeypatch.setattr("usetta.models.precision.computes_in_bf16", lambda s=supported: s)
        with caplog.at_level(logging.WARNING, logger="usetta"):
            prepare(disturbed(TINY_VIT), "bf16")
        assert ("no bf16 instructions" in caplog.text) is not supported


def test_only_a_pytorch_with_onednn_can_have_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda s=supported: s, raising=False)
        assert computes_in_bf16() is supported
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not computes_in_bf16()


def test_compiling_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(type(self)))
    prepare(disturbed(TINY_VIT), compiled=True)
    assert compiled == [VisionTransformer]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("No working C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", lambda _: fail)
    with pytest.raises(ModelError, match=r"cannot compile on this machine, .* \(No working C\+\+ compiler\)$"):
        prepare(disturbed(TINY_VIT), compiled=True)


def test_a_model_of_ones_own_is_left_alone() -> None:
    class Own:
        name = "own"

    for precision in ("fp32", "auto"):
        prepare(Own(), precision)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="own has its own image encoder"):
        prepare(Own(), "bf16")  # type: ignore[arg-type]


# The device and precision that "auto" stands for


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that this machine has such a GPU or CPU."""

    def pretend(*, cuda: bool = False, mps: bool = False, bf16: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr("usetta.models.precision.computes_in_bf16", lambda: bf16)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "bf16", "device", "precision"),
    [
        (True, True, True, "cuda", "fp16"),
        (True, False, False, "cuda", "fp16"),
        (False, True, True, "mps", "fp32"),
        (False, False, True, "cpu", "bf16"),
        (False, False, False, "cpu", "fp32"),
    ],
)
def test_auto(machine: Callable[..., None], cuda: bool, mps: bool, bf16: bool, device: str, precision: str) -> None:
    machine(cuda=cuda, mps=mps, bf16=bf16)
    assert resolve_device("auto") == resolve_device(None) == torch.device(device)
    assert resolve_precision("auto", torch.device(device)) == precision
    for chosen in ("fp32", "bf16", "int8"):
        assert resolve_precision(chosen, torch.device(device)) == chosen


def test_a_device_that_was_named_is_taken_or_refused(machine: Callable[..., None]) -> None:
    machine(cuda=True)
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ModelError, match="this machine has no device 'xpu:99': "):
        resolve_device("xpu:99")
    with pytest.raises(ValueError, match="unknown precision 'half'"):
        resolve_precision("half", torch.device("cpu"))


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_model_shows_what_auto_chose(
    machine: Callable[..., None], tiny_checkpoint: Path, bf16: bool, precision: str
) -> None:
    machine(bf16=bf16)
    model = load_model(str(tiny_checkpoint))
    assert isinstance(model, CLIP)
    assert (model.device, model.precision) == (torch.device("cpu"), precision)
    assert model.text.token_embedding.weight.dtype == torch.float32


def test_auto_leaves_other_image_towers_in_fp32(machine: Callable[..., None]) -> None:
    class Adapter(TwoTowers):
        def image_features(self, pixels: Tensor) -> Tensor:
            features: Tensor = self.image_tower(pixels.mean(dim=(2, 3)))
            return features

        def describe(self) -> str:
            return "adapter"

    machine(bf16=True)
    half = (0.5, 0.5, 0.5)
    model = Adapter(name="adapter", embed_dim=2, image_size=8, mean=half, std=half, logit_scale=1.0)
    model.image_tower = nn.Linear(3, 2)
    prepare(model, "auto")  # type: ignore[arg-type]
    assert model.precision == "fp32"
    prepare(model, "bf16")  # type: ignore[arg-type]
    assert model.precision == "bf16"


@pytest.mark.slow
def test_a_tower_of_full_width_agrees() -> None:
    config = ARCHITECTURES["ViT-B-32"]
    model = random_model(
        replace(config, vision=replace(config.vision, layers=4), text=TINY_VIT.text), name="full width"
    )
    pixels = pixels_for(model, 2)
    exact = model.encode_images(pixels)
    prepare(model, "int8")
    assert model.encode_crops is not None
    assert (exact * model.encode_crops(pixels)).sum(dim=1).min() > 0.999
