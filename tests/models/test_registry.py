"""Models by name."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.fake_hub import REPO, Hub, go_online
from models.tiny import TINY_VIT
from usetta.models import (
    LoadOptions,
    ModelEntry,
    ModelError,
    embedded,
    list_models,
    load_model,
    register_model,
    registry,
)
from usetta.models.checkpoints import export_state, save_model
from usetta.models.clip import CLIP
from usetta.models.config import ARCHITECTURES
from usetta.models.registry import canonical_name


@pytest.fixture
def tiny_name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(ARCHITECTURES, "Tiny-8", TINY_VIT)
    return "Tiny-8"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("ViT-B-16", "ViT-B-16"),
        ("ViT-B/16", "ViT-B-16"),
        ("vit_b16", "ViT-B-16"),
        ("vit_b_32", "ViT-B-32"),
        ("ViT-L/14@336px", "ViT-L-14-336"),
        ("rn50", "RN50"),
        ("openai/clip-vit-base-patch16", None),
        ("nonsense", None),
    ],
)
def test_spellings(spelling: str, name: str | None) -> None:
    assert canonical_name(spelling) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-B-61", r"unknown model 'ViT-B-61'; did you mean 'ViT-B-16'\?"),
        ("ViT-B/61", r"unknown model 'ViT-B/61'; did you mean 'ViT-B-16'\?"),
        ("RN5", r"unknown model 'RN5'; did you mean 'RN50'\?"),
        ("gpt", r"unknown model 'gpt'; known: auto, embedded, ViT-B-32, .*RN50, a hub id or a file"),
        ("./no.pt", r"no\.pt does not exist"),
        ("no.safetensors", r"no\.safetensors does not exist"),
        ("RN101", r"there are no known weights for RN101: use a weights file"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(name)


def test_random_weights_say_so_and_follow_the_seed(tiny_name: str) -> None:
    with pytest.warns(UserWarning, match="Tiny-8 has random weights: its answers mean nothing") as caught:
        model = load_model("tiny8", weights="random", seed=3)
    assert caught[0].filename == __file__
    assert isinstance(model, CLIP)
    assert model.is_random
    assert model.name == "Tiny-8-random"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_model(tiny_name, weights="random", seed=3).fingerprint == model.fingerprint
        assert load_model(tiny_name, weights="random", seed=4).fingerprint != model.fingerprint
        gelu = load_model(tiny_name, weights="random", seed=3, activation="gelu", device="cpu")
    assert isinstance(gelu, CLIP)
    assert gelu.config.activation == "gelu"


def test_local_file(tiny_name: str, tiny_vit: CLIP, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(export_state(tiny_vit, "openai"), path)
    by_weights = load_model(tiny_name, weights=path, activation="quick_gelu")
    by_name = load_model(str(path), activation="quick_gelu")
    assert by_weights.fingerprint == by_name.fingerprint == tiny_vit.fingerprint
    assert (by_weights.name, by_name.name) == ("Tiny-8", "mine")
    with pytest.raises(ModelError, match=r"does not fit ViT-B-32 \(it holds Tiny-8\)"):
        load_model("ViT-B-32", weights=path, activation="quick_gelu")


def test_local_folder(tiny_vit: CLIP, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"contains no weights, that is none of open_clip_model\.safetensors"):
        load_model(str(tmp_path))
    save_model(tiny_vit, tmp_path)
    assert load_model(str(tmp_path)).fingerprint == tiny_vit.fingerprint


def test_weights_need_an_architecture() -> None:
    with pytest.raises(
        ModelError, match="with weights, the model must be an architecture, not 'openai/clip'; known: ViT-B-32"
    ):
        load_model("openai/clip", weights="random")


def test_registered_models(tiny_vit: CLIP, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    received = []

    def load(options: LoadOptions) -> CLIP:
        received.append(options)
        return tiny_vit

    register_model("pocket", ModelEntry(load, "tiny", "this test", "fits anywhere", lambda folder: folder == tmp_path))
    request.addfinalizer(lambda: registry.unregister_model("pocket"))
    assert load_model("Pocket", device="cpu", cache_dir=tmp_path, offline=True, activation="gelu") is tiny_vit
    assert received == [LoadOptions(torch.device("cpu"), tmp_path, offline=True, activation="gelu")]
    assert list_models(tmp_path)[-1] == registry.ModelRow("pocket", "tiny", "this test", "fits anywhere", cached=True)
    assert not list_models()[-1].cached
    with pytest.raises(ModelError, match=r"did you mean 'pocket'\?"):
        load_model("pokcet")
    with pytest.raises(ValueError, match="there is already a model called 'vit_b16'"):
        register_model("vit_b16", ModelEntry(load))


def test_list_models(tmp_path: Path) -> None:
    rows = {row.name: row for row in list_models(tmp_path)}
    assert {"ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336", "RN50"} <= set(rows)
    assert rows["ViT-B-16"].source == "timm/vit_base_patch16_clip_224.openai"
    assert not rows["ViT-B-16"].cached
    assert not rows["RN50"].cached
    assert "RN101" not in rows  # an architecture that nobody publishes weights for here


def test_names_need_no_torch() -> None:
    code = "import sys, usetta.models; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert answer.strip() == "False"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_device(tiny_name: str) -> None:
    with pytest.warns(UserWarning, match="random"):
        model = load_model(tiny_name, weights="random", device="cuda")
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    assert model.encode_images(pixels).device.type == "cuda"


# `auto`: CLIP, or the embedded model where CLIP cannot be had


@pytest.fixture
def small_clip(monkeypatch: pytest.MonkeyPatch, server: Hub, tiny_vit: CLIP, tmp_path: Path) -> Iterator[Hub]:
    """The model that `auto` prefers is the tiny one, which the hub has; the embedded one is a name only."""
    save_model(tiny_vit, tmp_path / "published")
    server.files = {path.name: path.read_bytes() for path in (tmp_path / "published").iterdir()}
    monkeypatch.setitem(ARCHITECTURES, "Tiny-8", TINY_VIT)
    monkeypatch.setattr(registry, "PREFERRED", "Tiny-8")
    monkeypatch.setattr(embedded, "load", lambda log, offline: tiny_vit)
    register_model("Tiny-8", registry.published_clip("Tiny-8", REPO, "for tests"))
    yield server
    registry.unregister_model("Tiny-8")


def test_auto_is_clip_where_the_hub_or_the_cache_has_it(
    small_clip: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_model("auto", cache_dir=tmp_path).name == "Tiny-8"
    assert load_model("auto", cache_dir=tmp_path, offline=True).name == "Tiny-8"
    assert caplog.text == ""


@pytest.mark.parametrize("offline", [True, False])
def test_auto_says_in_one_line_that_it_is_the_embedded_model(
    small_clip: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    go_online(monkeypatch, "http://127.0.0.1:9")  # nothing listens there
    assert load_model("auto", cache_dir=tmp_path, offline=offline).name == "tiny"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the embedded model is used" in record.message
    assert "`usetta models pull Tiny-8`" in record.message
    with pytest.raises(ModelError, match="is not in the cache"):  # a model that was named is never replaced
        load_model("Tiny-8", cache_dir=tmp_path, offline=offline)


@pytest.mark.parametrize(
    ("content", "message"), [(b"tampered", "is corrupt|was cut off"), (None, "is damaged, perhaps cut off")]
)
def test_auto_does_not_hide_that_clip_s_weights_are_damaged(
    small_clip: Hub, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = "open_clip_model.safetensors"
    if content is None:
        small_clip.files[file] = b"published like that"
    else:
        small_clip.tampered[file] = content
    with pytest.raises(ModelError, match=message):
        load_model("auto", cache_dir=tmp_path)
