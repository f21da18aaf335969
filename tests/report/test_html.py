"""Tables and images as parts of a page."""

import base64
import io
import math

import pytest
from PIL import Image

from conftest import make_image
from report.pages import Page
from usetta.report.html import fragment, in_plain_words, thumbnail
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
    page = Page(fragment(results()))
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
    html = fragment(results())
    assert html.count("<b>") == 1
    assert "<b>69.31</b> <small>±0.06</small><sup>b</sup>" in html


def test_a_table_without_notes_has_no_list_of_them() -> None:
    page = Page(fragment(Table("t", (Column("a"),), (TableRow("r", {"a": Cell(1.0)}),))))
    assert page.text == "t method a r 1.00"
    assert page.all("ul") == []


def test_a_wide_table_scrolls_and_can_be_reached_by_keyboard() -> None:
    (region,) = Page(fragment(results())).all("div")
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
    page = Page(fragment(table))
    assert page.all("script") == []
    assert page.text.count("<script>alert(1)</script> & \"'") == 7
    assert page.all("div")[0]["aria-label"] == bad


@pytest.mark.parametrize(("size", "small"), [((400, 300), (100, 75)), ((40, 400), (10, 100)), ((60, 40), (60, 40))])
def test_thumbnails_are_small_images_of_the_same_shape(size: tuple[int, int], small: tuple[int, int]) -> None:
    image = make_image(3, size)
    address = thumbnail(image, 100)
    kind, _, content = address.partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as found:
        assert (found.format, found.size) == ("JPEG", small)
    assert image.size == size  # the original stays as it was


def test_every_method_is_told_in_words_even_if_only_its_owner_knows_it() -> None:
    assert in_plain_words("use").startswith("leaves the prompt alone where")
    assert (
        in_plain_words("tpt+se")
        == "tunes the prompt until the most confident views agree (marginal entropy); answers by se"
    )
    assert in_plain_words("mine") == "a method of one's own."
