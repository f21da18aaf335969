"""`usetta reproduce all` from an empty directory, against the server that plays all sources, in miniature."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from data import world
from data.server import Shelf
from usetta.bench import CLIP_64, BenchSettings
from usetta.cli import app
from usetta.coop import save_context
from usetta.evaluate import runner
from usetta.evaluate.store import Store
from usetta.models import ModelError
from usetta.models.clip import CLIP
from usetta.report import paper_report, reproduce
from usetta.report.reproduce import ITEMS

FIGURES = {f"{name}.{kind}" for name in ("figure-7-ViT-B-16", "figure-7-RN50") for kind in ("png", "svg")} | {
    f"figure-{number}.{kind}" for number in range(2, 7) for kind in ("png", "svg")
}
TABLES = {f"{name}.{kind}" for name, item in ITEMS.items() if item.kind != "figure" for kind in ("md", "tex")}


def usetta(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def written(paper: Path) -> dict[str, bytes]:
    """All files of a report without table 10, which has times; where it is a part of a file, it is cut out.

    A process that was killed while it wrote a file may leave a hidden one behind, which nobody reads.
    """
    visible = [path for path in paper.rglob("*") if path.is_file() and not path.name.startswith(".")]
    files = {path.relative_to(paper).as_posix(): path.read_bytes() for path in visible}
    for kind in ("md", "tex"):
        table = files.pop(f"tables/table-10.{kind}")
        assert files[f"tables.{kind}"].count(table) == 1
        files[f"tables.{kind}"] = files[f"tables.{kind}"].replace(table, b"")
    sections = files["report.html"].split(b"<section")
    files["report.html"] = b"<section".join(part for part in sections if not part.startswith(b' id="table-10"'))
    assert len(sections) == len(files["report.html"].split(b"<section")) + 1
    return files


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_files(stocked: Shelf, tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests}{os.pathsep}{tests.parent / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "data.rehearsal", str(tmp_path), stocked.url, "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["whole"], report["struck"], report["killed"]) == (0, -9, 0), done.stderr
    codes, datasets, answers = zip(*report["random"], strict=True)
    assert set(codes) == {-9}
    assert list(answers) == sorted(answers)  # what is saved stays
    assert datasets[0] < 15  # the first was fetching
    assert len({number for number in answers if number}) >= 2  # and two or more were measuring
    assert report["progress"][0] == report["progress"][1]
    assert report["progress"][0][0] == 15

    whole, killed = (written(tmp_path / run / "runs/paper") for run in ("whole", "killed"))
    assert {name for name, content in whole.items() if killed.get(name) != content} == set()
    assert whole.keys() == killed.keys()
    expected = {f"tables/{name}" for name in TABLES} | {f"figures/{name}" for name in FIGURES}
    assert whole.keys() | {f"tables/table-10.{kind}" for kind in ("md", "tex")} == (
        expected | {"tables.md", "tables.tex", "report.html"}
    )
    page = (tmp_path / "whole/runs/paper/report.html").read_text()
    assert all(f'id="{name}"' in page for name in ITEMS)
    assert "Not shown" not in page
    assert all(f"Figure 7 ({model}): USE with other values of" in page for model in ("ViT-B-16", "RN50"))
    table = (tmp_path / "whole/runs/paper/tables/table-2.md").read_text()
    assert "no results" not in table
    assert (tmp_path / "whole/stderr.txt").read_text().count("So far (RN50)") == 15


def test_the_plan_comes_first(
    stocked: Shelf, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "usetta.bench.seconds_of_methods", lambda job, methods: dict.fromkeys(methods, 0) | {CLIP_64: 360}
    )
    options = ["--data", tmp_path / "data", "--out", tmp_path / "runs", "--limit", 2, "--dry-run"]
    planned = usetta("reproduce", "all", *options, "--model", tiny_checkpoint, "--seeds", "0,1,2")
    assert planned.exit_code == 0, planned.stderr
    lines = planned.stdout.splitlines()
    assert re.search(r"one template: 30 images, 3 seeds, \d\d methods, about 9\.0 hours", lines[0])
    assert "about 18.0 hours on this machine" in lines  # with seven templates again
    assert "GB to download" in lines[-1]
    assert not (tmp_path / "data").exists()
    assert stocked.requests == []

    def fails(job: BenchSettings, methods: list[str]) -> dict[str, float]:
        if job.model == "RN50":
            raise ModelError("no weights")
        return dict.fromkeys(methods, 0.0) | {CLIP_64: 30.0}

    monkeypatch.setattr("usetta.bench.seconds_of_methods", fails)
    partly = usetta("reproduce", "all", *options)
    assert "warning: the time of RN50 cannot be measured: no weights" in partly.stderr
    assert "about 30 minutes" in partly.stdout.splitlines()[0]  # 30 images, two seeds
    assert "about 1.0 hours on this machine, without RN50" in partly.stdout

    absent = usetta("reproduce", "all", *options[:-1], "--model", tiny_checkpoint, "--no-fetch")
    assert absent.exit_code == 1
    assert f"not in {tmp_path / 'data'}: imagenet, imagenet-a" in absent.stderr
    page = " ".join((tmp_path / "runs/paper/report.html").read_text().split())
    assert "Not shown: table 1 has no results yet; " in page


def test_a_context_is_learned_first_and_ctrl_c_ends_it(
    stocked: Shelf,
    tmp_path: Path,
    tiny_checkpoint: Path,
    tiny_model: CLIP,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "EvalSettings", functools.partial(runner.EvalSettings, views=3))  # to be quick
    monkeypatch.setattr(reproduce, "_ALL", ("dtd",))
    monkeypatch.setattr(paper_report, "_figures", lambda item, store, out: [])
    monkeypatch.setattr("usetta.bench.seconds_of_methods", lambda job, methods: dict.fromkeys([*methods, CLIP_64], 1.0))
    shots = tmp_path / "train"
    for known in world.IMAGENET:
        (shots / known.wnid).mkdir(parents=True)
        (shots / known.wnid / "1.JPEG").write_bytes(world.jpeg(known.wnid))

    def train(
        _model: CLIP, images: list[Path], labels: tuple[int, ...], classes: tuple[str, ...], **options: Any
    ) -> None:
        assert (len(images), labels, classes) == (3, (0, 1, 2), tuple(known.name for known in world.IMAGENET))
        if not options["out"].exists():  # a finished one is taken as it is
            save_context(options["out"], torch.zeros(4, tiny_model.text.width), {"template": "a photo of a {}."})

    monkeypatch.setattr("usetta.coop.train_context", train)
    count, add = 0, Store.add

    def interrupted(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "add", interrupted)
    options = ["--data", tmp_path / "data", "--out", tmp_path / "runs", "--model", tiny_checkpoint]
    options += ["--train-coop", shots, "--limit", 1, "--seeds", "0"]
    stopped = usetta("reproduce", "all", *options)
    assert stopped.exit_code == 130
    assert "rerun the same command to resume" in stopped.stderr
    done = usetta("reproduce", "all", *options)
    assert done.exit_code == 0, done.stderr
    assert "learning CoOp's context" in done.stderr
    assert (tmp_path / "runs" / "coop-context.safetensors").is_file()
    others = "no results yet: Flowers102, Caltech101, Aircraft, Pets, UCF101, Cars, EuroSAT, SUN397, Food101"
    assert others in (tmp_path / "runs/paper/tables/table-2.md").read_text()


@pytest.mark.parametrize("file", ["github-workflow.yml", "slurm.sh", "ray-job.sh"])
def test_the_examples_use_options_that_exist(file: str) -> None:
    text = (Path(__file__).parents[2] / "examples" / "reproduce" / file).read_text()
    command = re.search(r"usetta reproduce all (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert command
    known = {option for parameter in get_command(app).commands["reproduce"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {*re.findall(r"--[a-z-]+", command[1])} <= known
