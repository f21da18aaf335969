"""Tables of runs whose answers are known."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from report.stores import answers, cell, column_notes, fifteen, make_run, printed, values
from usetta.evaluate.metrics import METRICS, accuracy_difference, mcnemar
from usetta.evaluate.store import FailedImage, Store, StoreError
from usetta.prompts import TEMPLATES
from usetta.report.measured import METRIC_FORMATS
from usetta.report.results import accuracy_table, beside_paper, differences_table, metrics_table
from usetta.report.tables import Cell, Column, Table, TableRow


def test_methods_by_datasets(tmp_path: Path) -> None:
    rows = [
        *answers("pets", "use", "1110"),
        *answers("pets", "clip", "1000"),
        *answers("imagenet", "clip", "11"),
        *answers("photos", "clip", "0"),
    ]
    table = accuracy_table(make_run(tmp_path, rows))
    assert values(table) == {
        "clip": {"imagenet": 100.0, "pets": 25.0, "photos": 0.0},
        "use": {"imagenet": None, "pets": 75.0, "photos": None},
    }
    assert table.title == "Accuracy, % (ViT-B-16)"
    assert [column.heading for column in table.columns] == ["ImageNet", "Pets", "photos"]
    assert column_notes(table) == {
        "imagenet": ("2 of 50,000 images",),
        "pets": ("4 of 3,669 images",),
        "photos": (),
    }
    assert table.notes == ()
    assert [column.best for column in table.columns] == ["high"] * 3


@pytest.mark.parametrize(
    ("settings", "paper", "note"),
    [
        ({}, 87.86, None),
        ({"model": "RN50"}, 84.93, None),
        ({"context": "sha256"}, 90.16, None),
        ({"model": "embedded"}, 87.86, "the paper's model is ViT-B-16, ours embedded"),
    ],
)
def test_the_papers_numbers_are_those_of_the_same_kind_of_run(
    tmp_path: Path, settings: dict[str, Any], paper: float, note: str | None
) -> None:
    table = accuracy_table(make_run(tmp_path, answers("pets", "se", "11"), **settings))
    assert cell(table, "se", "pets").paper == paper
    assert table.rows[0].paper_notes == ((note,) if note else ())


def test_an_ensemble_of_templates_has_means_in_the_paper(tmp_path: Path) -> None:
    table = accuracy_table(make_run(tmp_path / "7", fifteen(), templates=TEMPLATES["ensemble"]))
    assert cell(table, "se", "fgvc").paper == 65.49
    assert cell(table, "se", "pets").paper is None
    assert table.notes == ()
    other = accuracy_table(make_run(tmp_path / "1", answers("pets", "se", "1"), templates=["art of the {}."]))
    assert other.notes == ("prompt: art of the {}.; in the paper: a photo of a {}.",)


def test_datasets_of_ones_own_have_no_numbers_in_the_paper(tmp_path: Path) -> None:
    rows = [*fifteen(), *answers("photos", "se", "11")]
    own = {"pets": {"family": "other", "title": "pets", "images": 4, "augmix": False}}
    table = accuracy_table(make_run(tmp_path, rows, sets=own, views=32))
    assert cell(table, "se", "pets") == Cell(50.0)
    assert cell(table, "se", "photos") == Cell(100.0)
    assert column_notes(table)["pets"] == ()
    assert cell(table, "se", "dtd").paper == 46.45
    assert "fgvc" not in column_notes(table)
    assert "ood" in column_notes(table)


@pytest.mark.parametrize("metric", [name for name in METRICS if name != "top1"])
def test_every_metric_has_its_table(tmp_path: Path, metric: str) -> None:
    table = accuracy_table(make_run(tmp_path, answers("pets", "use", "1110")), metric=metric)
    assert cell(table, "use", "pets").value is not None
    assert cell(table, "use", "pets").paper is None
    assert table.title.startswith(METRIC_FORMATS[metric].title)


def test_all_metrics_of_a_dataset(tmp_path: Path) -> None:
    rows = [
        *answers("pets", "use", "1110"),
        *answers("pets", "use", "1100", seed=1),
        *answers("pets", "clip", "10"),
        *answers("dtd", "clip", "1"),
    ]
    with make_run(tmp_path, rows) as store:
        store.note("invocation", "1", {"peak_memory": 1_234_000_000})
        store.note("invocation", "2", {"peak_memory": 900_000_000})
        store.note("invocation", "3", {"peak_memory": None})
        table = metrics_table(store, "pets")
    assert [column.name for column in table.columns] == list(METRICS)
    assert [column.heading for column in table.columns][:4] == ["top-1, %", "top-5, %", "ECE, %", "ECE-20, %"]
    assert table.title == "Pets: all metrics (ViT-B-16, 4 of 3,669 images)"
    use = next(row for row in table.rows if row.name == "use")
    assert (use.cells["top1"].value, use.cells["top1"].std) == (62.5, 12.5)
    assert (use.cells["skip_ratio"].value, use.cells["skip_ratio"].std) == (50.0, 0.0)
    clip = next(row for row in table.rows if row.name == "clip")
    assert clip.notes == ("seed 0: 2 of 4 images", "seed 0 only")
    assert all(each.notes == () for each in clip.cells.values())
    assert clip.cells["skip_ratio"].value is None
    assert table.notes == (
        "mean ± standard deviation over seeds 0, 1",
        "not finished: Pets; some numbers lack images or seeds",
        "peak memory of the process: 1.23 GB",
    )


def test_differences_have_intervals_and_a_p_value(tmp_path: Path) -> None:
    clip, use = 10 * ("1" * 10 + "0" * 30), 10 * ("0" + "1" * 29 + "0" * 10)
    rows = [*answers("pets", "clip", clip), *answers("pets", "use", use), *answers("pets", "se", clip)]
    table = differences_table(make_run(tmp_path, rows))
    result = {row.name: {name: each.value for name, each in row.cells.items()} for row in table.rows}
    ours, theirs = ([int(sign) for sign in signs] for signs in (use, clip))
    interval = accuracy_difference(ours, theirs)
    assert result["use"] == pytest.approx(
        {"difference": 47.5, "low": interval.low, "high": interval.high, "p": mcnemar(ours, theirs), "images": 400}
    )
    assert result["se"] == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "images": 400.0}
    assert cell(table, "use", "difference").notes == ("the interval does not contain 0",)
    assert cell(table, "se", "difference").notes == ()
    assert [row.name for row in table.rows] == ["se", "use"]
    assert {row.section for row in table.rows} == {"Pets"}
    worse = differences_table(make_run(tmp_path / "worse", rows), "use")
    assert cell(worse, "clip", "difference").value == -47.5
    assert cell(worse, "clip", "difference").notes == ("the interval does not contain 0",)


def test_differences_are_of_images_and_seeds_that_both_methods_have(tmp_path: Path) -> None:
    rows = [
        *answers("pets", "clip", "0000"),
        *answers("pets", "clip", "0011", seed=1),
        *answers("pets", "se", "110", first=1),
        *answers("pets", "se", "11", seed=1),
        *answers("pets", "se", "1111", seed=2),
        *answers("dtd", "clip", "01"),
        *answers("dtd", "se", "11", first=1),
        *answers("cars", "se", "11"),
        *answers("aircraft", "clip", "1"),
    ]
    table = differences_table(make_run(tmp_path, rows))
    result = {(row.section, row.name): row.cells for row in table.rows}
    assert list(result) == [("DTD", "se"), ("Pets", "se")]
    # Image 0 under seed 1: 1 − 0. Image 1 under both: 1 − 0. Images 2 and 3 under seed 0: 1 − 0 and 0 − 0.
    assert result["Pets", "se"]["difference"].value == 75.0
    assert result["Pets", "se"]["images"].value == 4
    assert result["Pets", "se"]["p"].value is None
    assert (result["DTD", "se"]["difference"].value, result["DTD", "se"]["images"].value) == (0.0, 1)
    assert result["DTD", "se"]["p"].value == 1.0
    assert table.notes[1] == "not compared, without clip: Cars"


def test_without_a_single_seed_there_is_no_column_of_p_values(tmp_path: Path) -> None:
    rows = [row for m in ("clip", "se") for seed in (0, 1) for row in answers("pets", m, "01", seed=seed)]
    names = [column.name for column in differences_table(make_run(tmp_path, rows)).columns]
    assert names == ["difference", "low", "high", "images"]


def test_methods_without_an_image_in_common_have_no_difference(tmp_path: Path) -> None:
    table = differences_table(make_run(tmp_path, [*answers("pets", "clip", "1"), *answers("pets", "se", "1", first=1)]))
    assert {name: each.value for name, each in table.rows[0].cells.items()} == {
        **dict.fromkeys(("difference", "low", "high", "p")),
        "images": 0.0,
    }


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("tpt", "has no method 'tpt'; known: clip, se"),
        ("ses", "unknown method 'ses'; did you mean 'se'?"),
        ("zero-shot", None),
    ],
)
def test_the_baseline_must_be_there(tmp_path: Path, baseline: str, message: str | None) -> None:
    store = make_run(tmp_path, [*answers("pets", "clip", "1"), *answers("pets", "se", "1")])
    if message is None:
        assert [row.name for row in differences_table(store, baseline).rows] == ["se"]
        return
    with pytest.raises(ValueError, match=message):
        differences_table(store, baseline)


def test_there_must_be_something_to_show(tmp_path: Path) -> None:
    with Store(tmp_path / "empty") as store:
        store.add([], failed=[FailedImage("pets", "a.jpg", "not an image")])
        for table in (accuracy_table, differences_table, lambda run: metrics_table(run, "pets")):
            with pytest.raises(StoreError, match="has no results yet"):
                table(store)
    store = make_run(tmp_path / "clip", answers("pets", "clip", "1"))
    with pytest.raises(ValueError, match="no other method than 'clip'"):
        differences_table(store)
    with pytest.raises(ValueError, match="has no dataset 'pet'; did you mean 'pets'?"):
        metrics_table(store, "pet")
    with pytest.raises(ValueError, match="unknown metric 'eec'; did you mean 'ece'?"):
        accuracy_table(store, metric="eec")


def test_what_people_see(tmp_path: Path) -> None:
    rows = [*answers("pets", "clip", "1" * 20 + "0" * 20), *answers("pets", "use", "1" * 30)]
    with make_run(tmp_path, rows, model="embedded", views=32) as store:
        assert printed(differences_table(store)) == dedent(
            """\
            Accuracy gain over clip, points (embedded)

            method  points  from   to     pᵃ      images
            ────────────────────────────────────────────
            Pets
            use     33.33   16.67  50.00  0.0020  30ᵇ

            ᵃ by McNemar's exact test, which is for one seed
            ᵇ fewer than 200 images: nothing can be concluded
              from, to: 95 % confidence interval, by paired bootstrap over the images that
              both methods answered
            """
        )


def test_beside_paper_fills_in_what_the_paper_has() -> None:
    columns = (Column("imagenet"), Column("avg"), Column("my-images"))
    noted = Cell(69.6, paper_notes=("mine too",))
    rows = (TableRow("se", {"imagenet": Cell(69.25)}), TableRow("uniform", {"imagenet": noted}), TableRow("mine"))
    se, uniform, mine = beside_paper(Table("", columns, rows), "ViT-B-16").rows
    assert se.cells == {"imagenet": Cell(69.25, paper=69.15), "avg": Cell(paper=64.34)}
    assert uniform.cells["imagenet"].paper_notes == ("mine too", "the paper has the same numbers for rce+uniform")
    assert mine.cells == {}
    assert (se.paper_notes, uniform.paper_notes) == ((), ())


def test_doubts_about_the_last_digit_make_no_footnote() -> None:
    table = beside_paper(Table("", (Column("imagenet"),), (TableRow("r-tpt"),)), "ViT-B-16")
    assert table.rows[0].cells["imagenet"] == Cell(paper=69.31)
