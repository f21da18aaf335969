"""The paper's tables and figures from runs whose answers are known."""

from pathlib import Path
from typing import Any

import pytest

from report.stores import answers, full, make_run
from usetta import methods
from usetta.data.benchmark import BENCHMARKS
from usetta.evaluate.metrics import FINE_GRAINED, IMAGENET
from usetta.evaluate.store import Store
from usetta.prompts import TEMPLATES
from usetta.report import paper
from usetta.report.paper_figures import as_figures
from usetta.report.reproduce import ITEMS, MissingResult, as_table, get, missing_results, paper_runs, sizes_table
from usetta.report.tables import FORMATS, Cell, Table

DATASETS = (*IMAGENET, *FINE_GRAINED)
TABLES = [name for name in ITEMS if name.startswith("table")]
FIGURES = [name for name in ITEMS if name.startswith("figure")]


def cells(table: Table, name: str) -> dict[str, Cell]:
    row = next(row for row in table.rows if row.name == name)
    return {column.name: row.cells.get(column.name, Cell()) for column in table.columns}


def test_every_table_with_numbers_and_every_figure_with_results_is_there() -> None:
    assert list(ITEMS) == [f"table-{i}" for i in range(1, 25) if i != 14] + [f"figure-{i}" for i in range(2, 8)]
    assert {item.name: item.kind for item in ITEMS.values() if item.kind not in ("accuracy", "figure")} == {
        "table-10": "efficiency",
        "table-11": "size",
        **{f"table-{i}": "std" for i in (15, 16, 17, 18)},
    }


@pytest.mark.parametrize("item", ITEMS.values(), ids=lambda item: item.name)
def test_items_name_methods_and_datasets_as_the_library_does(item: Any) -> None:
    assert all(methods.get(method).name == method for method in item.methods)
    assert len(set(item.methods)) == len(item.methods)
    assert set(item.datasets) <= {benchmark.name for benchmark in BENCHMARKS}
    assert item.datasets
    assert set(item.models) <= {"ViT-B-16", "RN50"}
    assert (item.methods == ()) == (item.seeds == ()) == (item.models == ())


def test_tables_take_the_methods_and_datasets_that_the_paper_shows() -> None:
    takes = {name: (len(ITEMS[name].methods), ITEMS[name].datasets) for name in ("table-1", "table-4", "table-6")}
    assert takes == {"table-1": (12, IMAGENET), "table-4": (11, FINE_GRAINED), "table-6": (9, DATASETS)}
    assert [name for name in TABLES if ITEMS[name].coop] == ["table-5", "table-19", "table-20"]
    assert [name for name in TABLES if ITEMS[name].ensemble] == ["table-9"]
    assert [name for name in TABLES if ITEMS[name].models == ("RN50",)] == [
        "table-3",
        "table-4",
        "table-16",
        "table-18",
    ]
    assert ITEMS["table-7"].methods == (
        *("tpt", "tpt+se", "c-tpt", "c-tpt+se"),
        *("r-tpt", "r-tpt+se", "sts", "sts+se"),
    )
    assert ITEMS["table-8"].methods == ("se:rescaling=root", "se:rescaling=square", "se")


def test_settings_of_the_figures_are_those_of_the_paper() -> None:
    assert ITEMS["figure-2"].methods == ("clip", "strong", "average", "uniform")
    assert ITEMS["figure-2"].datasets == FINE_GRAINED
    betas = [methods.get(method).beta for method in ITEMS["figure-3"].methods]
    assert betas == [0.0, 0.5, 1.0, "uniform", "adaptive"]
    assert [methods.get(method).skip for method in ITEMS["figure-4"].methods] == [False, True]
    assert ITEMS["figure-5"].datasets == ("imagenet", "pets", "eurosat", "food101")
    recipes = [methods.get(method) for method in ITEMS["figure-6"].methods]
    assert [recipe.steps for recipe in recipes] == [1, 2, 4, 6] * 2
    assert [recipe.loss for recipe in recipes] == ["mem"] * 4 + ["rce"] * 4
    assert ITEMS["figure-6"].datasets == ("dtd", "eurosat", "imagenet-v2")
    assert [methods.get(method).gamma for method in ITEMS["figure-7"].methods] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert ITEMS["figure-7"].models == ("ViT-B-16", "RN50")
    assert ITEMS["table-9"].templates == ("ensemble",)
    assert ITEMS["table-9"].templates[0] in TEMPLATES
    assert ITEMS["table-1"].templates == ()


