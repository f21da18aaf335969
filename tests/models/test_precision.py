"""Precisions of the image tower."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta import Classifier
from usetta.episode import encode, encode_together
from usetta.models import ModelError, load_model
from usetta.models.base import encode_whole_images
from usetta.models.clip import CLIP, VisionTransformer
from usetta.models.config import CLIPConfig
from usetta.models.int8 import Int8VisionTransformer, _Int8Linear, _round, _scale, rotation
from usetta.models.precision import computes_in_bf16, prepare


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
    return (before * model.encode_images(pixels_for(model))).sum(dim=1)


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_int8_is_close_to_fp32(activation: str) -> None:
    config = replace(TINY_VIT, activation=activation)  # type: ignore[arg-type]
    assert cosines(config, "int8").min() > 0.9995


def test_bf16_is_close_to_fp32() -> None:
    assert cosines(TINY_VIT, "bf16").min() > 0.9995


def test_an_outlier_in_the_stream_does_no_harm() -> None:
    assert cosines(TINY_VIT, "int8", outlier=30.0).min() > 0.9995


@pytest.mark.parametrize("width", [4, 48, 64, 320, 768, 1024])
def test_rotation_is_orthogonal_and_flat(width: int) -> None:
    turn = rotation(width)
    torch.testing.assert_close(turn @ turn.T, torch.eye(width, dtype=torch.float64), atol=1e-12, rtol=0)
    assert turn.abs().max() * width**0.5 < 1.5


def linear(weight: Tensor, bias: Tensor, x: Tensor, lowest: float | None = None) -> Tensor:
    """x @ weight.T + bias with 8-bit levels."""
    layer = _Int8Linear(weight, bias, lowest)
    if lowest is None:
        levels, step = _round(x)
    else:
        step = (x.amax(dim=1, keepdim=True) - lowest) / 255
        levels = ((x - lowest) / step + 0.5).to(torch.uint8)
    return _scale(layer(levels), step, layer.bias)


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
    layer = _Int8Linear(weight.double(), torch.zeros(32, dtype=torch.float64))
    assert torch.equal(layer.weight.long(), weight)
    assert torch.equal(layer(levels.to(torch.uint8)).long(), (levels - 128) @ weight.T)


def test_a_token_of_zeros_is_no_division_by_zero() -> None:
    bias = torch.tensor([1.0, -2.0], dtype=torch.float64)
    assert linear(torch.ones(2, 3, dtype=torch.float64), bias, torch.zeros(1, 3)).tolist() == [[1.0, -2.0]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch needs a C++ compiler for this")
def test_a_compiled_tower_says_the_same() -> None:
    model = disturbed(TINY_VIT)
    pixels = pixels_for(model, 10)
    eager = model.encode_images(pixels)
    prepare(model, compiled=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for count in (10, 1, 7):
            torch.testing.assert_close(model.encode_images(pixels[:count]), eager[:count], atol=1e-5, rtol=0)
    finally:
        torch.set_num_threads(threads)


def test_int8_features_do_not_depend_on_company() -> None:
    model = disturbed(TINY_VIT)
    prepare(model, "int8")
    pixels = pixels_for(model, 6)
    together = model.encode_images(pixels)
    alone = torch.cat([model.encode_images(each[None]) for each in pixels])
    torch.testing.assert_close(together, alone, atol=2e-3, rtol=0)
    assert (together * alone).sum(dim=1).min() > 0.99999


def test_int8_is_for_crops_only() -> None:
    model = disturbed(TINY_VIT)
    pixels = pixels_for(model)
    exact = model.encode_images(pixels)
    prepare(model, "int8")
    assert isinstance(model.image_tower, Int8VisionTransformer)
    assert sum(each.dtype == torch.int8 for each in model.state_dict().values()) == 4 * len(model.image_tower.blocks)
    rough = model.encode_images(pixels)
    assert not torch.allclose(rough, exact, atol=1e-4, rtol=0)
    torch.testing.assert_close(encode_whole_images(model, pixels), exact)
    torch.testing.assert_close(encode(model, pixels), torch.cat([exact[:1], rough[1:]]), atol=2e-3, rtol=0)
    together = encode_together(model, [pixels[:3], pixels[3:]])
    torch.testing.assert_close(torch.stack([each[0] for each in together]), exact[[0, 3]])


def test_later_stages_of_adaptive_views_hold_no_image() -> None:
    model = disturbed(TINY_VIT)
    prepare(model, "int8")
    pixels = pixels_for(model)
    torch.testing.assert_close(encode(model, pixels, weak=0), model.encode_images(pixels))


def test_text_stays_as_it_is() -> None:
    for precision in ("bf16", "int8"):
        model = disturbed(TINY_VIT)
        ids = model.text.tokenize(["a photo of a cat."])
        before = model.text.encode(model.text.embed(ids), ids)
        prepare(model, precision)
        assert torch.equal(model.text.encode(model.text.embed(ids), ids), before)
        assert model.encode_images(pixels_for(model)).dtype == torch.float32


def test_fingerprints_tell_precisions_apart() -> None:
    found = []
    for precision in ("fp32", "bf16", "int8"):
        model = disturbed(TINY_VIT)
        assert model.fingerprint  # and does not keep it
        prepare(model, precision)
        assert model.precision == precision
        found.append(model.fingerprint)
    assert len(set(found)) == 3


def test_int8_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ModelError, match="int8 is for CLIP's vision transformers"):
        prepare(disturbed(TINY_RESNET), "int8")
    model = disturbed(TINY_VIT)
    prepare(model, "int8")
    with pytest.raises(ValueError, match="TTL tunes the image tower, which it cannot do in int8"):
        Classifier(["cat", "dog"], model, "ttl")
    with pytest.raises(ModelError, match="int8 is not for torch.compile"):
        prepare(disturbed(TINY_VIT), "int8", compiled=True)


def test_fp16_is_for_gpus() -> None:
    with pytest.raises(ModelError, match="fp16 is for GPUs"):
        prepare(disturbed(TINY_VIT), "fp16")


def test_unknown_precision() -> None:
    with pytest.raises(ValueError, match="unknown precision 'fp8'; known are fp32, bf16, fp16, int8"):
        load_model("ViT-B-16", weights="random", precision="fp8")


def test_slow_bf16_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for supported in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda s=supported: s, raising=False)
        with caplog.at_level(logging.WARNING, logger="usetta"):
            prepare(disturbed(TINY_VIT), "bf16")
        assert ("no instructions for bf16" in caplog.text) is not supported
    monkeypatch.setattr(torch.ops, "mkldnn", object())  # a PyTorch that is built without oneDNN
    assert not computes_in_bf16()


def test_compiling_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(nn.Module, "compile", lambda self: asked.append(type(self)))
    prepare(disturbed(TINY_VIT), compiled=True)
    assert asked == [VisionTransformer]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("No working C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", lambda _: fail)
    with pytest.raises(ModelError, match=r"cannot compile here, .* \(No working C\+\+ compiler\)$"):
        prepare(disturbed(TINY_VIT), compiled=True)


def test_a_model_of_ones_own_is_left_alone() -> None:
    class Own:
        name = "own"

    prepare(Own())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="own brings its own image tower"):
        prepare(Own(), "bf16")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_tower_of_full_size_agrees() -> None:
    with pytest.warns(UserWarning, match="random weights"):
        exact, small = (load_model("ViT-B-32", weights="random", precision=each) for each in ("fp32", "int8"))
    pixels = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert (exact.encode_images(pixels) * small.encode_images(pixels)).sum(dim=1).min() > 0.999
