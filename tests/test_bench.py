"""What methods cost is measured for each of them, told as ratios, and beside the paper's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from usetta import bench
from usetta.cli import app
from usetta.report import paper


@pytest.fixture
def job(tiny_checkpoint: Path) -> bench.BenchSettings:
    return bench.BenchSettings(model=str(tiny_checkpoint), classes=5, views=8)


def test_a_method_costs_what_its_stages_cost_and_its_own_part(job: bench.BenchSettings) -> None:
    told: list[str] = []
    costs = bench.measure(job, ["clip", bench.CLIP_64, "se", "use"], repeat=1, memory=False, say=told.append)
    shared = sum(costs.stages[stage] for stage in ("read", "views", "encode views"))
    assert all(costs.seconds[method] > shared for method in (bench.CLIP_64, "se", "use"))
    assert list(costs.seconds) == ["clip", bench.CLIP_64, "se", "use"]
    assert [line.partition(":")[0] for line in told] == list(costs.seconds)
    assert costs.memory == {}


def test_what_a_model_cannot_run_is_left_out(job: bench.BenchSettings) -> None:
    told: list[str] = []
    costs = bench.measure(replace(job, precision="int8"), repeat=1, memory=False, say=told.append)
    assert list(costs.seconds) == [name for name in bench.METHODS if name != "ttl"]
    assert told[0].startswith("without ttl: TTL tunes the image tower")


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
    found = json.loads(as_json.stdout)
    assert set(found["seconds"]) == {"clip", "se"}
    assert found["job"]["views"] == 4


def test_a_method_that_a_model_cannot_run_is_told_before_anything_is_measured(tiny_checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "--model", str(tiny_checkpoint), "--methods", "clipp"])
    assert result.exit_code == 2
    assert "did you mean 'clip'" in result.stderr
