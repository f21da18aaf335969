"""Tables, images and figures as parts of a page, and what of a run goes into the figures."""

import base64
import io
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from conftest import make_image
from report.pages import DRAWINGS, Page
from usetta.evaluate.store import ResultRow, ShownViews, Store, ViewRecord
from usetta.report import html
from usetta.report.html import in_plain_words, table_html, thumbnail
from usetta.report.measured import RunMetrics
from usetta.report.run_images import RunImages
from usetta.report.tables import Cell, Column, Table, TableRow


def results() -> Table:
    """Two sections, a standard deviation, paper's numbers, missing cells and notes."""
    return Table(
        "Accuracy, %",
        (Column("pets", "Pets", notes=("16 of 370 images",)), Column("seconds", digits=3, best="low")),
        (
            TableRow("clip", {"pets": Cell(66.7, paper=66.72), "seconds": Cell(0.017)}, "without tuning"),
            TableRow("se", {"pets": Cell(69.314, 0.06, notes=("one seed",))}, "without tuning"),
            TableRow("use", {"pets": Cell(math.nan)}, "with tuning", notes=("slow",)),
        ),
        notes=("3 images could not be read",),
    )


def test_a_table_has_its_numbers_the_papers_and_its_notes() -> None:
    page = Page(table_html(results()))
    assert page.text == (
        "Accuracy, % method Pets a seconds "
        "without tuning clip 66.70 0.017 paper 66.72 −0.02 – se 69.31 ±0.06 b – "
        "with tuning use c – – "
        "a 16 of 370 images b one seed c slow "
        "paper: its number, and by how much ours differs from it 3 images could not be read"
    )
    assert [row.get("class") for row in page.all("tr")] == [None, "section", "ours", "paper", "ours", "section", "ours"]
    assert len(page.all("tbody")) == 2  # one for each section


def test_the_best_number_alone_is_bold() -> None:
    text = table_html(results())
    assert text.count("<b>") == 1
    assert "<b>69.31</b> <small>±0.06</small><sup>b</sup>" in text


def test_a_table_without_notes_has_no_list_of_them() -> None:
    page = Page(table_html(Table("t", (Column("a"),), (TableRow("r", {"a": Cell(1.0)}),))))
    assert page.text == "t method a r 1.00"
    assert page.all("ul") == []


def test_a_wide_table_scrolls_and_can_be_reached_by_keyboard() -> None:
    (region,) = Page(table_html(results())).all("div")
    assert region == {"class": "table", "role": "region", "aria-label": "Accuracy, %", "tabindex": "0"}


def test_a_table_escapes_every_text() -> None:
    bad = "<script>alert(1)</script> & \"'"
    table = Table(
        bad,
        (Column("c", bad, notes=(bad,)),),
        (TableRow(bad, {"c": Cell(1.0)}, section=bad),),
        corner=bad,
        notes=(bad,),
    )
    page = Page(table_html(table))
    assert page.all("script") == []
    assert page.text.count("<script>alert(1)</script> & \"'") == 7
    assert page.all("div")[0]["aria-label"] == bad


@pytest.mark.parametrize(("size", "small"), [((400, 300), (100, 75)), ((40, 400), (10, 100)), ((60, 40), (60, 40))])
def test_thumbnails_are_small_images_of_the_same_shape(size: tuple[int, int], small: tuple[int, int]) -> None:
    image = make_image(3, size)
    address = thumbnail(image, 100)
    kind, _, content = address.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as shown:
        assert (shown.format, shown.size) == ("JPEG", small)
    assert image.size == size  # the original stays as it was


def test_every_method_has_a_description_also_one_that_is_not_installed() -> None:
    assert in_plain_words("use").startswith("leaves the prompt alone where")
    assert (
        in_plain_words("tpt+se")
        == "tunes the prompt until the most confident views agree (marginal entropy); answers by se"
    )
    assert in_plain_words("mine") == "a method that is not part of usetta."


Given = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """What each figure was asked to show."""
    calls: Given = {}

    def drawing(name: str) -> Any:
        def draw(*data: Any, **more: Any) -> Figure:
            calls[name] = data, more
            return Figure(figsize=(2, 1))

        return draw

    for module, name in DRAWINGS:
        monkeypatch.setattr(module, name, drawing(name))
    return calls


def row(dataset: str, image: str, method: str, right: bool, *, seed: int = 0, **more: Any) -> ResultRow:
    """An answer about an image that shows class 0."""
    usual = {"confidence": 0.5, "before": None, "skipped": None, "seconds": 1.0}
    values = {**usual, **more}
    return ResultRow(
        dataset, image, seed, method, 0, 0 if right else 1, values["confidence"], 0.5, 0, 0.5, None, 1.0,
        values["before"], values["skipped"], 64, values["seconds"],
    )  # fmt: skip


def measured(store: Store, rows: list[ResultRow]) -> RunMetrics:
    store.add(rows)
    return RunMetrics(store, html.ILLUSTRATED_METRICS)


