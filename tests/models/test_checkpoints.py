"""Files of weights: three layouts in and out, and an error that names the cause for everything that does not fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.tiny import TINY_VIT, disturbed
from usetta.models.base import ModelError, view_recipe
from usetta.models.checkpoints import export_state, load_checkpoint, save_model
from usetta.models.clip import CLIP
from usetta.models.config import ARCHITECTURES, activation_of_name
from usetta.models.layouts import State, to_foreign
from usetta.models.tokenizer import vocabulary

STATE = export_state(disturbed(TINY_VIT), "openai")
HF_CONFIG = {
    "model_type": "clip",
    "vision_config": {"num_attention_heads": 3, "hidden_act": "quick_gelu"},
    "text_config": {"num_attention_heads": 2, "hidden_act": "quick_gelu"},
}


@pytest.fixture
def folder(tmp_path: Path, tiny_vit: CLIP) -> Path:
    """A folder with the tiny ViT as open_clip would write it."""
    save_model(tiny_vit, tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[State], object]) -> Path:
    path = folder / "open_clip_model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    return path


def rewrite_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def assert_same(a: CLIP, b: CLIP) -> None:
    assert a.config == b.config
    assert a.logit_scale == pytest.approx(b.logit_scale, rel=1e-6)
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[key]), key


def test_save_and_load(tmp_path: Path, tiny: CLIP) -> None:
    path = save_model(tiny, tmp_path)
    loaded = load_checkpoint(path, name="again")
    assert_same(loaded, tiny)
    assert loaded.name == "again"
    assert not loaded.is_random
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "safetensors"])
def test_openai_layout_in_any_container(folder: Path, tiny_vit: CLIP, suffix: str) -> None:
    path = folder / f"weights.{suffix}"
    state = export_state(tiny_vit, "openai")
    save_file(state, path) if suffix == "safetensors" else torch.save(state, path)
    assert_same(load_checkpoint(path, name="tiny"), tiny_vit)


def test_transformers_layout(tmp_path: Path, tiny_vit: CLIP) -> None:
    path = tmp_path / "model.safetensors"
    state = export_state(tiny_vit, "transformers")
    assert state["visual_projection.weight"].shape == (24, 48)
    save_file({**state, "text_model.embeddings.position_ids": torch.arange(77)[None]}, path)
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    assert_same(load_checkpoint(path, name="tiny"), tiny_vit)


def test_training_checkpoint(folder: Path, tiny_vit: CLIP) -> None:
    state = {f"module.{key}": tensor for key, tensor in export_state(tiny_vit, "openai").items()}
    torch.save({"epoch": 3, "state_dict": state}, folder / "epoch_3.pt")
    assert_same(load_checkpoint(folder / "epoch_3.pt", name="tiny"), tiny_vit)


def test_half_precision_becomes_float32(folder: Path, tiny_vit: CLIP) -> None:
    def halve(state: State) -> None:
        state.update({key: tensor.half() for key, tensor in state.items() if key != "logit_scale"})

    loaded = load_checkpoint(rewrite(folder, halve), name="tiny")
    assert loaded.dtype == torch.float32
    assert_same(loaded, tiny_vit.half().float())


def test_known_buffers_are_ignored(folder: Path) -> None:
    names = ["input_resolution", "context_length", "vocab_size", "attn_mask", "visual.bn1.num_batches_tracked"]
    extra = {name: torch.ones(1) for name in names}
    load_checkpoint(rewrite(folder, lambda state: state.update(extra)), name="tiny")


def test_preprocessing_comes_from_the_file_beside(folder: Path, tiny_vit: CLIP) -> None:
    stated = {"mean": [0.5, 0.4, 0.3], "std": 0.2, "size": 32, "resize_mode": "squash", "interpolation": "bilinear"}
    rewrite_json(folder / "open_clip_config.json", lambda config: config.update(preprocess_cfg=stated))
    model = load_checkpoint(folder / "open_clip_model.safetensors", name="tiny")
    assert (model.mean, model.std) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    recipe = view_recipe(model, 4)
    assert (recipe.size, recipe.resize_mode, recipe.interpolation) == (32, "squash", "bilinear")
    # How the weak view is made changes the views, not the features of given pixels: that is the recipe's key.
    assert replace(model.config, mean=tiny_vit.mean, std=tiny_vit.std).__repr__() == tiny_vit.describe()


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({}, ("shortest", "bicubic")),
        ({"size": 32, "crop_size": 32, "resample": 3}, ("shortest", "bicubic")),
        ({"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}, ("shortest", "bicubic")),
        ({"size": {"height": 32, "width": 32}, "resample": 2}, ("squash", "bilinear")),
        ({"size": {"shortest_edge": 40}, "crop_size": 32}, r"size = \{'shortest_edge': 40\} and crop_size = 32"),
        ({"size": {"shortest_edge": 32}, "do_center_crop": False}, "size = .* and crop_size = None"),
        ({"size": {"longest_edge": 32}, "crop_size": 32}, "size = .*longest_edge.*"),
        ({"resample": 1}, "resample = 1"),
        ({"do_resize": False}, "do_resize = False"),
        ({"rescale_factor": 1.0}, "rescale_factor = 1.0"),
    ],
)
def test_preprocessing_of_transformers(
    tmp_path: Path, tiny_vit: CLIP, processor: dict, expected: tuple[str, str] | str
) -> None:
    save_file(export_state(tiny_vit, "transformers"), tmp_path / "model.safetensors")
    config = {**HF_CONFIG, "vision_config": {**HF_CONFIG["vision_config"], "image_size": 32}}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=rf"preprocessor_config\.json specifies {expected}, which is not supp"):
            load_checkpoint(tmp_path / "model.safetensors", name="tiny")
    else:
        model = load_checkpoint(tmp_path / "model.safetensors", name="tiny")
        assert (model.resize_mode, model.interpolation) == expected


# What does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("ln_final.bias"), r"missing keys: ln_final\.bias"),
        (lambda s: s.pop("logit_scale"), "missing keys: logit_scale"),
        (lambda s: s.update(extra=torch.ones(1)), "surplus keys: extra"),
        (
            lambda s: s.update({f"extra.{i}": torch.ones(1) for i in range(5)}),
            r"extra\.0, extra\.1, extra\.2 and 2 more",
        ),
        (lambda s: s.update({"ln_final.bias": torch.ones(31)}), r"text_tower\.ln_final\.bias is \(31,\), not \(32,\)"),
        (lambda s: s["visual.proj"].fill_(float("nan")), r"NaN or infinite values in visual\.proj"),
        (lambda s: s["visual.proj"].view(-1)[3].fill_(float("inf")), r"NaN or infinite values in visual\.proj"),
        (lambda s: s.pop("visual.class_embedding"), r"does not contain visual\.attnpool\.positional_embedding"),
        (lambda s: s.update({"visual.trunk.x": torch.ones(1)}), r"timm image encoder .* use usetta\.from_open_clip"),
        (lambda s: s.pop("token_embedding.weight"), "is not a CLIP model in OpenAI, open_clip or transformers layout"),
    ],
)
def test_misfits_are_named(folder: Path, change: Callable[[State], object], message: str) -> None:
    path = rewrite(folder, change)
    with pytest.raises(ModelError, match=message) as error:
        load_checkpoint(path, name="tiny")
    assert str(path) in str(error.value)


def test_another_architecture_is_named(folder: Path) -> None:
    path = folder / "open_clip_model.safetensors"
    with pytest.raises(
        ModelError, match=r"does not fit ViT-B-16 \(it holds patches of 8, image size 32.*\); wrong shapes"
    ):
        load_checkpoint(path, name="x", architecture="ViT-B-16", activation="quick_gelu")


def test_published_architectures_are_distinguished(tmp_path: Path) -> None:
    with torch.device("meta"):
        shapes = to_foreign(CLIP(ARCHITECTURES["RN50"], name="").state_dict(), "openai")
    zero = torch.zeros(1)  # views of one number: a file of a hundred million parameters that takes no space
    torch.save({key: zero.expand(tensor.shape) for key, tensor in shapes.items()}, tmp_path / "RN50.pt")
    with pytest.raises(
        ModelError, match=r"RN50\.pt does not fit RN101 \(it holds RN50\); .*missing keys: logit_scale, visual"
    ):
        load_checkpoint(tmp_path / "RN50.pt", name="x", architecture="RN101", activation="quick_gelu")


def test_unknown_heads_are_an_error(folder: Path) -> None:
    (folder / "open_clip_config.json").unlink()
    with pytest.raises(
        ModelError, match=r"unknown architecture .* number of attention heads is unknown; put the published open_clip"
    ):
        load_checkpoint(folder / "open_clip_model.safetensors", name="tiny", activation="gelu")


def test_contradictory_heads_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "Tiny", replace(TINY_VIT, vision=replace(TINY_VIT.vision, heads=6)))
    with pytest.raises(ModelError, match=r"open_clip_config\.json has different numbers of attention heads than Tiny"):
        load_checkpoint(folder / "open_clip_model.safetensors", name="tiny")


# Activation


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("timm/vit_base_patch16_clip_224.openai", "quick_gelu"),
        ("openai/clip-vit-base-patch16", "quick_gelu"),
        ("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "gelu"),
        ("timm/vit_base_patch32_clip_224.laion400m_e31", "quick_gelu"),
        ("vit_b_32-quickgelu-laion400m_e32-46683a32.pt", "quick_gelu"),
        ("timm/vit_base_patch16_clip_224.laion400m_e32", "gelu"),
        ("timm/vit_base_patch32_clip_224.laion2b_e16", "gelu"),
        ("timm/resnet50_clip.cc12m", "quick_gelu"),
        ("timm/vit_large_patch14_clip_224.metaclip_2pt5b", "quick_gelu"),
        ("timm/vit_huge_patch14_clip_224.metaclip_altogether", "gelu"),
        ("apple/DFN5B-CLIP-ViT-H-14", "quick_gelu"),
        ("apple/DFN2B-CLIP-ViT-L-14-39B", "gelu"),
        ("laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K", "gelu"),
        ("someone/model", None),
    ],
)
def test_published_names(name: str, expected: str | None) -> None:
    assert activation_of_name(name) == expected


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights of a named architecture without any file beside them."""
    monkeypatch.setitem(ARCHITECTURES, "Tiny", TINY_VIT)
    save_file(STATE, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_unknown_activation_is_an_error(named: Path) -> None:
    with pytest.raises(
        ModelError, match=r"activation of .*weights\.safetensors is unknown: pass activation='quick_gelu'"
    ):
        load_checkpoint(named, name="tiny")


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu"])
def test_activation_of_the_caller(named: Path, activation: str) -> None:
    assert load_checkpoint(named, name="tiny", activation=activation).config.activation == activation  # type: ignore[arg-type]


def test_activation_of_the_name(named: Path) -> None:
    assert load_checkpoint(named, name="tiny", published_as="laion/x").config.activation == "gelu"


def test_contradictory_activations_are_an_error_unless_the_caller_decides(folder: Path) -> None:
    path = folder / "open_clip_model.safetensors"
    message = (
        r"open_clip_config\.json says quick_gelu, the name laion/x says gelu; pass activation='quick_gelu' or 'gelu'"
    )
    with pytest.raises(ModelError, match=message):
        load_checkpoint(path, name="tiny", published_as="laion/x")
    assert load_checkpoint(path, name="x", published_as="laion/x", activation="gelu").config.activation == "gelu"


def test_a_configuration_without_activation_leaves_it_to_the_name(folder: Path) -> None:
    """An older revision of RN50's lacks it, though OpenAI trained with QuickGELU; open_clip's default is GELU."""
    rewrite_json(folder / "open_clip_config.json", lambda config: config["model_cfg"].pop("quick_gelu"))
    path = folder / "open_clip_model.safetensors"
    assert load_checkpoint(path, name="x", published_as="timm/resnet50_clip.openai").config.activation == "quick_gelu"
    assert load_checkpoint(path, name="x", published_as="someone/model").config.activation == "gelu"


# The file beside


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model_cfg"]["vision_cfg"].update(pool_type="avg"), r"specifies vision_cfg\.pool_type = 'avg'"),
        (lambda c: c["model_cfg"]["text_cfg"].update(no_causal_mask=True), r"text_cfg\.no_causal_mask = True"),
        (lambda c: c["model_cfg"]["vision_cfg"].update(timm_model_name="x"), r"vision_cfg\.timm_model_name = 'x'"),
        (lambda c: c["preprocess_cfg"].update(resize_mode="fit"), r"preprocess_cfg\.resize_mode = fit"),
        (lambda c: c["preprocess_cfg"].update(interpolation="lanczos"), r"preprocess_cfg\.interpolation = lanczos"),
        (lambda c: c["preprocess_cfg"].update(size=[32, 48]), r"preprocess_cfg\.size = \[32, 48\]"),
        (lambda c: c["preprocess_cfg"].update(resize_mode="longest", fill_color=9), r"preprocess_cfg\.fill_color = 9"),
        (lambda c: c.pop("model_cfg"), "is not the configuration of a CLIP model"),
        (lambda c: c["model_cfg"].update(vision_cfg=None), "is not the configuration of a CLIP model"),
    ],
)
def test_unsupported_open_clip_settings(folder: Path, change: Callable[[dict], object], message: str) -> None:
    rewrite_json(folder / "open_clip_config.json", change)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(folder / "open_clip_model.safetensors", name="tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["text_config"].update(hidden_act="gelu"), r"activations \['gelu', 'quick_gelu'\]"),
        (
            lambda c: [c[p].update(hidden_act="relu") for p in ("vision_config", "text_config")],
            r"activations \['relu'\]",
        ),
        (lambda c: c["text_config"].update(layer_norm_eps=1e-6), "layer_norm_eps = 1e-06"),
        (lambda c: c.update(model_type="blip"), "number of attention heads is unknown"),
    ],
)
def test_unsupported_transformers_settings(
    tmp_path: Path, tiny_vit: CLIP, change: Callable[[dict], object], message: str
) -> None:
    save_file(export_state(tiny_vit, "transformers"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    rewrite_json(tmp_path / "config.json", change)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(tmp_path / "model.safetensors", name="tiny")


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not valid JSON"), ("[]", "must contain a JSON object, not a list")]
)
def test_broken_configuration(folder: Path, content: str, message: str) -> None:
    (folder / "open_clip_config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(folder / "open_clip_model.safetensors", name="tiny")


def test_tokenizer_beside_the_weights(folder: Path) -> None:
    merges = [("c", "a"), ("ca", "t</w>")]
    model = {"vocab": vocabulary(merges), "merges": [" ".join(pair) for pair in merges]}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    loaded = load_checkpoint(folder / "open_clip_model.safetensors", name="tiny")
    assert loaded.text.tokenize(["cat"])[0, :3].tolist() == [514, 513, 515]


def test_a_vocabulary_too_small_for_the_tokenizer(folder: Path) -> None:
    cut = {"token_embedding.weight": torch.zeros(1000, 32)}
    path = rewrite(folder, lambda state: state.update(cut))
    with pytest.raises(ModelError, match="has embeddings for 1000 tokens, but its tokenizer has 49408"):
        load_checkpoint(path, name="tiny")


def test_cut_off_safetensors(folder: Path) -> None:
    path = folder / "open_clip_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is damaged, perhaps cut off while downloading"):
        load_checkpoint(path, name="tiny")
