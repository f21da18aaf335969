"""Downloads, against a server on this machine."""

import errno
import hashlib
import json
import time
from pathlib import Path

import pytest
import torch

from models.fake_hub import COMMIT, REPO, Hub, go_online
from models.tiny import TINY_VIT
from usetta.models import ModelError, hub, load_model, openai_files, register_model, registry
from usetta.models.checkpoints import export_state, save_model
from usetta.models.clip import CLIP
from usetta.models.config import ARCHITECTURES


@pytest.fixture
def stocked(server: Hub, tiny_vit: CLIP, tmp_path: Path) -> Hub:
    """A repository with the tiny ViT in open_clip layout."""
    folder = tmp_path / "published"
    save_model(tiny_vit, folder)
    server.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return server


def test_download_is_cached(server: Hub, tmp_path: Path) -> None:
    server.files["weights.bin"] = b"12345"
    assert not hub.is_cached(REPO, "weights.bin", tmp_path)
    path = hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    assert path.read_bytes() == b"12345"
    assert hub.is_cached(REPO, "weights.bin", tmp_path)
    before = len(server.requests)
    assert hub.download(REPO, "weights.bin", cache_dir=tmp_path, offline=True) == path
    assert len(server.requests) == before


def test_pinned_revision(server: Hub, tmp_path: Path) -> None:
    server.files["weights.bin"] = b"12345"
    hub.download(REPO, "weights.bin", revision=COMMIT, cache_dir=tmp_path)
    asked = [request for request in server.requests if REPO in request]  # the client also asks about itself
    assert asked
    assert all(COMMIT in request for request in asked)
    with pytest.raises(ModelError, match=f"{REPO} has no revision v9"):
        hub.download(REPO, "weights.bin", revision="v9", cache_dir=tmp_path)


def test_cut_off_download(server: Hub, tmp_path: Path) -> None:
    server.files["weights.bin"] = b"12345"
    server.tampered["weights.bin"] = b"123"
    with pytest.raises(
        ModelError, match=rf"the download of weights\.bin of {REPO} was cut off: try again, or use a local"
    ):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    server.tampered.clear()
    assert hub.download(REPO, "weights.bin", cache_dir=tmp_path).read_bytes() == b"12345"


def test_corrupt_download_is_removed(server: Hub, tmp_path: Path) -> None:
    server.files["weights.bin"] = b"12345"
    server.tampered["weights.bin"] = b"12354"
    with pytest.raises(
        ModelError, match=r"is corrupt: its SHA-256 is .* the hub says .*; the file was removed, try again"
    ):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    assert not hub.is_cached(REPO, "weights.bin", tmp_path)
    server.tampered.clear()
    assert hub.download(REPO, "weights.bin", cache_dir=tmp_path).read_bytes() == b"12345"


def test_a_cache_that_went_bad_is_noticed(server: Hub, tmp_path: Path) -> None:
    server.files["weights.bin"] = b"12345"
    path = hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    path.resolve().write_bytes(b"1")
    with pytest.raises(ModelError, match="is corrupt"):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path, offline=True)


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ((404, "RepoNotFound"), "the hub has no repository someone/tiny-clip.openai, or it is private"),
        ((403, "GatedRepo"), "is gated: accept its terms on its page on the hub and run `hf auth login`"),
    ],
)
def test_refusals(server: Hub, tmp_path: Path, refusal: tuple[int, str], message: str) -> None:
    server.refusal = refusal
    with pytest.raises(ModelError, match=message):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)


def test_missing_file(server: Hub, tmp_path: Path) -> None:
    with pytest.raises(hub.NotInRepositoryError, match=rf"the hub repository {REPO} has no file weights\.bin"):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    assert hub.download_optional(REPO, "weights.bin", cache_dir=tmp_path) is None


def test_invalid_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'a/b/c' is not a valid id of a hub repository"):
        hub.download("a/b/c", "weights.bin", cache_dir=tmp_path)


def test_offline(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"weights\.bin of .* is not in the cache and offline mode forbids downloading it"
    ):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path, offline=True)
    with pytest.raises(ModelError, match="offline mode forbids"):  # HF_HUB_OFFLINE, as set for all tests
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    assert hub.download_optional(REPO, "weights.bin", cache_dir=tmp_path, offline=True) is None


def test_no_network_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go_online(monkeypatch, "http://127.0.0.1:9")  # the port that discards: nothing listens there
    start = time.monotonic()
    with pytest.raises(
        ModelError, match=r"is not in the cache and http://127\.0\.0\.1:9 cannot be reached .*--model FILE"
    ):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)
    assert time.monotonic() - start < 3


