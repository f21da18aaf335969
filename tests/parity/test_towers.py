"""Features equal those of OpenAI's own code and of transformers, on equal random weights, to 1e-5."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference import openai_module, randomize
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from usetta.models import load_model
from usetta.models.clip import CLIP
from usetta.models.config import (
    ARCHITECTURES,
    OPENAI_MEAN,
    OPENAI_STD,
    CLIPConfig,
    ResNetConfig,
    TextConfig,
    ViTConfig,
)
from usetta.models.tokenizer import default_tokenizer

TEXTS = ["a photo of a cat.", "Boeing 747-400, seen from below", "", "a centered satellite photo of annual crop land"]


def make_pixels(size: int, n: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    coarse = torch.rand(n, 3, 9, 9, generator=generator)
    return nn.functional.interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)


def normalised(pixels: Tensor) -> Tensor:
    """As OpenAI's preprocessing does it, written out."""
    return torch.stack([(pixels[:, c] / 255 - OPENAI_MEAN[c]) / OPENAI_STD[c] for c in range(3)], 1)


def openai_model(config: CLIPConfig) -> nn.Module:
    torch.manual_seed(0)
    return randomize(openai_module_of(config))


def openai_module_of(config: CLIPConfig) -> nn.Module:
    vision, text = config.vision, config.text
    module: nn.Module = openai_module("model").CLIP(
        embed_dim=config.embed_dim,
        image_resolution=vision.image_size,
        vision_layers=vision.layers,
        vision_width=vision.width,
        vision_patch_size=vision.patch_size if isinstance(vision, ViTConfig) else None,
        context_length=text.context_length,
        vocab_size=text.vocab_size,
        transformer_width=text.width,
        transformer_heads=text.heads,
        transformer_layers=text.layers,
    )
    return module


def shallow(config: CLIPConfig) -> CLIPConfig:
    """With full width but few layers, which all compute the same."""
    vision, text = config.vision, config.text
    few = replace(vision, layers=2) if isinstance(vision, ViTConfig) else replace(vision, layers=(1, 1, 2, 1))
    return replace(config, vision=few, text=replace(text, layers=2))


@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16", "ViT-L-14", "RN50", "RN101"])
def test_shapes_are_those_of_openai(name: str) -> None:
    config = ARCHITECTURES[name]
    with torch.device("meta"):
        theirs, ours = openai_module_of(config), CLIP(config, name=name, logit_scale=100.0)
    assert sorted(tuple(p.shape) for p in ours.parameters()) == sorted(
        tuple(p.shape) for key, p in theirs.named_parameters() if key != "logit_scale"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-32", "ViT-B-16", "RN50"])
def test_features_equal_openai(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, name, shallow(ARCHITECTURES[name]))
    reference = openai_model(ARCHITECTURES[name])
    save_file(reference.state_dict(), tmp_path / "weights.safetensors")
    model = load_model(
        name, weights=tmp_path / "weights.safetensors", activation="quick_gelu", device="cpu", precision="fp32"
    )
    assert isinstance(model, CLIP)

    pixels = make_pixels(224)
    ids = model.text.tokenize(TEXTS)
    with torch.no_grad():
        images = normalize(reference.encode_image(normalised(pixels)), dim=-1)
        texts = normalize(reference.encode_text(ids), dim=-1)
        ours = model.text.encode(model.text.embed(ids), ids)
    torch.testing.assert_close(model.encode_images(pixels), images, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, texts, atol=1e-5, rtol=0)
    assert model.logit_scale == pytest.approx(float(reference.logit_scale.exp()))
    # The inputs must matter, or equality would prove nothing.
    assert (images[0] @ images[1]).item() < 0.999
    assert (texts[0] @ texts[1]).item() < 0.999


@pytest.mark.filterwarnings("ignore")  # tracing warns of being deprecated, and of OpenAI's Python branches
@pytest.mark.parametrize(
    "vision",
    [ViTConfig(64, 16, width=64, layers=2, heads=1), ResNetConfig(64, width=16, layers=(1, 1, 1, 1), heads=8)],
    ids=["vit", "resnet"],
)
def test_archives_as_openai_published_them(
    vision: ViTConfig | ResNetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchScript, half precision, buffers among the weights, and no file beside it."""
    config = CLIPConfig(64, vision, TextConfig(width=64, layers=2, heads=1))
    monkeypatch.setitem(ARCHITECTURES, "Tiny", config)
    reference = openai_model(config)
    pixels, ids = make_pixels(64), default_tokenizer().tokenize(TEXTS)
    openai_module("model").convert_weights(reference)
    example = (normalised(pixels), ids)
    torch.jit.save(torch.jit.trace(reference, example, check_trace=False), tmp_path / "Tiny.pt")

    model = load_model(str(tmp_path / "Tiny.pt"), device="cpu", precision="fp32")
    assert isinstance(model, CLIP)
    assert model.config == config
    with torch.no_grad():
        expected = normalize(reference.float().encode_image(normalised(pixels)), dim=-1)
    torch.testing.assert_close(model.encode_images(pixels), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "activation"), [("ViT-B-16", "quick_gelu"), ("ViT-B-32", "quick_gelu"), ("ViT-B-32", "gelu")]
)
def test_features_equal_transformers(name: str, activation: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = ARCHITECTURES[name]
    vision, text = config.vision, config.text
    assert not isinstance(vision, ResNetConfig)
    torch.manual_seed(0)
    settings = transformers.CLIPConfig(
        projection_dim=config.embed_dim,
        vision_config={
            "hidden_size": vision.width,
            "intermediate_size": 4 * vision.width,
            "num_hidden_layers": 2,
            "num_attention_heads": vision.heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "hidden_act": activation,
            "projection_dim": config.embed_dim,
        },
        text_config={
            "hidden_size": text.width,
            "intermediate_size": 4 * text.width,
            "num_hidden_layers": 2,
            "num_attention_heads": text.heads,
            "hidden_act": activation,
            "vocab_size": text.vocab_size,
            "eos_token_id": 49407,
            "projection_dim": config.embed_dim,
        },
    )
    reference = randomize(transformers.CLIPModel(settings))
    settings.save_pretrained(tmp_path)
    save_file(
        {key: tensor.contiguous() for key, tensor in reference.state_dict().items()}, tmp_path / "model.safetensors"
    )
    model = load_model(str(tmp_path), device="cpu", precision="fp32")

    pixels = make_pixels(224)
    ids = model.text.tokenize(TEXTS)
    with torch.no_grad():
        both = reference(input_ids=ids, pixel_values=normalised(pixels))
        ours = model.text.encode(model.text.embed(ids), ids)
    torch.testing.assert_close(model.encode_images(pixels), both.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, both.text_embeds, atol=1e-5, rtol=0)
    scores = model.logit_scale * model.encode_images(pixels) @ ours.T
    torch.testing.assert_close(scores, both.logits_per_image, atol=1e-3, rtol=0)
