"""Tables, images and figures as parts of a page, and what of a run goes into the figures."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from conftest import make_image
from report.pages import DRAWINGS, Page
from report.test_tables import results
from usetta.evaluate.metrics import Interval
from usetta.evaluate.store import NO_ORDER, ResultRow, ShownViews, Store, ViewRecord
from usetta.report import html
from usetta.report.html import in_plain_words, table_html, thumbnail
from usetta.report.measured import RunMetrics
from usetta.report.run_images import RunImages
from usetta.report.tables import Cell, Column, Table, TableRow


def test_a_table_has_its_numbers_the_papers_and_its_notes() -> None:
    html_table = table_html(results())
    page = Page(html_table)
    assert page.text == (
        "Accuracy (%) method ImageNet a seconds "
        "without tuning clip 66.70 0.017 paper 66.72 −0.02 – se 69.31 ±0.06 b – paper c 69.15 +0.16 a – "
        "with tuning use d – – paper 69.72 – "
        "a 500 of 50,000 images b one seed c another model d slow "
        "paper: its number, and by how much ours differs from it 3 images could not be read"
    )
    assert len(page.all("tbody")) == 2  # one for each section
    assert html_table.count("<b>") == 1
    assert "<b>69.31</b> <small>±0.06</small><sup>b</sup>" in html_table
    (region,) = page.all("div")
    assert region == {"class": "table", "role": "region", "aria-label": "Accuracy (%)", "tabindex": "0"}


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
    usual = {"confidence": 0.5, "before": None, "skipped": None, "seconds": 1.0, "order": NO_ORDER, "position": None}
    values = {**usual, **more}
    return ResultRow(
        dataset, image, seed, method, 0, 0 if right else 1, values["confidence"], 0.5, 0, 0.5, None, 1.0,
        values["before"], values["skipped"], 64, values["seconds"], values["order"], values["position"],
    )  # fmt: skip


def measured(store: Store, rows: list[ResultRow]) -> RunMetrics:
    store.add(rows)
    return RunMetrics(store, html.ILLUSTRATED_METRICS)


def test_gains_are_drawn_where_there_are_enough_images(given: Given) -> None:
    def gain(dataset: str, images: int) -> TableRow:
        numbers = {"difference": 1.0, "low": -0.5, "high": 2.0, "images": images}
        return TableRow("se", {name: Cell(value) for name, value in numbers.items()}, dataset)

    rows = (gain("a", 100), gain("b", 99), gain("b", 12))
    figure = html.gains(Table("", (), rows), "clip")
    assert given["gains"] == (({"se": {"a": Interval(1.0, -0.5, 2.0)}}, "clip"), {})
    assert figure.drawing is not None
    assert (figure.drawing.width, figure.drawing.url[:22]) == (200, "data:image/png;base64,")
    assert figure.too_few == {"b": 99}
    assert html.gains(Table("", (), rows[1:]), "clip").drawing is None


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
        assert html.skips(store, RunMetrics(store, html.ILLUSTRATED_METRICS, methods={"clip", "tpt"})) is None


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
        store.add([row("d", "1", "se", True)])
        apart = RunMetrics(store, html.ILLUSTRATED_METRICS)
        assert html.cost(apart) is None, "no dataset has all methods"


def in_order(method: str, order: int, signs: str, *, seed: int = 0, dataset: str = "a") -> list[ResultRow]:
    """Answers of a method with a memory, right where `signs` has a 1; images are named so that they sort backwards."""
    return [
        row(dataset, f"{9 - place}", method, sign == "1", seed=seed, order=order, position=place)
        for place, sign in enumerate(signs)
    ]


def test_streams_are_drawn_in_the_order_of_the_images_for_methods_with_a_memory(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        run = measured(
            store,
            [
                row("a", "1", "clip", True),
                *in_order("tda", 0, "1100"),
                *in_order("tda", 1, "0111"),
                *in_order("dmn", 0, "0001"),
            ],
        )
        drawn = html.streams(store, run)
    tda = [[True, True, False, False], [False, True, True, True]]
    assert given["over_the_stream"][0] == ({"tda": tda, "dmn": [[False, False, False, True]]}, 10)
    assert given["order_sensitivity"][0] == ({"tda": [50.0, 75.0]},), "dmn has a single order"
    over, orders = drawn["a"]
    assert orders is not None
    assert over.alt == "Curves: accuracy of each method over the stream of a, the mean over its orders."
    assert orders.alt == "Points: accuracy of each method on a in each order of the stream."


def test_orders_of_different_images_are_not_compared(tmp_path: Path, given: Given) -> None:
    """As in a run that is not finished."""
    with Store(tmp_path) as store:
        rows = [*in_order("tda", 0, "1100"), *in_order("tda", 1, "01"), *in_order("dmn", 0, "0" * 3 + "1" * 117)]
        run = measured(store, [*rows, row("b", "1", "clip", True), *in_order("tda", 0, "1", dataset="c")])
        drawn = html.streams(store, run)
    assert list(drawn) == ["a", "c"], "no method of b has a memory"
    assert [pair[1] for pair in drawn.values()] == [None, None]
    assert "order_sensitivity" not in given
    assert given["over_the_stream"][0] == ({"tda": [[True]]}, 10)


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