def test_full_disk(server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    server.files["weights.bin"] = b"12345"
    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(ModelError, match=r"the disk is full: weights\.bin of .* could not be stored; free some space"):
        hub.download(REPO, "weights.bin", cache_dir=tmp_path)


# Models through the hub


def test_model_by_hub_id(stocked: Hub, tiny_vit: CLIP, tmp_path: Path) -> None:
    model = load_model(REPO, cache_dir=tmp_path)
    assert model.fingerprint == tiny_vit.fingerprint
    assert model.name == REPO
    again = load_model(f"{REPO}@{COMMIT}", cache_dir=tmp_path, offline=True)
    assert again.fingerprint == model.fingerprint


def test_published_model(
    stocked: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "Tiny", TINY_VIT)
    register_model("Tiny", registry.published_clip("Tiny", REPO, "for tests"))
    request.addfinalizer(lambda: registry.unregister_model("Tiny"))
    assert load_model("tiny", cache_dir=tmp_path).name == "Tiny"
    (row,) = [row for row in registry.list_models(tmp_path) if row.name == "Tiny"]
    assert row == registry.ModelRow("Tiny", "Tiny", REPO, "for tests", cached=True)
    gelu = load_model("tiny", activation="gelu", cache_dir=tmp_path)
    assert isinstance(gelu, CLIP)
    assert gelu.config.activation == "gelu"
    (config,) = tmp_path.glob("**/snapshots/*/open_clip_config.json")
    config.unlink()
    go_online(monkeypatch, "http://127.0.0.1:9")  # weights in the cache are enough, whatever is missing beside them
    assert load_model("tiny", cache_dir=tmp_path).name == "Tiny"


def test_a_named_model_has_a_fixed_revision(
    stocked: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "Tiny", TINY_VIT)
    register_model("Tiny", registry.published_clip("Tiny", REPO, "for tests", revision=COMMIT))
    request.addfinalizer(lambda: registry.unregister_model("Tiny"))
    load_model("tiny", cache_dir=tmp_path)
    asked = [request for request in stocked.requests if REPO in request]
    assert asked
    assert all(COMMIT in request for request in asked)
    with pytest.raises(ModelError, match=f"{REPO} has no revision v2"):
        load_model("tiny", revision="v2", cache_dir=tmp_path)
    assert load_model(REPO, revision=COMMIT, cache_dir=tmp_path).name == REPO
    with pytest.raises(ModelError, match="the name says revision a+ of .*, revision= says v2"):
        load_model(f"{REPO}@{COMMIT}", revision="v2", cache_dir=tmp_path)
    with pytest.raises(ModelError, match="a file has no revision v2"):
        load_model(str(tmp_path / "published"), revision="v2")


def test_a_pull_fetches_again_what_is_damaged(
    stocked: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))  # with the models of this test alone
    monkeypatch.setitem(ARCHITECTURES, "Tiny", TINY_VIT)
    register_model("Tiny", registry.published_clip("Tiny", REPO, "for tests"))
    request.addfinalizer(lambda: registry.unregister_model("Tiny"))
    lines: list[str] = []
    assert registry.pull_model("tiny", lines.append) == "the hub's cache"
    assert lines == ["downloading Tiny"]
    (weights,) = (path for path in (tmp_path / "hub").glob("**/blobs/*") if path.stat().st_size > 10_000)
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1] + b"?")
    registry.pull_model("tiny", lines.append)
    assert "is corrupt" in lines[2]
    assert weights.read_bytes() == intact
    weights.write_bytes(intact[:-1] + b"?")
    assert list(registry.repair_models(lines.append)) == ["Tiny"]
    assert weights.read_bytes() == intact


def test_files_that_openai_s_package_has_downloaded(
    server: Hub, tiny_vit: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "Tiny.pt"
    torch.save(export_state(tiny_vit, "openai"), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(openai_files, "FOLDER", tmp_path)
    monkeypatch.setitem(ARCHITECTURES, "Tiny", TINY_VIT)
    monkeypatch.setitem(openai_files.FILES, "Tiny", ("Tiny.pt", digest))
    assert load_model("Tiny").fingerprint == tiny_vit.fingerprint  # an architecture that no repository is known for
    register_model("Tiny", registry.published_clip("Tiny", REPO, "for tests"))
    request.addfinalizer(lambda: registry.unregister_model("Tiny"))
    assert load_model("tiny", cache_dir=tmp_path, offline=True).fingerprint == tiny_vit.fingerprint
    assert next(row for row in registry.list_models(tmp_path) if row.name == "Tiny").cached
    assert not server.requests
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ModelError, match=rf"Tiny\.pt is not the file that OpenAI published: its SHA.*not {digest[:12]}"
    ):
        load_model("tiny", cache_dir=tmp_path)


def test_repository_without_weights(server: Hub, tmp_path: Path) -> None:
    server.files["config.json"] = json.dumps({"model_type": "bert"}).encode()
    with pytest.raises(
        ModelError, match=r"has no supported weights in the hub, that is none of open_clip_model\.safet"
    ):
        load_model(REPO, cache_dir=tmp_path)


def test_weights_not_in_the_cache_offline(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="offline mode forbids downloading it: go online once, or use a local file"):
        load_model("ViT-B-16", cache_dir=tmp_path, offline=True)
    with pytest.raises(ModelError, match="has no supported weights in the cache"):
        load_model(REPO, cache_dir=tmp_path, offline=True)
