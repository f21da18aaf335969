"""The commands about runs: what they print, where, how they exit."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from conftest import make_image
from data.miniature import SPLITS, make_split
from report.stores import answers, make_run
from usetta.cli.app import app
from usetta.cli.measuring import run_folder
from usetta.coop.context import save_context
from usetta.evaluate.store import Store
from usetta.images import open_image
from usetta.models import ModelError
from usetta.models.clip import CLIP
from usetta.prompts import TEMPLATES
from usetta.report.reproduce import ITEMS


def usetta(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100", "USETTA_DATA": ""}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [*answers("pets", "clip", "10"), *answers("pets", "use", "11"), *answers("dtd", "clip", "10")]
    with make_run(tmp_path / "run", rows):
        return tmp_path / "run"


def test_the_table_of_a_run(run: Path) -> None:
    shown = usetta("table", run)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Accuracy, % (ViT-B-16)\n")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["use", "–", "100.00"] in lines
    assert ["paper", "47.61", "87.94", "+12.06"] in lines
    alone = usetta("table", run, "--no-paper").stdout
    assert "paper" not in alone
    assert "100.00" in alone


def test_tables_in_other_formats(run: Path) -> None:
    assert "| clip " in usetta("table", run, "--format", "markdown").stdout
    assert r"\begin{tabular}{lrr}" in usetta("table", run, "-f", "latex").stdout
    rows = list(csv.DictReader(io.StringIO(usetta("table", run, "-f", "csv").stdout)))
    assert [(row["method"], row["column"], row["value"], row["paper"]) for row in rows] == [
        ("clip", "dtd", "50.0", "44.33"),
        ("clip", "pets", "50.0", "88.2"),
        ("use", "dtd", "", "47.61"),
        ("use", "pets", "100.0", "87.94"),
    ]
    found = json.loads(usetta("table", run, "-f", "json").stdout)
    assert found["rows"][1]["cells"]["pets"]["difference"] == 12.06


def test_other_tables(run: Path) -> None:
    assert usetta("table", run, "--metric", "skip_ratio").stdout.startswith("Images that were not tuned on, %")
    metrics = usetta("table", run, "--dataset", "pets", "-f", "json")
    assert json.loads(metrics.stdout)["rows"][1]["cells"]["top1"]["value"] == 100.0
    differences = usetta("table", run, "--baseline", "use", "-f", "csv")
    assert "Pets,clip,difference,-50.0," in differences.stdout


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for command in (["table", tmp_path / "none"], ["export", tmp_path / "none", tmp_path / "rows.csv"]):
        result = usetta(*command)
        assert result.exit_code == 2
        assert result.stderr == f"usetta: there is no run in {tmp_path / 'none'}\n"
    assert list(tmp_path.iterdir()) == []
    Store(tmp_path / "empty")
    assert "has no results yet" in usetta("table", tmp_path / "empty").stderr


def test_rows_are_exported(run: Path, tmp_path: Path) -> None:
    result = usetta("export", run, tmp_path / "rows.jsonl")
    assert (result.exit_code, result.stdout) == (0, f"6 rows: {tmp_path / 'rows.jsonl'}\n")
    assert len((tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 6
    refused = usetta("export", run, tmp_path / "rows.xls")
    assert refused.exit_code == 2
    assert "must end in .parquet, .csv" in refused.stderr


def test_what_can_be_reproduced_is_listed() -> None:
    for command in (["reproduce"], ["reproduce", "--list"], ["reproduce", "table-1", "--list"]):
        result = usetta(*command)
        assert result.exit_code == 0
        names = [line.split(" ")[0] for line in result.stdout.splitlines()]
        assert [name for name in names if name in ITEMS] == list(ITEMS)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """DTD and Pets with three images each, and Food101 without one of its images."""
    root = tmp_path / "data"
    for place, name in enumerate(("dtd", "pets", "food101")):
        make_split(root, name)
        items, folder, _ = SPLITS[name]
        for number, (image, _, _) in enumerate(items):
            make_image(10 * place + number).save(root / folder / image)
    (root / "food-101/images/baklava/3832160.jpg").unlink()
    return root


def test_a_table_of_the_paper_is_measured_and_shown(data: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = tmp_path / "run"
    options = ["--data", data, "--model", tiny_checkpoint, "--out", out, "--seeds", "0", "-f", "json"]
    result = usetta("reproduce", "table-8", *options, "--limit", 2)
    assert result.exit_code == 0, result.stderr
    assert "left out: food101 is incomplete; the first missing file is baklava/3832160.jpg" in result.stderr
    assert f"not in {data}: imagenet, imagenet-a," in result.stderr
    assert "dtd (2 images), pets (2 images)" in result.stderr
    table = json.loads(result.stdout)
    assert [column["name"] for column in table["columns"]] == ["in&o", "fgvc", "avg", "dtd", "pets"]
    assert [row["name"] for row in table["rows"]] == list(ITEMS["table-8"].methods)
    with Store(out, create=False) as store:
        assert {(*group[:3],) for group in store.groups()} == {
            (name, 0, method) for name in ("dtd", "pets") for method in ITEMS["table-8"].methods
        }
        assert {group[3] for group in store.groups()} == {2}
        assert store.facts("run")["views"]["views"] == 64
        right = {row.image: row.label == row.prediction for row in store.rows({"dataset": "dtd", "method": "se"})}
    linear = next(row for row in table["rows"] if row["name"] == "se")
    assert linear["cells"]["dtd"]["value"] == 50 * sum(right.values())

    again = usetta("reproduce", "table-8", *options, "--limit", 2)
    assert "model: " not in again.stderr  # nothing was missing, so none was loaded
    assert again.stdout == result.stdout
    more = usetta("reproduce", "table-8", *options)
    assert "dtd (3 images)" in more.stderr
    without = usetta("reproduce", "table-8", "--out", out, "-f", "json")
    assert without.exit_code == 0
    assert "no --data given, so nothing is measured" in without.stderr
    assert without.stdout == more.stdout


def test_a_figure_of_the_paper_is_written_into_the_run(data: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    out = tmp_path / "run"
    options = ["--data", data, "--model", tiny_checkpoint, "--out", out]
    result = usetta("reproduce", "fig. 2", *options, "--seeds", 3, "--limit", 1)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [str(out / "figure-2.png"), str(out / "figure-2.svg")]
    assert open_image(out / "figure-2.png").width > 300
    assert "no results yet: Flowers102, Caltech101" in result.stderr
    with Store(out) as store:
        assert {seed for _, seed, _, _ in store.groups()} == {3}
    grid = usetta("reproduce", "figure-5", *options, "--seeds", 3, "--limit", 1)
    assert grid.stdout.splitlines() == [str(out / "figure-5.png"), str(out / "figure-5.svg")]


def test_a_bad_image_is_told_and_the_exit_code_is_1(data: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    (data / "oxford_pets/images/Abyssinian_71.jpg").write_bytes(b"no image")
    options = ["--data", data, "--model", tiny_checkpoint, "--out", tmp_path / "run", "--seeds", 0]
    result = usetta("reproduce", "figure-4", *options)
    assert result.exit_code == 1
    assert "usetta: 1 image could not be read: left out of the results" in result.stderr
    assert (tmp_path / "run" / "figure-4.svg").is_file()


def test_an_interrupted_run_can_be_continued(
    data: Path, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("usetta.evaluate.runner.evaluate", interrupted)
    result = usetta("reproduce", "table-8", "--data", data, "--model", tiny_checkpoint, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert "rerun the same command to resume" in result.stderr


def test_prompts_are_those_of_the_table(data: Path, tmp_path: Path, tiny_checkpoint: Path, tiny_model: CLIP) -> None:
    context = tmp_path / "context.safetensors"
    save_context(context, torch.zeros(4, tiny_model.text.width), {"template": "a photo of a {}."})
    options = ["--data", data, "--model", tiny_checkpoint, "--seeds", 0, "--limit", 1, "-f", "json"]
    ensemble = usetta("reproduce", "table-9", *options, "--out", tmp_path / "seven")
    learned = usetta("reproduce", "table-5", *options, "--out", tmp_path / "learned", "--context", context)
    assert (ensemble.exit_code, learned.exit_code) == (0, 0), learned.stderr
    with Store(tmp_path / "seven") as seven, Store(tmp_path / "learned") as started:
        assert seven.facts("run")["prompt"] == {"templates": list(TEMPLATES["ensemble"]), "context": None}
        assert started.facts("run")["prompt"]["templates"] == ["a photo of a {}."]
        assert started.facts("run")["prompt"]["context"]
    for result in (ensemble, learned):
        assert not any("unlike the paper" in note for note in json.loads(result.stdout)["notes"])


def test_methods_that_a_model_cannot_run_are_left_out(
    data: Path, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_blocks(_model: CLIP) -> None:
        raise ValueError("the image tower has no blocks")

    monkeypatch.setattr(CLIP, "last_blocks", no_blocks)
    options = ["--data", data, "--model", tiny_checkpoint, "--out", tmp_path / "run", "--seeds", 0, "--limit", 1]
    result = usetta("reproduce", "table-10", *options)
    assert result.exit_code == 0, result.stderr
    assert "left out: ttl; the image tower has no blocks" in result.stderr
    assert "no results yet of ttl on DTD, Pets" in result.stdout


def test_sizes_need_no_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = usetta("reproduce", "table-11", "--data", data, "-f", "csv")
    rows = {(row["dataset"], row["column"]): row["value"] for row in csv.DictReader(io.StringIO(result.stdout))}
    assert (rows["dtd", "images"], rows["dtd", "classes"], rows["cars", "images"]) == ("3.0", "4.0", "")
    assert not (tmp_path / "runs").exists()


def test_each_model_and_prompt_has_a_run_of_its_own(
    data: Path, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def none(name: str, **_: object) -> None:
        asked.append(name)
        raise ModelError("no model here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("usetta.models.load_model", none)
    result = usetta("reproduce", "figure-7", "--data", data)
    assert (result.exit_code, asked) == (1, ["ViT-B-16"])
    assert "usetta: no model here" in result.stderr
    assert not (tmp_path / "runs").exists()
    places = [run_folder(ITEMS[name], "ViT-B-16", None, alone=True) for name in ("table-1", "table-5", "table-9")]
    assert [place.as_posix() for place in places] == [
        *("runs/paper-ViT-B-16", "runs/paper-ViT-B-16-coop", "runs/paper-ViT-B-16-ensemble")
    ]
    assert run_folder(ITEMS["figure-7"], "RN50", Path("mine"), alone=False) == Path("mine/RN50")
    assert run_folder(ITEMS["table-1"], "weights/my model.pt", None, alone=True) == Path(
        "runs/paper-weights-my-model.pt"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-14"], "unknown table or figure 'table-14'; `usetta reproduce --list` shows all"),
        (["table-5"], "table-5 needs a prompt learned by CoOp: give it with --context"),
        (["table-1", "--context", "c.safetensors"], "table-1 does not use a learned prompt: leave out --context"),
        (["table-1", "--seeds", "0,x"], "--seeds must be whole numbers separated by commas, such as 0,1,2, not '0,x'"),
        (["table-1", "--seeds", ","], "--seeds must be whole numbers"),
        (["table-1", "--data", "nowhere"], "nowhere does not exist"),
        (["table-1", "--out", "nowhere"], "there is no run in nowhere"),
        (["table-1", "--format", "html"], "unknown format 'html'"),
    ],
)
def test_reproduce_refuses_what_it_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = usetta("reproduce", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
