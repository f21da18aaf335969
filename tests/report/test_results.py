"""Tables of runs whose answers are known."""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from rich.console import Console

from report.stores import answers, make_run
from usetta.evaluate.metrics import FINE_GRAINED, IMAGENET, METRICS, accuracy_difference, mcnemar
from usetta.evaluate.store import FailedImage, Store, StoreError
from usetta.prompts import TEMPLATES
from usetta.report import tables
from usetta.report.measured import LOOKS
from usetta.report.results import accuracy_table, differences_table, metrics_table
from usetta.report.tables import Cell, Table


def values(table: Table) -> dict[str, dict[str, float | None]]:
    return {
        row.name: {column.name: row.cells.get(column.name, Cell()).value for column in table.columns}
        for row in table.rows
    }


def cell(table: Table, row: str, column: str) -> Cell:
    return next(each for each in table.rows if each.name == row).cells[column]


def column_notes(table: Table) -> dict[str, tuple[str, ...]]:
    return {column.name: column.notes for column in table.columns}


def test_methods_by_data_sets(tmp_path: Path) -> None:
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


def fifteen(method: str = "se", seed: int = 0, more: str = "") -> list[Any]:
    """25, 50, 75, 100 and 0 % on the ImageNet sets, 100 % on DTD, 50 % on the nine others."""
    right = dict(zip(IMAGENET, ("1000", "1100", "1110", "1111", "0000"), strict=True))
    right |= {name: "1111" if name == "dtd" else "1100" for name in FINE_GRAINED}
    return [row for name, signs in right.items() for row in answers(name, method, more or signs, seed=seed)]


def test_the_papers_means_are_there_when_all_of_their_data_sets_are(tmp_path: Path) -> None:
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


def test_means_have_a_deviation_when_all_of_their_data_sets_have_the_same_seeds(tmp_path: Path) -> None:
    table = accuracy_table(make_run(tmp_path / "same", [*fifteen(), *fifteen(seed=1, more="1111")]))
    assert (cell(table, "se", "avg").value, cell(table, "se", "avg").std) == (76.25, 23.75)
    others = [row for row in fifteen(seed=1, more="1111") if row.dataset == "imagenet"]
    table = accuracy_table(make_run(tmp_path / "others", [*fifteen(), *others]))
    assert cell(table, "se", "imagenet").value == 62.5
    assert (cell(table, "se", "in&o").value, cell(table, "se", "in&o").std) == (57.5, None)
    assert (cell(table, "se", "fgvc").value, cell(table, "se", "fgvc").std) == (55.0, None)


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


def test_data_sets_of_ones_own_have_no_numbers_in_the_paper(tmp_path: Path) -> None:
    rows = [*fifteen(), *answers("photos", "se", "11")]
    own = {"pets": {"family": "other", "title": "pets", "images": 4, "augmix": False}}
    table = accuracy_table(make_run(tmp_path, rows, sets=own, views=32))
    assert cell(table, "se", "pets") == Cell(50.0)
    assert cell(table, "se", "photos") == Cell(100.0)
    assert column_notes(table)["pets"] == ()
    assert cell(table, "se", "dtd").paper == 46.45
    assert "fgvc" not in column_notes(table)
    assert "ood" in column_notes(table)


def test_a_column_tells_how_its_data_differ_from_the_papers(tmp_path: Path) -> None:
    rows = [row for name in ("imagenet", "dtd", "pets") for row in answers(name, "se", "11")]
    sets = {"imagenet": {"augmix": True}, "dtd": {"augmix": False}, "pets": {"images": 2}}
    store = make_run(tmp_path, rows, sets=sets, views=8)
    assert column_notes(accuracy_table(store)) == {
        "imagenet": ("2 of 50,000 images", "8 views, in the paper 64", "AugMix, unlike the paper"),
        "dtd": ("2 of 1,692 images", "8 views, in the paper 64", "views without AugMix, unlike the paper's"),
        "pets": ("a set of 2 images, in the paper of 3,669", "8 views, in the paper 64"),
    }
    alone = accuracy_table(store, paper=False)
    assert column_notes(alone)["dtd"] == ("2 of 1,692 images",)
    assert all(each.paper is None for row in alone.rows for each in row.cells.values())


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
        ("se", "aircraft"): ("other images than some of its neighbours, though as many",),
    }
    assert "not finished: DTD, Aircraft, Pets; some numbers lack images or seeds" in table.notes


