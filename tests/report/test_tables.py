import csv
import io
import json
import math
from textwrap import dedent

import numpy as np
import pytest
from rich.console import Console

from report.stores import printed
from usetta.report import tables
from usetta.report.tables import Cell, Column, Table, TableRow


def results() -> Table:
    """Two sections; a standard deviation, paper's numbers, missing cells, and a note of every kind."""
    return Table(
        "Accuracy (%)",
        (Column("imagenet", "ImageNet", notes=("500 of 50,000 images",)), Column("seconds", digits=3, best="low")),
        (
            TableRow("clip", {"imagenet": Cell(66.7, paper=66.72), "seconds": Cell(0.0171)}, "without tuning"),
            TableRow(
                "se",
                {"imagenet": Cell(69.314, 0.06, 69.15, ("one seed",), ("500 of 50,000 images",))},
                "without tuning",
                paper_notes=("another model",),
            ),
            TableRow("use", {"seconds": Cell(math.nan), "imagenet": Cell(paper=69.72)}, "with tuning", notes=("slow",)),
        ),
        notes=("3 images could not be read",),
    )


def test_the_terminal_shows_the_papers_numbers_below_ours() -> None:
    assert printed(results()) == dedent(
        """\
        Accuracy (%)

        method          ImageNetᵃ     seconds
        ─────────────────────────────────────
        without tuning
        clip            66.70         0.017
          paper         66.72 −0.02       –
        se              69.31±0.06ᵇ       –
          paperᶜ        69.15 +0.16ᵃ      –
        ─────────────────────────────────────
        with tuning
        useᵈ                –             –
          paper         69.72             –

        ᵃ 500 of 50,000 images
        ᵇ one seed
        ᶜ another model
        ᵈ slow
          paper: its number, and by how much ours differs from it
          3 images could not be read
        """
    )


def test_markdown() -> None:
    assert tables.markdown(results()) == dedent(
        """\
        **Accuracy (%)**

        | method                  |        ImageNet<sup>a</sup> | seconds |
        | ----------------------- | --------------------------: | ------: |
        | *without tuning*        |                             |         |
        | clip                    |                       66.70 |   0.017 |
        | &emsp;paper             |                 66.72 −0.02 |       – |
        | se                      | **69.31** ±0.06<sup>b</sup> |       – |
        | &emsp;paper<sup>c</sup> |     69.15 +0.16<sup>a</sup> |       – |
        | *with tuning*           |                             |         |
        | use<sup>d</sup>         |                           – |       – |
        | &emsp;paper             |                       69.72 |       – |

        <sup>a</sup> 500 of 50,000 images

        <sup>b</sup> one seed

        <sup>c</sup> another model

        <sup>d</sup> slow

        paper: its number, and by how much ours differs from it

        3 images could not be read
        """
    )


def test_latex() -> None:
    assert tables.latex(results()) == dedent(
        r"""
        \begin{table}
        \caption{Accuracy (\%)}
        \centering
        \begin{tabular}{lrr}
        \toprule
        method & ImageNet\textsuperscript{a} & seconds \\
        \midrule
        \multicolumn{3}{l}{\emph{without tuning}} \\
        clip & 66.70 & 0.017 \\
        \quad paper & 66.72 {\scriptsize $-$0.02} & -- \\
        se & \textbf{69.31} {\scriptsize $\pm$0.06}\textsuperscript{b} & -- \\
        \quad paper\textsuperscript{c} & 69.15 {\scriptsize +0.16}\textsuperscript{a} & -- \\
        \midrule
        \multicolumn{3}{l}{\emph{with tuning}} \\
        use\textsuperscript{d} & -- & -- \\
        \quad paper & 69.72 & -- \\
        \bottomrule
        \end{tabular}
        \par\smallskip\footnotesize \textsuperscript{a} 500 of 50,000 images
        \par \textsuperscript{b} one seed
        \par \textsuperscript{c} another model
        \par \textsuperscript{d} slow
        \par paper: its number, and by how much ours differs from it
        \par 3 images could not be read
        \end{table}
        """
    ).lstrip("\n")