def test_items_are_found_however_they_are_written() -> None:
    assert [get(name).name for name in ("table-3", "Table 3", "figure-2", "Fig. 2", "fig2")] == [
        *("table-3", "table-3"),
        *("figure-2", "figure-2", "figure-2"),
    ]
    for name in ("table-14", "table-25", "figure-1", "3", "appendix-2"):
        with pytest.raises(ValueError, match="unknown table or figure"):
            get(name)


def test_needed_is_what_is_not_there_or_only_in_part(tmp_path: Path) -> None:
    item = ITEMS["table-12"]
    rows = [
        *answers("imagenet", "tpt", "1111"),
        *answers("imagenet", "tpt", "1111", seed=1),
        *answers("imagenet", "tpt-rce", "11"),
        *answers("imagenet", "clip", "11111"),
    ]
    with make_run(tmp_path, rows) as store:
        assert len(missing_results(item, store)) == 5 * 2 * 2
        first = [
            each
            for each in missing_results(item, store, seeds=(0,), images={"imagenet": 4})
            if each.dataset == "imagenet"
        ]
        assert first == [MissingResult("imagenet", "tpt-rce", 0)]
        both = [each for each in missing_results(item, store, images={"imagenet": 4}) if each.dataset == "imagenet"]
        assert both == [MissingResult("imagenet", "tpt-rce", 0), MissingResult("imagenet", "tpt-rce", 1)]
        store.add(answers("imagenet", "tpt-rce", "1111"))
        assert MissingResult("imagenet", "tpt-rce", 0) not in missing_results(item, store, images={"imagenet": 4})
    with make_run(tmp_path / "full", full("table-12")) as store:
        assert missing_results(item, store) == []
        assert len(missing_results(item, store, seeds=(2,))) == 10
        assert len(missing_results(item, store, images={"imagenet": 21})) == 4


def test_a_table_of_datasets_and_their_mean(tmp_path: Path) -> None:
    table = as_table(ITEMS["table-1"], make_run(tmp_path, [*full("table-1"), *answers("dtd", "clip", "1")]))
    assert [column.name for column in table.columns] == list(paper.table("table-1").columns)
    assert [row.name for row in table.rows] == list(ITEMS["table-1"].methods)
    assert table.title == "Table 1: ImageNet and its variants (accuracy in %, ViT-B-16)"
    use = cells(table, "use")  # the twelfth method: 16 and 17 of 20 images
    assert (use["imagenet-a"].value, use["imagenet-a"].std, use["imagenet-a"].paper) == (82.5, 2.5, 59.79)
    assert (use["in&o"].value, use["in&o"].std, use["in&o"].paper) == (82.5, 2.5, 64.18)
    assert [row.section for row in table.rows] == ["without tuning"] * 4 + ["with tuning"] * 8
    assert table.notes == ("mean ± standard deviation over seeds 0, 1",)
    assert table.columns[0].notes == ("20 of 50,000 images",)
    assert cells(table, "r-tpt")["imagenet"].paper_notes == ()  # a doubt about the last digit only


