"""The demonstration, with generated pictures in place of the photographs and a tiny model in place of the real one."""

import html
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import make_picture
from usetta import demo, methods
from usetta.cli import app
from usetta.report.demo import render


@pytest.fixture
def photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A picture under the name of every photograph, few classes, and an empty cache."""
    paths = [tmp_path / "photographs" / photograph.name for photograph in demo.PHOTOGRAPHS]
    paths[0].parent.mkdir()
    for i, path in enumerate(paths):
        make_picture(i).save(path)
    monkeypatch.setattr(demo, "photographs", lambda say: paths)
    monkeypatch.setattr(demo, "CLASSES", ("tabby cat", "red fox", "golden retriever"))  # so that some views disagree
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))
    return paths


def test_it_writes_a_report_with_pictures(photographs: list[Path], tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = ["demo", "--out", str(out), "--model", str(tiny_checkpoint), "--views", "6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    rows = json.loads((out / "answers.json").read_text(encoding="utf-8"))
    assert [row["shows"] for row in rows] == [photograph.shows for photograph in demo.PHOTOGRAPHS]
    for method in ("clip", "se", "tpt", "use"):
        right = sum(row["methods"][method]["right"] for row in rows)
        skipped = sum(row["methods"][method]["why"]["skipped"] is True for row in rows)
        told = f", {skipped} skipped because the views already agree" if skipped else ""
        assert f"{method}: {right} of 12 right{told}\n" in result.stdout
    page = (out / "index.html").read_text(encoding="utf-8")
    for reference in re.findall(r'src="([^"]+)"', page):
        assert (out / reference).stat().st_size > 100
    assert page.count("<article") == 12
    assert "http" not in page  # nothing from elsewhere

    why = [row["methods"]["use"]["why"] for row in rows]
    assert {True, False} == {each["skipped"] for each in why}  # some of each, or the next lines say little
    assert page.count("skipped: the views already agree") == sum(each["skipped"] for each in why)
    for each, article in zip(why, page.split("<article")[1:], strict=True):
        assert html.escape(each["reason"].replace("->", "→").replace("%", "\u00a0%")) in article
    for method in ("clip", "se", "tpt", "use"):
        assert f"<dt>{method}</dt><dd>{demo.IN_PLAIN_WORDS[method]}</dd>" in page

    features = list((tmp_path / "cache" / "demo" / "features").iterdir())
    assert len(features) == 12
    assert CliRunner().invoke(app, command).stdout == result.stdout  # from the cache, and the same


def test_any_methods_can_be_compared(
    photographs: list[Path], tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "PHOTOGRAPHS", demo.PHOTOGRAPHS[:2])
    del photographs[2:]
    command = ["demo", "--out", str(tmp_path / "report"), "--model", str(tiny_checkpoint), "--views", "4"]
    result = CliRunner().invoke(app, [*command, "--methods", "zero-shot,clip,r-tpt,use:steps=2"])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<dt>(.*?)</dt>", page) == ["clip", "r-tpt", "use:steps=2"]
    assert "the views behind the answer of use:steps=2" in page
    assert html.escape(methods.get("r-tpt").description) in page

    wrong = CliRunner().invoke(app, [*command, "--methods", "clip,ues"])
    assert wrong.exit_code == 2
    assert "unknown method 'ues'; did you mean 'use'?" in wrong.stderr


def test_a_page_escapes_what_it_shows() -> None:
    why = {"reason": "<s>", "skipped": None}
    answer = {"label": "<b>", "probability": 1.0, "right": False, "ranked": [], "why": why}
    row = {"shows": "<i>", "file": "a.png", "views": "b.png", "source": "c", "methods": {"clip": answer}}
    page = render([row], about={"clip": "<em>"}, model_name="<script>", views=2, classes=["<u>"])
    assert page.count("&lt;s&gt;") == page.count("&lt;em&gt;") == 1
    assert not re.search(
        r"<(b|i|u|s|em|script)>(?!\w)", page.replace("<b>&lt;script&gt;</b>", "").replace("<b>clip</b>", "")
    )


def test_classes_are_plausible() -> None:
    assert len(demo.CLASSES) == len(set(demo.CLASSES))
    assert 30 <= len(demo.CLASSES) <= 60
    assert len({photograph.name for photograph in demo.PHOTOGRAPHS}) == 12