def test_csv_has_one_line_per_cell() -> None:
    assert tables.as_csv(results()) == dedent(
        """\
        section,method,column,value,std,paper,difference,notes
        without tuning,clip,imagenet,66.7,,66.72,-0.02,"500 of 50,000 images"
        without tuning,clip,seconds,0.0171,,,,
        without tuning,se,imagenet,69.314,0.06,69.15,0.164,"500 of 50,000 images; one seed; another model"
        without tuning,se,seconds,,,,,
        with tuning,use,imagenet,,,69.72,,"500 of 50,000 images; slow"
        with tuning,use,seconds,,,,,slow
        """
    )


def test_json_holds_everything_and_no_nan() -> None:
    stored = json.loads(tables.as_json(results()), parse_constant=pytest.fail)
    assert stored["title"] == "Accuracy (%)"
    assert stored["notes"] == ["3 images could not be read"]
    assert [column["name"] for column in stored["columns"]] == ["imagenet", "seconds"]
    assert stored["columns"][1]["best"] == "low"
    assert [row["name"] for row in stored["rows"]] == ["clip", "se", "use"]
    assert stored["rows"][1]["paper_notes"] == ["another model"]
    assert stored["rows"][1]["cells"]["imagenet"] == {
        "value": 69.314,
        "std": 0.06,
        "paper": 69.15,
        "difference": 0.164,
        "notes": ["one seed"],
        "paper_notes": ["500 of 50,000 images"],
    }
    assert stored["rows"][2]["cells"]["seconds"]["value"] is None


def test_rows_of_the_same_name_keep_their_own_numbers() -> None:
    rows = (TableRow("use", {"pets": Cell(1.0)}, "ViT-B-16"), TableRow("use", {"pets": Cell(2.0)}, "RN50"))
    stored = json.loads(tables.as_json(Table("", (Column("pets"),), rows)))
    assert [row["cells"]["pets"]["value"] for row in stored["rows"]] == [1.0, 2.0]


def bold(table: Table) -> list[str]:
    """The numbers that markdown makes bold, below the title."""
    return tables.markdown(table).split("\n", 1)[1].split("**")[1::2]


def one_column(*values: float | None, best: str = "high", sections: str = "") -> Table:
    rows = [
        TableRow(f"m{i}", {"pets": Cell(value)}, section)
        for i, (value, section) in enumerate(zip(values, sections or [""] * len(values), strict=True))
    ]
    return Table("", (Column("pets", best=best),), tuple(rows))  # type: ignore[arg-type]


def test_the_best_numbers_of_a_column_and_section_are_bold() -> None:
    assert bold(one_column(1.0, 3.0, 2.0)) == ["3.00"]
    assert bold(one_column(1.0, 3.0, 2.0, best="low")) == ["1.00"]
    assert bold(one_column(1.0, 3.0, 2.0, best="none")) == bold(one_column(1.0, None, math.nan)) == []
    assert bold(one_column(3.001, 3.0, 2.99)) == ["3.00", "3.00"], "equal as they are shown"
    assert bold(one_column(1.0, 3.0, 5.0, 4.0, sections="aabb")) == ["3.00", "5.00"]
    assert bold(one_column(1.0, 3.0, 5.0, sections="aab")) == ["3.00"]


def test_the_difference_is_that_of_the_numbers_shown() -> None:
    table = Table("", (Column("pets"),), (TableRow("se", {"pets": Cell(69.145, paper=69.156)}),))
    assert "69.14 " in tables.markdown(table)
    assert "69.16 −0.02 " in tables.markdown(table)
    nothing = Table("", (Column("pets"),), (TableRow("se", {"pets": Cell(-0.001, paper=0.0)}),))
    assert "| 0.00 +0.00 |" in tables.markdown(nothing)
    assert Cell(69.145, paper=69.156).difference == pytest.approx(-0.011)


