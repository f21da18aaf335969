"""The demonstration, with generated pictures in place of the photographs and a tiny model in place of the real one."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import make_picture
from usetta import demo
from usetta.cli import app
from usetta.report.demo import render


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A picture under the name of every photograph, and an empty cache."""
    paths = [tmp_path / "photographs" / photograph.name for photograph in demo.PHOTOGRAPHS]
    paths[0].parent.mkdir()
    for i, path in enumerate(paths):
        make_picture(i).save(path)
    monkeypatch.setattr(demo, "photographs", lambda say: paths)
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))
    return paths


def test_it_writes_a_report_with_pictures(photographs: list[Path], tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = ["demo", "--out", str(out), "--model", str(tiny_checkpoint), "--views", "6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    rows = json.loads((out / "answers.json").read_text(encoding="utf-8"))
    assert [row["shows"] for row in rows] == [photograph.shows for photograph in demo.PHOTOGRAPHS]
    for method in ("clip", "se"):
        right = sum(row["methods"][method]["right"] for row in rows)
        assert f"{method}: {right} of 12 right" in result.stdout
    page = (out / "index.html").read_text(encoding="utf-8")
    for reference in re.findall(r'src="([^"]+)"', page):
        assert (out / reference).stat().st_size > 100
    assert page.count("<article") == 12
    assert "http" not in page  # nothing from elsewhere

    features = list((tmp_path / "cache" / "demo" / "features").iterdir())
    assert len(features) == 12
    assert CliRunner().invoke(app, command).stdout == result.stdout  # from the cache, and the same


def test_a_page_escapes_what_it_shows() -> None:
    answer = {"label": "<b>", "probability": 1.0, "right": False, "ranked": [], "why": {"beta": 1.0}}
    row = {"shows": "<i>", "file": "a.png", "views": "b.png", "source": "c", "methods": {"clip": answer}}
    page = render([row], model_name="<script>", views=2, classes=["<u>"])
    assert not re.search(
        r"<(b|i|u|script)>(?!\w)", page.replace("<b>&lt;script&gt;</b>", "").replace("<b>clip</b>", "")
    )


def test_classes_are_plausible() -> None:
    assert len(demo.CLASSES) == len(set(demo.CLASSES))
    assert 30 <= len(demo.CLASSES) <= 60
    assert len({photograph.name for photograph in demo.PHOTOGRAPHS}) == 12
