"""Metrics of runs whose answers are known, and the notes on them, as tables show them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from report.stores import answers, cell, column_notes, fifteen, make_run, values
from usetta.evaluate.metrics import FINE_GRAINED, IMAGENET, METRICS
from usetta.evaluate.store import FailedImage, Store
from usetta.report.measured import METRIC_FORMATS, RunMetrics
from usetta.report.results import accuracy_table, differences_table, metrics_table
from usetta.report.tables import Cell


def test_methods_are_in_the_order_of_their_list_and_then_of_the_grammar(tmp_path: Path) -> None:
    ordered = [
        *("clip", "se", "tpt", "use"),
        *("se:rescaling=root", "tpt:steps=4", "tpt+uniform", "tpt+se", "use:beta=0.5", "use:beta=uniform"),
        *("use:steps=2", "use:steps=10", "anything", "mine+new"),
    ]
    rows = [row for method in sorted(ordered) for row in answers("pets", method, "1")]
    assert [row.name for row in accuracy_table(make_run(tmp_path, rows)).rows] == ordered


def test_several_seeds_give_mean_and_standard_deviation(tmp_path: Path) -> None:
    rows = [*answers("pets", "se", "10"), *answers("pets", "se", "11", seed=3), *answers("dtd", "se", "10")]
    table = accuracy_table(make_run(tmp_path, rows))
    assert (cell(table, "se", "pets").value, cell(table, "se", "pets").std) == (75.0, 25.0)
    assert cell(table, "se", "dtd").std is None
    assert table.notes == ("mean ± standard deviation over seeds 0, 3",)


def test_the_papers_means_are_there_when_all_of_their_datasets_are(tmp_path: Path) -> None:
    table = accuracy_table(make_run(tmp_path / "all", [*fifteen(), *answers("pets", "clip", "1111")]))
    names = [column.name for column in table.columns]
    assert names == [*IMAGENET, *FINE_GRAINED, "in&o", "ood", "fgvc", "avg"]
    assert {name: values(table)["se"][name] for name in names[-4:]} == {
        "in&o": 50.0,
        "ood": 56.25,
        "fgvc": 55.0,
        "avg": 52.5,
    }
    assert values(table)["clip"]["fgvc"] is None
    assert cell(table, "se", "fgvc").paper == 65.02
    assert column_notes(table)["avg"] == ("of datasets with notes of their own",)
    part = accuracy_table(make_run(tmp_path / "part", [row for row in fifteen() if row.dataset != "imagenet"]))
    assert [column.name for column in part.columns][-2:] == ["ood", "fgvc"]


def test_means_have_a_deviation_when_all_of_their_datasets_have_the_same_seeds(tmp_path: Path) -> None:
    table = accuracy_table(make_run(tmp_path / "same", [*fifteen(), *fifteen(seed=1, more="1111")]))
    assert (cell(table, "se", "avg").value, cell(table, "se", "avg").std) == (76.25, 23.75)
    others = [row for row in fifteen(seed=1, more="1111") if row.dataset == "imagenet"]
    table = accuracy_table(make_run(tmp_path / "others", [*fifteen(), *others]))
    assert cell(table, "se", "imagenet").value == 62.5
    assert (cell(table, "se", "in&o").value, cell(table, "se", "in&o").std) == (57.5, None)
    assert (cell(table, "se", "fgvc").value, cell(table, "se", "fgvc").std) == (55.0, None)


def test_a_column_notes_how_its_data_differ_from_the_papers(tmp_path: Path) -> None:
    rows = [row for name in ("imagenet", "dtd", "pets") for row in answers(name, "se", "11")]
    sets = {"imagenet": {"augmix": True}, "dtd": {"augmix": False}, "pets": {"images": 2}}
    store = make_run(tmp_path, rows, sets=sets, views=8)
    assert column_notes(accuracy_table(store)) == {
        "imagenet": ("2 of 50,000 images", "8 views, in the paper 64", "AugMix, unlike the paper"),
        "dtd": ("2 of 1,692 images", "8 views, in the paper 64", "views without AugMix, unlike the paper's"),
        "pets": ("2 images in the dataset, 3,669 in the paper's", "8 views, in the paper 64"),
    }
    alone = accuracy_table(store, paper=False)
    assert column_notes(alone)["dtd"] == ("2 of 1,692 images",)
    assert all(each.paper is None for row in alone.rows for each in row.cells.values())


def test_the_two_names_of_food101_are_a_footnote_beside_the_papers_numbers(tmp_path: Path) -> None:
    names = [f"class {n}" for n in range(101)]
    names[16:18] = ["cheese plate", "cheesecake"]
    sets = {name: {"images": 4} for name in (*IMAGENET, *FINE_GRAINED)}
    with make_run(tmp_path, fifteen(), sets=sets) as store:
        store.note("classes", "food101", names)
        run = RunMetrics(store, ("top1",))
        note = "the paper's numbers are for the names 'cheese plate' and 'cheesecake' exchanged, see Footguns"
        assert note in run.column("food101", "top1", paper=True).notes
        for group in ("fgvc", "avg"):
            assert f"Food101: {note}" in run.mean_column(group, "top1", paper=True).notes
            assert run.mean_column(group, "top1", paper=False).notes == ()
        assert not any("Food101" in text for text in run.mean_column("in&o", "top1", paper=True).notes)


def test_an_unfinished_run_says_which_numbers_do_not_compare(tmp_path: Path) -> None:
    rows = [
        *answers("pets", "clip", "1111"),
        *answers("pets", "clip", "1111", seed=1),
        *answers("pets", "se", "111"),
        *answers("pets", "se", "11", seed=1),
        *answers("pets", "use", "1111"),
        *answers("dtd", "clip", "11"),
        *answers("dtd", "se", "1"),
        *answers("aircraft", "clip", "11"),
        *answers("aircraft", "se", "11", first=1),
    ]
    table = accuracy_table(make_run(tmp_path, rows))
    notes = {(row.name, name): each.notes for row in table.rows for name, each in row.cells.items() if each.notes}
    assert notes == {
        ("se", "pets"): ("seed 0: 3, seed 1: 2 of 4 images",),
        ("use", "pets"): ("seed 0 only",),
        ("se", "dtd"): ("1 of 2 images",),
        ("se", "aircraft"): ("as many images as its neighbours, but not the same ones",),
    }
    assert "not finished: DTD, Aircraft, Pets; some numbers lack images or seeds" in table.notes


def test_a_mean_of_unfinished_numbers_says_so(tmp_path: Path) -> None:
    rows = [*fifteen("clip"), *(row for row in fifteen() if (row.dataset, row.image) != ("cars", "0003.jpg"))]
    table = accuracy_table(make_run(tmp_path, rows))
    assert cell(table, "se", "fgvc").notes == ("some of its datasets are not finished",)
    assert cell(table, "se", "in&o").notes == cell(table, "clip", "fgvc").notes == ()


def test_bad_images_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    with make_run(tmp_path, [*answers("pets", "se", "1"), *answers("dtd", "se", "1")]) as store:
        store.add([], failed=[FailedImage("pets", f"{i}.jpg", "not an image") for i in range(15)])
        store.add(
            [],
            failed=[
                FailedImage("dtd", "a.jpg", "file is empty"),
                *(FailedImage("cars", f"{i}.jpg", "gone") for i in range(3)),
            ],
        )
        notes = accuracy_table(store).notes
        assert notes == (
            "DTD: 1 image could not be read: a.jpg (file is empty)",
            "Pets: 15 images could not be read: 0.jpg (not an image), 1.jpg (not an image), "
            "10.jpg (not an image) … and 12 more, see `usetta export`",
            "Cars: 3 images could not be read: 0.jpg (gone), 1.jpg (gone), 2.jpg (gone)",
        )
        assert metrics_table(store, "dtd").notes == notes[:1]


def test_every_metric_has_a_format() -> None:
    assert list(METRIC_FORMATS) == list(METRICS)


def test_a_number_that_is_not_known_is_missing_and_no_error(tmp_path: Path) -> None:
    rows = [*answers("pets", "se", "10"), *answers("pets", "se", "1", first=2, confidence=math.nan)]
    with make_run(tmp_path, rows) as store:
        assert cell(accuracy_table(store, metric="ece"), "se", "pets") == Cell()
        assert cell(accuracy_table(store), "se", "pets").value == pytest.approx(200 / 3)
        assert cell(metrics_table(store, "pets"), "se", "ece").value is None


def test_a_run_is_never_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may have a million rows: they are read by dataset, seed and method."""
    asked: list[Mapping[str, Any]] = []
    columns = Store.columns

    def spy(store: Store, names: Any, where: Mapping[str, Any]) -> dict[str, list[Any]]:
        asked.append(where)
        return columns(store, names, where)

    monkeypatch.setattr(Store, "columns", spy)
    monkeypatch.setattr(Store, "rows", lambda *_: pytest.fail("reads all columns of all rows"))
    store = make_run(tmp_path, [*answers("pets", "clip", "11"), *answers("pets", "use", "11")])
    for table in (accuracy_table, differences_table, lambda run: metrics_table(run, "pets")):
        table(store)
    assert len(asked) == 6
    assert all(set(where) >= {"dataset", "seed", "method"} for where in asked)