@pytest.mark.parametrize(
    ("name", "settings", "method", "row"),
    [
        (
            "table-3",
            {"model": "RN50"},
            "sts",  # the tenth of eleven methods: 14 and 15 of 20 images
            {
                "imagenet": (72.5, 59.69),
                "imagenet-a": (72.5, 32.15),
                "imagenet-v2": (72.5, 53.88),
                "imagenet-r": (72.5, 57.51),
                "imagenet-sketch": (72.5, 34.69),
                "in&o": (72.5, 47.58),
                "ood": (72.5, 44.56),
            },
        ),
        ("table-5", {"context": "sha256"}, "ttl", {"in&o": (62.5, 66.09), "fgvc": (62.5, 63.99), "avg": (62.5, 65.04)}),
        (
            "table-9",
            {"templates": TEMPLATES["ensemble"]},
            "se",
            {"in&o": (47.5, 65.73), "fgvc": (47.5, 65.49), "avg": (47.5, 65.61)},
        ),
    ],
)
def test_a_row_has_our_number_and_the_papers_in_every_column(
    tmp_path: Path, name: str, settings: dict[str, Any], method: str, row: dict[str, tuple[float, float]]
) -> None:
    table = as_table(ITEMS[name], make_run(tmp_path, full(name), **settings))
    assert {column: (cell.value, cell.paper) for column, cell in cells(table, method).items()} == {
        column: (pytest.approx(ours), theirs) for column, (ours, theirs) in row.items()
    }
    assert table.notes == ("mean ± standard deviation over seeds 0, 1",)
    assert all(row.paper_notes == () for row in table.rows)  # model and prompt are the paper's


def test_what_is_absent_is_a_dash_and_named(tmp_path: Path) -> None:
    rows = [row for row in full("table-2", ("dtd", "pets", "cars")) if row.method != "ttl"]
    table = as_table(ITEMS["table-2"], make_run(tmp_path, rows, model="embedded"))
    use = cells(table, "use")
    assert [name for name, cell in use.items() if cell.value is not None] == ["dtd", "pets", "cars"]
    assert use["food101"] == Cell(paper=84.71)
    assert use["fgvc"] == Cell(paper=65.35)
    assert all(cell.value is None for cell in cells(table, "ttl").values())
    assert table.notes[:2] == (
        "no results yet: Flowers102, Caltech101, Aircraft, UCF101, EuroSAT, SUN397, Food101",
        "no results yet of ttl on DTD, Pets, Cars",
    )
    assert table.rows[0].paper_notes == ("the paper's model is ViT-B-16, ours embedded",)
    assert [column.heading for column in table.columns][-2:] == ["Food101", "FGVC"]


def test_a_table_of_means_goes_on_with_the_datasets_that_are_there(tmp_path: Path) -> None:
    table = as_table(ITEMS["table-6"], make_run(tmp_path, full("table-6", ("dtd", "imagenet-a"))))
    assert [column.name for column in table.columns] == ["in&o", "fgvc", "avg", "imagenet-a", "dtd"]
    uniform = cells(table, "uniform")
    assert uniform["in&o"] == Cell(paper=64.45, paper_notes=("the paper has the same numbers for rce+uniform",))
    assert (uniform["dtd"].value, uniform["dtd"].paper) == (32.5, 46.04)
    assert uniform["imagenet-a"].paper_notes == ("the paper has the same numbers for rce+uniform",)
    assert table.columns[0].notes == ()
    seven = as_table(ITEMS["table-9"], make_run(tmp_path / "7", full("table-9", ("dtd",))))
    assert cells(seven, "se")["dtd"].paper is None
    assert {row.section for row in seven.rows} == {""}  # the paper mixes methods with and without tuning there
    assert "made without the ensemble of seven templates, unlike the paper's" in seven.notes
    coop = as_table(ITEMS["table-5"], make_run(tmp_path / "coop", full("table-5", ("dtd",)), context="sha256"))
    assert cells(coop, "se")["dtd"].paper == 40.78
    assert not any("context" in note for note in coop.notes)
    plain = as_table(ITEMS["table-6"], make_run(tmp_path / "plain", full("table-6", ("dtd",)), context="sha256"))
    assert "made with a learned context, unlike the paper's" in plain.notes


@pytest.mark.parametrize("name", TABLES)
def test_a_run_with_nothing_for_a_table_is_no_error(tmp_path: Path, name: str) -> None:
    with Store(tmp_path) as store:
        table = as_table(ITEMS[name], store)
    source = paper.table(name)
    assert len(table.rows) == len(source.rows)
    assert all(cell.value is None for row in table.rows for cell in row.cells.values())
    assert any(note.startswith(("no results yet: ", "missing: ")) for note in table.notes)
    for render in FORMATS.values():
        assert render(table)


