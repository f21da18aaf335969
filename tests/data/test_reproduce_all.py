"""`usetta reproduce all` from an empty directory, against the server that plays all sources, in miniature."""

import functools
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from data import world
from data.server import Shelf
from usetta.cli import app
from usetta.coop import save_context
from usetta.evaluate import runner
from usetta.evaluate.store import Store
from usetta.models.clip import CLIP
from usetta.report.reproduce import ITEMS


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
    context = tmp_path / "context.safetensors"
    save_context(context, torch.zeros(4, tiny_model.text.width), {"template": "a photo of a {}."})
    options = ["--data", tmp_path / "data", "--model", tiny_checkpoint, "--context", context, "--limit", 1]
    options += ["--cache", tmp_path / "features", "--seeds", "0"]

    planned = usetta("reproduce", "all", *options, "--out", tmp_path / "whole", "--dry-run")
    assert planned.exit_code == 0, planned.stderr
    assert re.search(r"one template: 15 images, 1 seeds, \d\d methods, about \d+\.\d hours", planned.stdout)
    assert "GB to download" in planned.stdout
    assert not (tmp_path / "data").exists()

    first = usetta("reproduce", "all", *options, "--out", tmp_path / "whole")
    assert first.exit_code == 1  # UCF101's middle frames are missing
    assert "1. Download UCF-101-midframes.zip" in first.stdout
    assert "no results yet: UCF101" in (tmp_path / "whole/paper/tables/table-2.md").read_text()
    world.take_steps_by_hand(tmp_path / "data")
    whole = usetta("reproduce", "all", *options, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.stderr
    page = (tmp_path / "whole/paper/report.html").read_text()
    tables = {path.stem for path in (tmp_path / "whole/paper/tables").iterdir()}
    figures = {path.name.partition(".")[0][:8] for path in (tmp_path / "whole/paper/figures").iterdir()}
    assert tables | figures == set(ITEMS)
    assert all(f'id="{name}"' in page for name in ITEMS)
    assert "Not shown" not in page
    assert "no results yet" not in (tmp_path / "whole/paper/tables.md").read_text()

    written, add = 0, Store.add

    def interrupted(*arguments: object) -> None:
        nonlocal written
        written += 1
        if written % 9 == 0:
            raise KeyboardInterrupt
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "add", interrupted)
    attempts = 0
    while (done := usetta("reproduce", "all", *options, "--out", tmp_path / "resumed")).exit_code == 130:
        assert "rerun the same command to resume" in done.stderr
        attempts += 1
    assert (done.exit_code, attempts > 2) == (0, True), done.stderr
    for path in sorted((tmp_path / "whole/paper/tables").iterdir()):
        if path.stem != "table-10":  # which has times
            assert path.read_bytes() == (tmp_path / "resumed/paper/tables" / path.name).read_bytes()