def test_what_bold_means_in_a_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    console.print(tables.terminal(one_column(1.0, 3.0)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1m3.00\x1b[0m" in text
    assert "\x1b[1m1.00" not in text


def wide() -> Table:
    names = [f"set{i}" for i in range(15)]
    cells = {name: Cell(50.0 + i, 0.1, 51.0) for i, name in enumerate(names)}
    return Table(
        "Fifteen sets", tuple(map(Column, names)), (TableRow("clip", cells), TableRow("se:rescaling=root", cells))
    )


@pytest.mark.parametrize(("width", "parts"), [(80, 4), (120, 3), (300, 1), (40, 15)])
def test_a_wide_table_goes_on_below_itself(width: int, parts: int) -> None:
    text = printed(wide(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    heads = [line.split() for line in text.splitlines() if line.startswith("method")]
    assert len(heads) == parts
    assert [name for head in heads for name in head[1:]] == [f"set{i}" for i in range(15)]
    assert max(map(len, heads)) - min(map(len, heads)) <= 1
    assert text.count("se:rescaling=root") == parts
    assert all(f"{50 + i}.00±0.10" in text for i in range(15))


def test_a_long_name_is_folded_and_not_cut() -> None:
    name = "use:steps=4:gamma=0.2:beta=uniform:rescaling=square"
    lines = printed(Table("", (Column("pets"),), (TableRow(name, {"pets": Cell(1.0)}),)), 40).splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(line[:20].strip() for line in lines[4:]) == name


def test_what_means_something_to_latex_is_escaped() -> None:
    odd = r"50% & $5 #1 a_b {x} ~ ^ \ [*] <|> " + '"q"'
    text = tables.latex(Table(odd, (Column("x", odd),), (TableRow(odd, {"x": Cell(1.0, notes=(odd,))}),), notes=(odd,)))
    escaped = (
        r"50\% \& \$5 \#1 a\_b \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} {[}{*}{]} "
        r"\textless{}\textbar{}\textgreater{} ''q''"
    )
    assert text.count(escaped) == 5
    assert text.replace(escaped, "").count("&") == 2  # one separator in the heading, one in the row
    assert "β = 0.5 … – ± 1 − 2".translate(tables._LATEX) == r"$\beta$ = 0.5 \dots{} -- $\pm$ 1 $-$ 2"


def test_what_means_something_to_markdown_or_rich_is_shown_as_it_is() -> None:
    table = Table("[bold]t[/bold]", (Column("a|b"),), (TableRow("se_stats*", {"a|b": Cell(1.0, notes=("<b>",))}),))
    text = tables.markdown(table)
    assert r"**\[bold\]t\[/bold\]**" in text
    assert "| method      |             a\\|b |" in text
    assert r"| se\_stats\*" in text
    assert r"<sup>a</sup> \<b\>" in text
    assert "[bold]t[/bold]" in printed(table)


def test_unicode_and_line_breaks() -> None:
    table = Table(
        "Größe\nβ",
        (Column("x", "名前"),),
        (TableRow("naïve\tmethod", {"x": Cell(1.0)}), TableRow("名", {"x": Cell(2.0)})),
    )
    assert printed(table) == dedent(
        """\
        Größe β

        method        名前
        ──────────────────
        naïve method  1.00
        名            2.00
        """
    )
    assert r"\caption{Größe $\beta$}" in tables.latex(table)
    assert [row[1] for row in csv.reader(io.StringIO(tables.as_csv(table)))] == ["method", "naïve\tmethod", "名"]
    assert json.loads(tables.as_json(table))["title"] == "Größe\nβ"


def test_numbers_of_numpy_are_numbers() -> None:
    table = Table("", (Column("x"),), (TableRow("se", {"x": Cell(np.float64(1.5), np.float32(0.25), np.array(1.0))}),))  # type: ignore[arg-type]
    assert json.loads(tables.as_json(table))["rows"][0]["cells"]["x"]["difference"] == 0.5
    assert "1.50±0.25" in printed(table)


def test_more_notes_than_letters() -> None:
    rows = tuple(TableRow(f"m{i}", notes=(f"note {i}",)) for i in range(27))
    text = tables.markdown(Table("", (Column("x"),), rows))
    assert "| m0<sup>a</sup>" in text
    assert "| m24<sup>z</sup>" in text
    assert "| m25<sup>aa</sup>" in text
    assert "<sup>bb</sup> note 26" in text
    assert "q</sup>" not in text


def test_a_table_without_rows_or_columns_is_still_a_table() -> None:
    empty = Table("Nothing yet", (), (), notes=("no images",))
    assert printed(empty) == "Nothing yet\n\n  no images\n"
    assert tables.markdown(empty) == "**Nothing yet**\n\n| method |\n| ------ |\n\nno images\n"
    for render in tables.FORMATS.values():
        assert render(empty)
        assert render(Table("", (Column("x"),), ()))
