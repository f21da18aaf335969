"""Styles of methods, and names in figures."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from usetta import methods
from usetta.evaluate.metrics import Interval
from usetta.report import explain, figures, style


def test_the_styles_of_methods_differ_in_every_way() -> None:
    result = style.series_styles(methods.names())
    assert list(result) == methods.names()
    assert len({look.marker for look in result.values()}) == len(result)
    assert {look.colour for look in result.values()} <= set(style.COLOURS)
    shared = {explain.COUNTS, explain.TUNED_ON, explain.WEAK, explain.ZERO_SHOT, explain.BEFORE, explain.METHOD}
    assert shared <= set(style.COLOURS), "as in the figure of `usetta explain`"


def test_another_process_derives_the_same_styles_and_needs_no_pyplot() -> None:
    code = (
        "import sys, usetta.report.figures as f; print(f.series_styles(['mine']), 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == f"{style.series_styles(['mine'])} False\n"


def test_a_method_without_a_fixed_style_gets_one_by_its_name() -> None:
    assert style.series_styles(["mine"])["mine"] == style.series_styles(["use", "others", "mine"])["mine"]
    base, plugged, other = style.series_styles(["tpt", "tpt+se", "tpt:steps=2"]).values()
    assert base.colour == plugged.colour == other.colour
    many = style.series_styles(
        [*methods.names(), *(f"use:steps={i}" for i in range(40)), *(f"mine{i}" for i in range(40))]
    )
    assert len(set(many.values())) == len(many)
    own = style.series_styles(methods.names()).values()
    assert not any(style.series_styles([name])[name] in own for name in many if name not in methods.names())


def test_names_are_cut_in_the_middle_and_cleaned() -> None:
    assert style.fit("short", 100) == "short"
    cut = style.fit("the dataset, version 1", 60)
    assert cut == "the d…ion 1"
    assert style.text_width(cut) <= 60
    assert style.fit("a\nb\t c\x00\ud800", 100) == "a b c\ufffd\ufffd"
    assert style.fit("x" * 5000, 50).count("x") < 20
    assert style.wrap("Staffordshire bull terrier", 90) == "Staffordshire bull\nterrier"
    assert style.wrap("cat", 90) == "cat"
    assert style.wrap("one two three four five six seven", 60).count("\n") == 1


def test_names_that_matplotlib_would_hide_or_typeset_are_written_as_they_are(tmp_path: Path) -> None:
    figure = figures.gains({"_mine": {"$a$ & <b>": Interval(2.0, 1.0, 3.0)}})
    _, svg = style.save(figure, tmp_path / "strange")
    written = {"".join(each.itertext()) for each in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"$a$ & <b>", "_mine"} <= written
