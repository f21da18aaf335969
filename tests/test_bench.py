"""What methods cost: each by itself, as ratios, and beside the paper's. Time is that of a clock of the test's own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta import bench, timing
from usetta.cli import app
from usetta.report import paper


@pytest.fixture
def job(tiny_checkpoint: Path) -> bench.BenchSettings:
    return bench.BenchSettings(model=str(tiny_checkpoint), classes=5, views=8)


class Clock:
    """A clock that stands still, except where work is said to take some seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, work: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        """The same work, which takes as many seconds as its arguments say."""

        def charged(*given: Any, **named: Any) -> Any:
            self.now += seconds(*given, **named)
            return work(*given, **named)

        return charged


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Reading takes 0.25 s, a view 1 s, encoding it 10 s, names 2 s, a method 5 s and each of its steps 100 s."""
    clock = Clock()
    costs: dict[str, Callable[..., float]] = {
        "open_image": lambda _: 0.25,
        "make_views": lambda image, name, recipe: 1.0 * recipe.views,
        "encode_views": lambda model, pixels: 10.0 * len(pixels),
        "class_names": lambda count: 2.0,
        "answer": lambda recipe, *_: 5.0 + (100.0 * recipe.steps if recipe.tunes else 0.0),
    }
    for name, seconds in costs.items():
        monkeypatch.setattr(bench, name, clock.charge(getattr(bench, name), seconds))
    monkeypatch.setattr(timing, "perf_counter", clock)
    return clock


@pytest.mark.usefixtures("clock")
def test_a_method_costs_what_its_stages_cost_and_its_own_part(job: bench.BenchSettings) -> None:
    messages: list[str] = []
    methods = ["clip", bench.CLIP_64, "se", "use", "use:steps=4"]
    costs = bench.measure(job, methods, repeat=2, memory=False, log=messages.append)
    assert costs.stages == {
        "read": 0.25,
        "one view": 1,
        "views": 8,
        "encode one view": 10,
        "encode views": 80,
        "text, once for a class list": 2,
    }
    assert costs.seconds == {
        "clip": 0.25 + 1 + 10 + 5,
        bench.CLIP_64: 0.25 + 8 + 80 + 5,
        "se": 0.25 + 8 + 80 + 5,
        "use": 0.25 + 8 + 80 + 5 + 100,
        "use:steps=4": 0.25 + 8 + 80 + 5 + 400,
    }
    assert messages[0] == "clip: 16.250 s, 5.000 s of it after encoding the views"
    assert [message.partition(": ")[0] for message in messages] == methods
    assert costs.memory == {}


def test_what_a_model_cannot_run_is_left_out(job: bench.BenchSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "answer", lambda *_: None)
    messages: list[str] = []
    costs = bench.measure(replace(job, precision="int8"), repeat=1, memory=False, log=messages.append)
    assert list(costs.seconds) == [name for name in bench.METHODS if name != "ttl"]
    assert messages[0].startswith("left out: ttl; TTL tunes the image encoder")


def test_memory_is_that_of_a_process_of_its_own(job: bench.BenchSettings) -> None:
    costs = bench.measure(job, ["se"], repeat=1)
    assert 50e6 < costs.memory["se"] < 5e9


def test_the_table_has_our_ratios_and_the_paper_s() -> None:
    costs = bench.Costs(
        {"clip": 0.5, bench.CLIP_64: 10.0, "use": 12.0},
        {"clip": 2**30, bench.CLIP_64: 2**31, "use": 3 * 2**30},
        {"read": 0.1, "views": 0.4, "encode views": 9.5},
    )
    table = bench.efficiency_table(costs, bench.BenchSettings(), "ViT-B-16")
    use = table.rows[-1].cells
    assert (use["time ÷ clip"].value, use["time ÷ CLIP-64"].value, use["memory ÷ CLIP-64"].value) == (24, 1.2, 1.5)
    theirs = {row.method or row.name: row.values for row in paper.table("table-10").rows}
    assert use["time ÷ CLIP-64"].paper == pytest.approx(theirs["use"]["seconds"] / theirs["CLIP-64"]["seconds"])
    shares = [row.cells["share"].value for row in bench.stages_table(costs).rows]
    assert shares == pytest.approx([1, 4, 95])


def test_every_row_of_the_paper_s_table_is_measured() -> None:
    assert set(bench.METHODS) == {row.method or row.name for row in paper.table("table-10").rows}


def test_the_command_prints_tables_or_json(tiny_checkpoint: Path) -> None:
    options = ["bench", "--model", str(tiny_checkpoint), "--methods", "clip,se", "--views", "4", "--no-memory"]
    shown = CliRunner().invoke(app, [*options, "--repeat", "1"])
    assert shown.exit_code == 0, shown.output
    assert "s/image" in shown.stdout
    assert "encode views" in shown.stdout
    as_json = CliRunner().invoke(app, [*options, "--repeat", "1", "--json"])
    printed = json.loads(as_json.stdout)
    assert set(printed["seconds"]) == {"clip", "se"}
    assert printed["job"]["views"] == 4


def test_an_unknown_method_is_an_error_before_anything_is_measured(tiny_checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--model", str(tiny_checkpoint), "--methods", "clipp"])
    assert result.exit_code == 2
    assert "did you mean 'clip'" in result.stderr


@pytest.mark.usefixtures("clock")
def test_what_many_methods_add_to_the_views_they_share(job: bench.BenchSettings) -> None:
    seconds = bench.seconds_of_methods(job, ["clip", "use", "use:steps=4", "se"])
    shared = 0.25 + 8 * 1 + 8 * 10 + 5  # read, make and encode eight views, and answer by one
    assert seconds == {bench.CLIP_64: shared, "clip": 0, "use": 100, "use:steps=4": 400, "se": 0}
    assert bench.seconds_per_image(seconds, ["clip", "use:steps=4"]) == shared + 400


@pytest.mark.usefixtures("clock")
def test_a_model_without_blocks_is_measured_without_ttl(
    job: bench.BenchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    resnet, lines = disturbed(TINY_RESNET), list[str]()
    monkeypatch.setattr(bench, "load_quietly", lambda *_, **__: resnet)
    monkeypatch.setattr(bench, "METHODS", ("clip", "ttl", "se"))
    costs = bench.measure(job, repeat=1, memory=False, log=lines.append)
    assert list(costs.seconds) == ["clip", "se"]
    assert lines[0].startswith("left out: ttl; ")
    assert "has no attention blocks" in lines[0]
    seconds = bench.seconds_of_methods(job, ["ttl", "tpt"])
    assert seconds == {bench.CLIP_64: 0.25 + 8 * 1 + 8 * 10 + 5, "ttl": 0, "tpt": 100}
    monkeypatch.undo()
    assert bench._possible(disturbed(TINY_VIT), lines.append) == list(bench.METHODS)
    assert bench._has_last_blocks(disturbed(TINY_VIT))
    assert len(lines) == 3, "nothing else was left out"