def test_standard_deviations_take_two_seeds(tmp_path: Path) -> None:
    both = as_table(ITEMS["table-17"], make_run(tmp_path / "2", full("table-17", ("dtd",))))
    assert cells(both, "use")["dtd"] == Cell(2.5, paper=0.09)
    assert both.title == "Table 17: standard deviations, fine-grained datasets (points, ViT-B-16)"
    assert "standard deviation over seeds 0, 1" in both.notes
    assert {column.best for column in both.columns} == {"none"}
    one = as_table(ITEMS["table-17"], make_run(tmp_path / "1", full("table-17", ("dtd",), seeds=(0,))))
    assert cells(one, "use")["dtd"] == Cell(paper=0.09)
    assert "a standard deviation takes at least two seeds" in one.notes


def test_cost_and_accuracy(tmp_path: Path) -> None:
    rows = [*full("table-10"), *answers("photos", "clip", "1", seconds=100.0)]
    with make_run(tmp_path, rows) as store:
        store.note("invocation", "1", {"peak_memory": 2_000_000_000})
        table = as_table(ITEMS["table-10"], store)
    assert [column.name for column in table.columns] == ["seconds", "gigabytes", "fgvc", "gain"]
    clip, use = cells(table, "clip"), cells(table, "use")
    assert (clip["seconds"].value, clip["seconds"].paper) == (pytest.approx(0.1), 0.017)
    assert (use["seconds"].value, use["seconds"].paper) == (pytest.approx(1.1), 0.144)
    assert (use["fgvc"].value, use["fgvc"].paper) == (pytest.approx(77.5), 65.35)
    assert (use["gain"].value, use["gain"].paper) == (pytest.approx(50.0), 1.68)
    assert (clip["gain"].value, use["gigabytes"].value, use["gigabytes"].paper) == (None, None, 6.568)
    assert [row.name for row in table.rows][5] == "CLIP-64"
    assert cells(table, "CLIP-64")["seconds"] == Cell(paper=0.059)
    assert "peak memory of the process: 2.00 GB" in table.notes
    assert {row.section for row in table.rows} == {""}


def test_sizes_of_the_datasets_that_are_there(tmp_path: Path) -> None:
    table = sizes_table({"pets": (3669, 37), "dtd": (1690, 47)})
    assert [row.name for row in table.rows] == list(DATASETS)
    assert cells(table, "pets") == {"classes": Cell(37, paper=37), "images": Cell(3669, paper=3669)}
    assert cells(table, "dtd")["images"].difference == -2
    assert cells(table, "cars")["images"] == Cell(paper=8041)
    assert table.corner == "dataset"
    assert table.notes[0].startswith("missing: ImageNet, ImageNet-A")
    own = {"pets": {"family": "other"}}
    rows = [*answers("dtd", "clip", "1"), *answers("pets", "clip", "1")]
    stored = as_table(ITEMS["table-11"], make_run(tmp_path, rows, sets=own))
    assert cells(stored, "dtd")["images"].value == 1692
    assert cells(stored, "pets")["images"].value is None


def test_tables_and_figures_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(ValueError, match="figure-2 is not a table"):
            as_table(ITEMS["figure-2"], store)
        with pytest.raises(ValueError, match="table-2 is not a figure"):
            as_figures(ITEMS["table-2"], store)


def test_the_runs_of_all_items_are_few_and_complete() -> None:
    runs = paper_runs()
    assert [(run.model, run.coop, run.ensemble) for run in runs] == [
        ("ViT-B-16", False, False),
        ("RN50", False, False),
        ("ViT-B-16", True, False),
        ("ViT-B-16", False, True),
    ]
    for item in ITEMS.values():
        of_item = [run for run in runs if item in run.items]
        assert len(of_item) == len(item.models)
        for run in of_item:
            assert all({*item.methods} <= {*run.methods[name]} for name in item.datasets)
    assert not any(run.coop for run in paper_runs(coop=False))
    assert {run.model for run in paper_runs(model="embedded")} == {"embedded"}