def test_a_mean_of_unfinished_numbers_says_so(tmp_path: Path) -> None:
    rows = [*fifteen("clip"), *(row for row in fifteen() if (row.dataset, row.image) != ("cars", "0003.jpg"))]
    table = accuracy_table(make_run(tmp_path, rows))
    assert cell(table, "se", "fgvc").notes == ("some of its datasets are not finished",)
    assert cell(table, "se", "in&o").notes == cell(table, "clip", "fgvc").notes == ()


def test_bad_images_are_counted_and_the_first_are_listed(tmp_path: Path) -> None:
    with make_run(tmp_path, [*answers("pets", "se", "1"), *answers("dtd", "se", "1")]) as store:
        store.add([], bad=[FailedImage("pets", f"{i}.jpg", "not an image") for i in range(15)])
        store.add(
            [],
            bad=[
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


@pytest.mark.parametrize(
    ("metric", "value", "digits", "best"),
    [
        ("top5", 75.0, 2, "high"),
        ("ece", 5.0, 2, "low"),
        ("nll", -(3 * math.log(0.8) + math.log(0.2)) / 4, 3, "low"),
        ("brier", 1 - 2 * (3 * 0.8 + 0.2) / 4 + 0.68, 3, "low"),
        ("skip_ratio", 50.0, 1, "none"),
        ("seconds_per_image", 0.25, 3, "low"),
    ],
)
def test_every_metric_has_its_table(tmp_path: Path, metric: str, value: float, digits: int, best: str) -> None:
    rows = [*answers("pets", "use", "1110"), *answers("pets", "clip", "1000")]
    table = accuracy_table(make_run(tmp_path, rows), metric=metric)
    assert cell(table, "use", "pets").value == pytest.approx(value)
    assert (table.columns[0].digits, table.columns[0].best) == (digits, best)
    assert cell(table, "use", "pets").paper is None
    assert (cell(table, "clip", "pets").value is None) == (metric == "skip_ratio")
    assert table.title.startswith(LOOKS[metric].title)


def test_looks_know_all_metrics() -> None:
    assert list(LOOKS) == list(METRICS)


def test_a_number_that_is_not_known_is_missing_and_no_error(tmp_path: Path) -> None:
    rows = [*answers("pets", "se", "10"), *answers("pets", "se", "1", first=2, confidence=math.nan)]
    with make_run(tmp_path, rows) as store:
        assert cell(accuracy_table(store, metric="ece"), "se", "pets") == Cell()
        assert cell(accuracy_table(store), "se", "pets").value == pytest.approx(200 / 3)
        assert cell(metrics_table(store, "pets"), "se", "ece").value is None


def test_all_metrics_of_a_data_set(tmp_path: Path) -> None:
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
    assert [column.heading for column in table.columns][:4] == ["top-1, %", "top-5, %", "ECE, %", "NLL, nats"]
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
    clip, use = "1" * 10 + "0" * 30, "0" + "1" * 29 + "0" * 10
    rows = [*answers("pets", "clip", clip), *answers("pets", "use", use), *answers("pets", "se", clip)]
    table = differences_table(make_run(tmp_path, rows))
    found = {row.name: {name: each.value for name, each in row.cells.items()} for row in table.rows}
    ours, theirs = ([int(sign) for sign in signs] for signs in (use, clip))
    interval = accuracy_difference(ours, theirs)
    assert found["use"] == pytest.approx(
        {"difference": 47.5, "low": interval.low, "high": interval.high, "p": mcnemar(ours, theirs), "images": 40}
    )
    assert found["se"] == {"difference": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "images": 40.0}
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
    found = {(row.section, row.name): row.cells for row in table.rows}
    assert list(found) == [("DTD", "se"), ("Pets", "se")]
    # Image 0 under seed 1: 1 − 0. Image 1 under both: 1 − 0. Images 2 and 3 under seed 0: 1 − 0 and 0 − 0.
    assert found["Pets", "se"]["difference"].value == 75.0
    assert found["Pets", "se"]["images"].value == 4
    assert found["Pets", "se"]["p"].value is None
    assert (found["DTD", "se"]["difference"].value, found["DTD", "se"]["images"].value) == (0.0, 1)
    assert found["DTD", "se"]["p"].value == 1.0
    assert table.notes[1] == "not compared, without clip: Cars"


def test_without_a_single_seed_there_is_no_column_of_p_values(tmp_path: Path) -> None:
    rows = [row for m in ("clip", "se") for seed in (0, 1) for row in answers("pets", m, "01", seed=seed)]
    names = [column.name for column in differences_table(make_run(tmp_path, rows)).columns]
    assert names == ["difference", "low", "high", "images"]


def test_methods_without_a_image_in_common_have_no_difference(tmp_path: Path) -> None:
    table = differences_table(make_run(tmp_path, [*answers("pets", "clip", "1"), *answers("pets", "se", "1", first=1)]))
    assert {name: each.value for name, each in table.rows[0].cells.items()} == {
        **dict.fromkeys(("difference", "low", "high", "p")),
        "images": 0.0,
    }


@pytest.mark.parametrize(
    ("against", "message"),
    [
        ("tpt", "has no method 'tpt'; there are clip, se"),
        ("ses", "unknown method 'ses'; did you mean 'se'?"),
        ("zero-shot", None),
    ],
)
def test_the_method_to_compare_with_must_be_there(tmp_path: Path, against: str, message: str | None) -> None:
    store = make_run(tmp_path, [*answers("pets", "clip", "1"), *answers("pets", "se", "1")])
    if message is None:
        assert [row.name for row in differences_table(store, against).rows] == ["se"]
        return
    with pytest.raises(ValueError, match=message):
        differences_table(store, against)


def test_there_must_be_something_to_show(tmp_path: Path) -> None:
    with Store(tmp_path / "empty") as store:
        store.add([], bad=[FailedImage("pets", "a.jpg", "not an image")])
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
    assert all(set(where) == {"dataset", "seed", "method"} for where in asked)


@pytest.mark.parametrize("shape", list(tables.FORMATS))
def test_tables_have_all_formats(tmp_path: Path, shape: str) -> None:
    rows = [*answers("pets", "clip", "10"), *answers("pets", "use", "11"), *answers("pets", "use", "01", seed=1)]
    with make_run(tmp_path, rows, model="embedded") as store:
        accuracy, metrics, differences = (
            tables.FORMATS[shape](table)
            for table in (accuracy_table(store), metrics_table(store, "pets"), differences_table(store))
        )
    assert "75.0" in accuracy
    assert "25.0" in accuracy
    assert "88.2" in accuracy
    assert "0.25" in metrics
    assert "50.0" in differences


def printed(table: Table) -> str:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(tables.terminal(table))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def test_what_people_see(tmp_path: Path) -> None:
    rows = [*answers("pets", "clip", "1" * 20 + "0" * 20), *answers("pets", "use", "1" * 30)]
    with make_run(tmp_path, rows, model="embedded", views=32) as store:
        assert printed(accuracy_table(store)) == dedent(
            """\
            Accuracy, % (embedded)

            method    Petsᵃ,ᵇ
            ───────────────────────
            clip       50.00
              paperᶜ   88.20 −38.20
            use       100.00ᵈ
              paperᶜ   87.94 +12.06

            ᵃ 40 of 3,669 images
            ᵇ 32 views, in the paper 64
            ᶜ the paper's model is ViT-B-16, ours embedded
            ᵈ 30 of 40 images
              paper: its number, and by how much ours differs from it
              not finished: Pets; some numbers lack images or seeds
            """
        )
        assert printed(differences_table(store)) == dedent(
            """\
            Accuracy against clip, points (embedded)

            method  points  from   to     pᵃ      images
            ──────────────────────────────────────────────
            Pets
            use     33.33ᵇ  16.67  50.00  0.0020  30

            ᵃ by McNemar's exact test, which is for one seed
            ᵇ the interval does not contain 0
              from, to: 95 % confidence interval, by paired bootstrap over the images that
              both methods answered
            """
        )
