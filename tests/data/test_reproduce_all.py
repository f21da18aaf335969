"""`usetta reproduce all` from an empty directory, against the server that plays all sources, in miniature."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from data import world
from data.server import Shelf
from usetta.bench import CLIP_64
from usetta.cli import app
from usetta.coop import save_context
from usetta.evaluate import runner
from usetta.evaluate.store import Store
from usetta.models.clip import CLIP
from usetta.report import paper_report, reproduce
from usetta.report.reproduce import ITEMS

DATASETS = ("imagenet", "dtd", "pets", "eurosat")
"""Enough of the fifteen to fill something of every table and figure."""


def usetta(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_everything_from_an_empty_directory(
    stocked: Shelf,
    tmp_path: Path,
    tiny_checkpoint: Path,
    tiny_model: CLIP,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "EvalSettings", functools.partial(runner.EvalSettings, views=3))  # to be quick
    monkeypatch.setattr(reproduce, "_ALL", DATASETS)
    shots = tmp_path / "train"
    for known in world.IMAGENET:
        (shots / known.wnid).mkdir(parents=True)
        (shots / known.wnid / "1.JPEG").write_bytes(world.jpeg(known.wnid))

    def train(
        _model: CLIP, images: list[Path], labels: tuple[int, ...], classes: tuple[str, ...], **options: Any
    ) -> None:
        assert (len(images), labels, classes) == (3, (0, 1, 2), tuple(known.name for known in world.IMAGENET))
        save_context(options["out"], torch.zeros(4, tiny_model.text.width), {"template": "a photo of a {}."})

    monkeypatch.setattr("usetta.coop.train_context", train)
    options = ["--data", tmp_path / "data", "--model", tiny_checkpoint, "--train-coop", shots, "--limit", 1]
    options += ["--cache", tmp_path / "features", "--seeds", "0"]

    planned = usetta("reproduce", "all", *options, "--out", tmp_path / "whole", "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert re.search(r"one template: 4 images, 1 seed, \d\d methods, about \d+\.\d hours", planned.stdout)
    assert "GB to download" in planned.stdout
    assert not (tmp_path / "data").exists()
    monkeypatch.setattr("usetta.bench.seconds_of_methods", lambda job, methods: dict.fromkeys([*methods, CLIP_64], 1.0))

    nothing = usetta("reproduce", "all", *options, "--out", tmp_path / "none", "--no-fetch")
    assert nothing.exit_code == 1
    assert f"not in {tmp_path / 'data'}: imagenet, dtd" in nothing.stderr
    assert "Not shown: table 1 has no results yet; " in " ".join(
        (tmp_path / "none/paper/report.html").read_text().split()
    )

    whole = usetta("reproduce", "all", *options, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.stderr
    page = (tmp_path / "whole/paper/report.html").read_text()
    tables = {path.stem for path in (tmp_path / "whole/paper/tables").iterdir()}
    figures = {path.name.partition(".")[0][:8] for path in (tmp_path / "whole/paper/figures").iterdir()}
    assert tables | figures == set(ITEMS)
    assert all(f'id="{name}"' in page for name in ITEMS)
    assert "Not shown" not in page
    missing = "no results yet: Flowers102, Caltech101, Aircraft, UCF101, Cars, SUN397, Food101"
    assert missing in (tmp_path / "whole/paper/tables/table-2.md").read_text()

    assert "So far" in whole.stderr

    written, add = 0, Store.add

    def interrupted(*arguments: object) -> None:
        nonlocal written
        written += 1
        if written % 3 == 0:
            raise KeyboardInterrupt
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "add", interrupted)
    monkeypatch.setattr(paper_report, "_figures", lambda item, store, out: [])  # they take seconds
    options = [option for option in options if option not in ("--train-coop", shots)]
    attempts = 0
    while (done := usetta("reproduce", "all", *options, "--out", tmp_path / "resumed", "-q")).exit_code == 130:
        assert "rerun the same command to resume" in done.stderr
        attempts += 1
    assert (done.exit_code, attempts > 1) == (0, True), done.stderr
    for name, item in ITEMS.items():
        if item.kind != "figure" and name != "table-10" and not item.coop:  # table 10 has times
            files = [tmp_path / run / "paper/tables" / f"{name}.md" for run in ("whole", "resumed")]
            assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("file", ["github-workflow.yml", "slurm.sh", "ray-job.sh"])
def test_the_examples_use_options_that_exist(file: str) -> None:
    text = (Path(__file__).parents[2] / "examples" / "reproduce" / file).read_text()
    command = re.search(r"usetta reproduce all (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert command
    known = {option for parameter in get_command(app).commands["reproduce"].params for option in parameter.opts}  # type: ignore[attr-defined]
    assert {*re.findall(r"--[a-z-]+", command[1])} <= known