def test_gains_have_the_mean_over_seeds_and_its_deviation(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        rows = [row("a", "1", "clip", False, seed=seed) for seed in (0, 1)]
        run = measured(store, [*rows, row("a", "1", "se", True), row("a", "1", "se", False, seed=1)])
        drawn = html.gains(run, "clip")
        assert given["gains"] == (
            ({"clip": {"a": 0.0}, "se": {"a": 50.0}}, "clip"),
            {"std": {"clip": {"a": 0.0}, "se": {"a": 50.0}}},
        )
        assert drawn is not None
        assert drawn.width == 200
        assert drawn.url.startswith("data:image/png;base64,")
        assert html.gains(run, "use") is None
        assert html.gains(RunMetrics(store, ("top1",), {"none"}), "clip") is None


def test_reliability_takes_all_datasets_and_seeds_together(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        run = measured(
            store,
            [
                row("a", "1", "clip", True, confidence=0.9),
                row("a", "1", "clip", False, confidence=0.8, seed=1),
                row("b", "1", "clip", True, confidence=0.7),
                row("b", "1", "use", False, confidence=0.6),
            ],
        )
        html.reliability(store, run)
    assert given["reliability"][0] == (
        {"clip": [0.9, 0.8, 0.7], "use": [0.6]},
        {"clip": [True, False, True], "use": [False]},
    )


def test_skips_are_those_of_the_last_method_that_skips(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        run = measured(
            store,
            [
                row("a", "1", "clip", True),
                row("a", "1", "rce", True, before=0, skipped=True),
                row("a", "1", "tpt", True, before=0, skipped=False),
                row("a", "1", "use", True, before=0, skipped=True),
                row("a", "2", "use", True, before=1, skipped=False),
                row("a", "3", "use", True, before=1, skipped=False),
                row("a", "4", "use", False, before=1, skipped=False),
            ],
        )
        skips = html.skips(store, run)
        assert skips is not None
        assert skips[0] == "use"
        assert given["skips"][0] == ({"a": 25.0}, {"a": 25.0}, {"a": 75.0})


def test_without_skipped_images_there_is_no_figure_of_them(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        run = measured(store, [row("a", "1", "clip", True), row("a", "1", "tpt", True, before=0, skipped=False)])
        assert html.skips(store, run) is None


def test_cost_is_compared_on_the_datasets_that_all_methods_have(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        run = measured(
            store,
            [
                row("a", "1", "clip", True, seconds=1.0),
                row("b", "1", "clip", False, seconds=3.0),
                row("a", "1", "use", True, seconds=4.0),
                row("b", "1", "use", True, seconds=6.0),
                row("c", "1", "use", True, seconds=1000.0),
            ],
        )
        html.cost(run)
        assert given["cost"][0] == ({"clip": 2.0, "use": 5.0}, {"clip": 50.0, "use": 100.0})
        assert html.mean_over_datasets(run, "top1") == {"clip": 50.0, "use": 100.0}


def test_nothing_in_common_has_no_cost_and_no_mean(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        run = measured(store, [row("a", "1", "clip", True), row("b", "1", "use", True)])
        assert html.cost(run) is None
        assert html.mean_over_datasets(run, "top1") == {}


def test_datasets_with_the_same_title_go_by_their_names(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for name, title in (("a", "Pets"), ("b", "Pets"), ("c", "Cars")):
            store.fix("dataset", name, {"title": title})
        run = measured(store, [row(name, "1", "clip", True) for name in "abc"])
        assert html.titles(run) == {"a": "a", "b": "b", "c": "Cars"}


def test_typical_views_are_spread_over_datasets_and_images(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path / "run") as store:
        recipe = {"views": 4, "size": 16, "scale": [0.08, 1.0], "ratio": [0.75, 1.5], "severity": 1.0}
        store.fix("run", "views", recipe)
        for name in "abc":
            (tmp_path / name).mkdir()
            store.fix("dataset", name, {"title": name, "augmix": False})
            store.note("root", name, str(tmp_path / name))
            store.note("classes", name, [f"{name} cat", f"{name} dog"])
            for i in range(4):
                make_image(i).save(tmp_path / name / f"{i}.png")
        rows = [row(name, f"{i}.png", "clip", True) for name in "abc" for i in range(4)]
        seen = [
            ShownViews(answer.dataset, answer.image, 0, (ViewRecord(0, 0, 0.5), ViewRecord(3, 1, 0.25)))
            for answer in rows
        ]
        store.add([], seen)
        run = measured(store, rows)
        (tmp_path / "b" / "1.png").unlink()
        drawn = html.typical_views(store, run, RunImages(store))
    ((images,), _) = given["view_grid"]
    assert [image.label for image in images] == ["a cat", "a cat", "b cat"]  # four, and one of them is gone
    for image in images:
        assert [(view.label[2:], view.entropy) for view in image.views] == [("cat", 0.5), ("dog", 0.25)]
        assert all(view.image.shape == (16, 16, 3) for view in image.views)
    assert drawn is not None
    assert drawn.url.startswith("data:image/jpeg;base64,")
    assert "a cat: a cat, a dog; a cat: a cat, a dog; b cat: b cat, b dog" in drawn.alt
