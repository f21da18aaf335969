"""The demonstration, with generated images in place of the real ones and a tiny model in place of the real one."""

import html
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import make_image
from report.pages import Page, leave_figures_empty
from usetta import demo, methods
from usetta.cli import app
from usetta.evaluate.store import Store
from usetta.models.clip import CLIP
from usetta.prediction import Explanation
from usetta.report.html import in_plain_words, render

SHOWN = ("folding chair", "horse chestnut", "spoonbill", "goose", "dung beetle")
"""Fewer images are enough; and the tiny model sees a jeep in everything, if it is a class."""


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an image under the name of some images, which are all there are, and so are their classes."""
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "demo"
    folder.mkdir(parents=True)
    kept = tuple(image for image in demo.DEMO_IMAGES if image.shows in SHOWN)
    for i, image in enumerate(kept):
        make_image(i).save(folder / image.name)
    monkeypatch.setattr(demo, "fetch", lambda file, target, say: target)
    monkeypatch.setattr(demo, "DEMO_IMAGES", kept)
    monkeypatch.setattr(demo, "CLASSES", SHOWN)
    return folder


def test_it_writes_a_page_with_images(
    images: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report"
    command = ["demo", "--out", str(out), "--model", str(tiny_checkpoint), "--views", "6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    rows = json.loads((out / "answers.json").read_text(encoding="utf-8"))
    assert [row["shows"] for row in rows] == list(SHOWN)
    for method in ("clip", "se", "tpt", "use"):
        right = sum(row["methods"][method]["right"] for row in rows)
        skipped = sum(row["methods"][method]["why"]["skipped"] is True for row in rows)
        left = f", {skipped} not tuned because their views already agree" if skipped else ""
        assert f"{method}: {right} of 5 correct{left}\n" in result.stdout
    page = (out / "index.html").read_text(encoding="utf-8")
    for reference in re.findall(r'src="([^"]+)"', page):
        assert (out / reference).stat().st_size > 100
    assert page.count("<article") == 5
    assert "http" not in page  # nothing from elsewhere

    why = [row["methods"]["use"]["why"] for row in rows]
    assert {True, False} == {reasons["skipped"] for reasons in why}  # both kinds, or the next lines say little
    assert page.count("skipped: the views already agree") == sum(reasons["skipped"] for reasons in why)
    for reasons, article in zip(why, page.split("<article")[1:], strict=True):
        assert html.escape(reasons["reason"].replace("->", "→").replace("%", "\u00a0%")) in article
    for method in ("clip", "se", "tpt", "use"):
        assert f"<dt>{method}</dt><dd>{in_plain_words(method)}</dd>" in page

    def never(*_: object) -> None:
        raise AssertionError("the image tower was used")

    monkeypatch.setattr(CLIP, "encode_images", never)  # all features are in the cache now
    leave_figures_empty(monkeypatch)
    monkeypatch.setattr(Explanation, "save", lambda self, path, shown: None)
    assert CliRunner().invoke(app, command).stdout == result.stdout


def test_the_run_beside_it_has_the_same_answers_and_a_report(
    images: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_figures_empty(monkeypatch)
    monkeypatch.setattr(Explanation, "save", lambda self, path, shown: None)
    out = tmp_path / "report"
    command = ["demo", "--out", str(out), "--model", str(tiny_checkpoint), "--methods", "clip,use"]
    for views in ("6", "4"):  # the second time in place of the first
        result = CliRunner().invoke(app, [*command, "--views", views])
        assert result.exit_code == 0, result.stderr
    rows = json.loads((out / "answers.json").read_text(encoding="utf-8"))
    with Store(out / "run", create=False) as store:
        assert store.facts("run")["views"]["views"] == 4
        assert store.facts("root") == {"demo": str(images)}
        found = {(row.image, row.method): row for row in store.rows()}
    assert len(found) == 10
    for row in rows:
        for method in ("clip", "use"):
            answer, stored = row["methods"][method], found[row["file"], method]
            assert demo.CLASSES[stored.label] == row["shows"]
            assert demo.CLASSES[stored.prediction] == answer["label"]
            assert stored.confidence == pytest.approx(answer["probability"], abs=1e-6)
            assert stored.skipped == answer["why"]["skipped"]
    right = sum(row.label == row.prediction for row in found.values() if row.method == "use")
    assert f"use: {right} of 5 correct" in result.stdout
    assert Page((out / "index.html").read_text(encoding="utf-8")).all("a")[-1] == {"href": "report.html"}
    assert "2 methods on 1 dataset" in Page((out / "report.html").read_text(encoding="utf-8")).text


def test_a_run_on_something_else_is_left_alone(images: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        store.fix("dataset", "pets", {"title": "Pets"})
    command = ["demo", "--out", str(tmp_path), "--model", str(tiny_checkpoint), "--views", "2", "--methods", "clip"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"{tmp_path / 'run'} contains a run on pets; choose another folder with --out" in result.stderr
    with Store(tmp_path / "run", create=False) as store:
        assert list(store.facts("dataset")) == ["pets"]


def test_any_methods_can_be_compared(
    images: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "DEMO_IMAGES", demo.DEMO_IMAGES[:2])
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
    about, right = {"clip": "<em>"}, {"clip": 0}
    page = render("demo.html.j2", rows=[row], about=about, right=right, model_name="<script>", views=2, classes=["<u>"])
    assert page.count("&lt;s&gt;") == page.count("&lt;em&gt;") == 1
    assert not re.search(
        r"<(b|i|u|s|em|script)>(?!\w)", page.replace("<b>&lt;script&gt;</b>", "").replace("<b>clip</b>", "")
    )
    assert Page(page).text.count("<script>") == 1


def test_classes_are_plausible() -> None:
    assert len(demo.CLASSES) == len(set(demo.CLASSES))
    assert 30 <= len(demo.CLASSES) <= 60
    assert len({image.name for image in demo.DEMO_IMAGES}) == 12
