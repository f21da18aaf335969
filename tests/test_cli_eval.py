"""`usetta eval` as a user meets it: a table on standard output, everything else on standard error."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner, Result

from conftest import make_image
from usetta.adaptive import STAGES
from usetta.cli import app
from usetta.evaluate import writing
from usetta.evaluate.store import Store
from usetta.models.clip import CLIP

CLASSES = ("cat", "red fox")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of six images in two classes."""
    for i in range(6):
        path = tmp_path / "zoo" / CLASSES[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_image(i).save(path)
    return tmp_path / "zoo"


def usetta(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


@pytest.fixture
def options(folder: Path, tiny_checkpoint: Path, tmp_path: Path) -> list[object]:
    return ["--data", folder, "--model", tiny_checkpoint, "--views", 4, "--out", tmp_path / "run"]


def test_a_table_comes_out_and_the_run_can_be_added_to(options: list[object], tmp_path: Path) -> None:
    first = usetta(*options, "--methods", "clip,se")
    assert first.exit_code == 0, first.output
    assert re.search(r"^\s*clip\s+\d+\.\d\d", first.stdout, flags=re.MULTILINE)
    assert "6 images in" in first.stderr
    assert "zoo, seed 0: clip" in first.stderr
    again = usetta(*options, "--methods", "clip,se")
    assert again.exit_code == 0, again.output
    assert "0 images in" in again.stderr
    assert again.stdout == first.stdout
    more = usetta(*options, "--methods", "se,use,zero", "--seeds", "0,1")
    assert more.exit_code == 0
    with Store(tmp_path / "run", create=False) as store:
        assert {(seed, method, n) for _, seed, method, n in store.groups()} == {
            *((0, method, 6) for method in ("clip", "se", "use", "zero")),
            *((1, method, 6) for method in ("se", "use", "zero")),
        }
    assert "±" in more.stdout


def test_bad_images_are_reported_counted_and_left_out(options: list[object], folder: Path) -> None:
    (folder / "cat" / "bad.jpg").write_bytes(b"")
    result = usetta(*options, "--methods", "clip")
    assert result.exit_code == 1
    assert "zoo: cat/bad.jpg: file is empty" in result.stderr
    assert "1 image could not be read" in " ".join(result.stdout.split())


def test_adaptive_views_and_rounded_features_are_options_and_facts(options: list[object], tmp_path: Path) -> None:
    result = usetta(*options, "--methods", "clip,se", "--views", "adaptive", "--half-features")
    assert result.exit_code == 0, result.output
    with Store(tmp_path / "run", create=False) as store:
        facts = store.facts("run")
        assert (facts["views"]["views"], facts["views"]["adaptive"]) == (64, 0.5)
        assert facts["features"] == {"precision": "fp16"}
        assert {row.views for row in store.rows({"method": "se"})} <= set(STAGES)
        assert {row.views for row in store.rows({"method": "clip"})} == {1}


def test_a_family_decides_settings_and_augmix(options: list[object], tmp_path: Path) -> None:
    settings = {}
    for family in ("imagenet", "fine-grained"):
        out = tmp_path / family
        result = usetta(*options, "--out", out, "--methods", "clip,tps", "--family", family)
        assert result.exit_code == 0, result.output
        with Store(out, create=False) as store:
            settings[family] = store.facts("recipe")[f"tps on {family}"]["lr"], store.facts("dataset")["zoo"]["augmix"]
    assert settings == {"imagenet": (5e-3, False), "fine-grained": (1e-3, True)}


def test_ctrl_c_leaves_what_was_computed(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes while the first image after a written work item is encoded, so no clock decides."""
    encode = CLIP.encode_images

    def interrupted(model: CLIP, pixels: Tensor) -> Tensor:
        if (tmp_path / "run").is_dir() and _rows(tmp_path / "run") >= 4:
            raise KeyboardInterrupt
        return encode(model, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(CLIP, "encode_images", interrupted)
        patch.setattr(writing, "_SECONDS", 0.0)  # each item is written at once
        result = usetta(*options, "--methods", "clip,se", "--batch-size", 1)
    assert result.exit_code == 130, result.output
    assert "rerun the same command to resume" in result.stderr
    assert "Traceback" not in result.output
    assert _rows(tmp_path / "run") == 4
    assert usetta(*options, "--methods", "clip,se", "--batch-size", 1).exit_code == 0
    assert _rows(tmp_path / "run") == 12


def _rows(run: Path) -> int:
    with Store(run) as store:
        return sum(n for *_, n in store.groups())


def test_shards_merged_are_the_run_of_one_process(options: list[object], folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "bad.jpg").write_bytes(b"")
    *given, run = options
    asked = (*given[:-1], "--methods", "clip,se", "--batch-size", 2)
    whole = usetta(*asked, "--out", tmp_path / "whole")
    assert whole.exit_code == 1  # because of the bad image
    for rank in (1, 0):
        shard = usetta(*asked, "--out", run, "--rank", rank, "--world-size", 2)
        assert f"this is shard {rank}-of-2; when all shards are done, run: usetta merge {run}" in shard.stderr
        again = usetta(*asked, "--out", run, "--rank", rank, "--world-size", 2)
        assert again.stdout == shard.stdout, "nothing is computed again"
    merged = CliRunner().invoke(app, ["merge", str(run)])
    assert merged.exit_code == 0, merged.output
    assert "2 shards, 12 new rows" in merged.stdout
    with Store(tmp_path / "whole", create=False) as one, Store(Path(str(run)), create=False) as two:
        assert [replace(row, seconds=0) for row in one.rows()] == [replace(row, seconds=0) for row in two.rows()]
        assert one.failed_images() == two.failed_images() != []
    after = [usetta(*asked, "--out", run, "--rank", rank, "--world-size", 3).stderr for rank in range(3)]
    counts = [int(re.search(r"^(\d+) images? in", text, flags=re.MULTILINE)[1]) for text in after]  # type: ignore[index]
    assert sorted(counts) == [0, 0, 1], "what was merged is done, and only the bad image is tried again"
