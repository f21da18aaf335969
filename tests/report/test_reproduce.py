"""The paper's tables and figures from runs whose answers are known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import make_image
from report.stores import answers, make_run
from usetta import methods
from usetta.data.benchmark import BENCHMARKS
from usetta.evaluate.metrics import FINE_GRAINED, GROUPS, IMAGENET
from usetta.evaluate.store import ResultRow, ShownViews, Store, ViewRecord
from usetta.prompts import TEMPLATES
from usetta.report import figures, paper
from usetta.report.reproduce import ITEMS, Missing, as_figures, as_table, get, needed, sizes_table
from usetta.report.tables import FORMATS, Cell, Table

DATA_SETS = (*IMAGENET, *FINE_GRAINED)
TABLES = [name for name in ITEMS if name.startswith("table")]
FIGURES = [name for name in ITEMS if name.startswith("figure")]


def share(number: int) -> str:
    """Right and wrong answers to 20 images, `number` of them right."""
    return "1" * number + "0" * (20 - number)


def full(name: str, datasets: tuple[str, ...] = (), seeds: tuple[int, ...] = (0, 1)) -> list[ResultRow]:
    """All rows that an item needs: method m is right on 5 + m images of a set, and on one more under seed 1."""
    item = ITEMS[name]
    return [
        row
        for dataset in datasets or item.datasets
        for place, method in enumerate(item.methods)
        for seed in seeds
        for row in answers(dataset, method, share(5 + place + seed), seed=seed, seconds=0.1 * (1 + place))
    ]


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
def test_items_name_methods_and_data_sets_as_the_library_does(item: Any) -> None:
    assert all(methods.get(method).name == method for method in item.methods)
    assert len(set(item.methods)) == len(item.methods)
    assert set(item.datasets) <= {benchmark.name for benchmark in BENCHMARKS}
    assert item.datasets
    assert set(item.models) <= {"ViT-B-16", "RN50"}
    assert (item.methods == ()) == (item.seeds == ()) == (item.models == ())


@pytest.mark.parametrize("name", TABLES)
def test_tables_need_what_their_rows_and_columns_say(name: str) -> None:
    item, source = ITEMS[name], paper.table(name)
    assert list(item.methods) == [row.method for row in source.rows if row.method]
    known = {*item.datasets, *GROUPS, "seconds", "gigabytes", "gain", "classes", "images"}
    assert set(source.columns) <= known
    assert (item.coop, item.ensemble) == (source.coop, source.ensemble)
    wanted = {
        "in&o": IMAGENET,
        "ood": IMAGENET,
        "fgvc": FINE_GRAINED,
        "avg": DATA_SETS,
        **{name: (name,) for name in DATA_SETS},
    }
    if item.kind != "size":
        assert set(item.datasets) == {each for column in source.columns for each in wanted.get(column, ())}
    assert item.datasets == tuple(name for name in DATA_SETS if name in item.datasets)


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
        with pytest.raises(ValueError, match="nothing to measure that is called"):
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
        assert len(needed(item, store)) == 5 * 2 * 2
        first = [each for each in needed(item, store, seeds=(0,), images={"imagenet": 4}) if each.dataset == "imagenet"]
        assert first == [Missing("imagenet", "tpt-rce", 0)]
        both = [each for each in needed(item, store, images={"imagenet": 4}) if each.dataset == "imagenet"]
        assert both == [Missing("imagenet", "tpt-rce", 0), Missing("imagenet", "tpt-rce", 1)]
        store.add(answers("imagenet", "tpt-rce", "1111"))
        assert Missing("imagenet", "tpt-rce", 0) not in needed(item, store, images={"imagenet": 4})
    with make_run(tmp_path / "full", full("table-12")) as store:
        assert needed(item, store) == []
        assert len(needed(item, store, seeds=(2,))) == 10
        assert len(needed(item, store, images={"imagenet": 21})) == 4


def test_a_table_of_data_sets_and_their_mean(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", [name for name in TABLES if ITEMS[name].kind in ("accuracy", "std")])
def test_every_table_has_the_papers_rows_columns_and_numbers(tmp_path: Path, name: str) -> None:
    item, source = ITEMS[name], paper.table(name)
    templates = TEMPLATES["ensemble"] if item.ensemble else ["a photo of a {}."]
    store = make_run(
        tmp_path, full(name), model=item.models[0], templates=templates, context="sha256" if item.coop else None
    )
    table = as_table(item, store)
    assert [column.name for column in table.columns] == list(source.columns)
    for place, (ours, theirs) in enumerate(zip(table.rows, source.rows, strict=True)):
        assert ours.name == theirs.method
        assert ours.paper_notes == ()
        for column in source.columns:
            assert ours.cells[column].paper == theirs.values[column]
            value = 2.5 if item.kind == "std" else 27.5 + 5 * place
            assert ours.cells[column].value == pytest.approx(value)
    assert len(table.notes) == 1  # on the seeds


def test_doubts_about_the_papers_numbers_are_told(tmp_path: Path) -> None:
    table = as_table(ITEMS["table-21"], make_run(tmp_path, full("table-21")))
    assert cells(table, "uniform")["imagenet"].paper_notes == ("the paper has the same numbers for rce+uniform",)
    assert cells(table, "se")["imagenet"].paper_notes == ()


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


def test_a_table_of_means_goes_on_with_the_data_sets_that_are_there(tmp_path: Path) -> None:
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
    assert any("yet: " in note or "not there: " in note for note in table.notes)
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


def test_sizes_of_the_data_sets_that_are_there(tmp_path: Path) -> None:
    table = sizes_table({"pets": (3669, 37), "dtd": (1690, 47)})
    assert [row.name for row in table.rows] == list(DATA_SETS)
    assert cells(table, "pets") == {"classes": Cell(37, paper=37), "images": Cell(3669, paper=3669)}
    assert cells(table, "dtd")["images"].difference == -2
    assert cells(table, "cars")["images"] == Cell(paper=8041)
    assert table.corner == "dataset"
    assert table.notes[0].startswith("not there: ImageNet, ImageNet-A")
    own = {"pets": {"family": "other"}}
    rows = [*answers("dtd", "clip", "1"), *answers("pets", "clip", "1")]
    stored = as_table(ITEMS["table-11"], make_run(tmp_path, rows, sets=own))
    assert cells(stored, "dtd")["images"].value == 1692
    assert cells(stored, "pets")["images"].value is None


Drawn = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The arguments of every figure that is drawn."""
    calls: Drawn = []

    def watched(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            calls.append((given, named))
            return draw(*given, **named)

        return call

    for name in ("gains", "beta_strategies", "skips", "steps", "gamma_sweep"):
        monkeypatch.setattr(figures, name, watched(getattr(figures, name)))
    return calls


def test_figure_2_shows_gains_over_the_weak_view(tmp_path: Path, drawn: Drawn) -> None:
    found = as_figures(ITEMS["figure-2"], make_run(tmp_path, full("figure-2", ("dtd", "pets"))))
    ((accuracy,), named) = drawn[0]
    assert accuracy == {
        method: {"DTD": value, "Pets": value}
        for method, value in (("clip", 27.5), ("strong", 32.5), ("average", 37.5), ("uniform", 42.5))
    }
    assert named["std"]["uniform"] == {"DTD": 2.5, "Pets": 2.5}
    assert list(found.figures) == ["figure-2"]
    assert found.notes == (
        "no results yet: Flowers102, Caltech101, Aircraft, UCF101, Cars, EuroSAT, SUN397, Food101",
        "error bars: standard deviation over seeds 0, 1",
    )


def test_figure_3_shows_means_or_else_data_sets(tmp_path: Path, drawn: Drawn) -> None:
    for name, datasets in (("all", DATA_SETS), ("fine", FINE_GRAINED), ("part", ("pets", "imagenet"))):
        found = as_figures(ITEMS["figure-3"], make_run(tmp_path / name, full("figure-3", datasets)))
        assert list(found.figures) == ["figure-3"]
    whole, fine, part = (accuracy for (accuracy,), _ in drawn)
    assert list(whole) == ["0", "0.5", "1", "uniform", "adaptive"]
    assert whole["0"] == pytest.approx({"IN&O": 27.5, "FGVC": 27.5, "Avg": 27.5})
    assert whole["adaptive"] == pytest.approx({"IN&O": 47.5, "FGVC": 47.5, "Avg": 47.5})
    assert fine["uniform"] == pytest.approx({"FGVC": 42.5})
    assert part["uniform"] == {"ImageNet": 42.5, "Pets": 42.5}


def test_figure_4_compares_skipping_with_tuning_every_image(tmp_path: Path, drawn: Drawn) -> None:
    found = as_figures(ITEMS["figure-4"], make_run(tmp_path, full("figure-4", ("pets",))))
    assert drawn[0][0] == ({"Pets": 50.0}, {"Pets": 27.5}, {"Pets": 32.5})
    assert drawn[0][1] == {"named": ("without skipping", "with skipping")}
    assert not any("error bars" in note for note in found.notes)


def test_figure_6_has_the_papers_order_of_data_sets(tmp_path: Path, drawn: Drawn) -> None:
    as_figures(ITEMS["figure-6"], make_run(tmp_path, full("figure-6", ("imagenet-v2", "dtd"))))
    ((accuracy,), named) = drawn[0]
    assert list(accuracy) == ["DTD", "ImageNet-V2"]
    assert accuracy["DTD"] == {
        "tpt": {1: 27.5, 2: 32.5, 4: 37.5, 6: 42.5},
        "use": {1: 47.5, 2: 52.5, 4: 57.5, 6: 62.5},
    }
    assert named["std"]["DTD"]["use"][6] == 2.5


def test_figure_7_is_named_by_its_model(tmp_path: Path, drawn: Drawn) -> None:
    found = as_figures(ITEMS["figure-7"], make_run(tmp_path, full("figure-7", FINE_GRAINED), model="RN50"))
    assert list(found.figures) == ["figure-7-RN50"]
    ((accuracy,), _) = drawn[0]
    expected = {0.2: 27.5, 0.4: 32.5, 0.6: 37.5, 0.8: 42.5, 1.0: 47.5}
    assert {gamma: row["FGVC"] for gamma, row in accuracy.items()} == pytest.approx(expected)


def looked_at(folder: Path) -> Store:
    """A run on two datasets whose views were written down; the second image of pets tells the most."""
    rows = [*answers("pets", "se", "111"), *answers("eurosat", "se", "1"), *answers("food101", "se", "1")]
    store = make_run(folder / "run", rows)
    for name, count in (("pets", 3), ("eurosat", 1)):
        (folder / name).mkdir()
        store.note("root", name, str(folder / name))
        for number in range(count):
            make_image(number, (300, 260)).save(folder / name / f"{number:04}.jpg")
    seen = [
        ShownViews("pets", "0000.jpg", 0, (ViewRecord(0, 1, 0.5), ViewRecord(3, 1, 0.1), ViewRecord(1, 0, 0.2))),
        ShownViews("pets", "0001.jpg", 0, (ViewRecord(0, 0, 1.25), ViewRecord(5, 1, 0.125), ViewRecord(4, 0, 0.5))),
        ShownViews("pets", "0002.jpg", 0, (ViewRecord(0, 0, 1.0), ViewRecord(5, 1, 0.1), ViewRecord(4, 1, 0.5))),
        ShownViews("eurosat", "0000.jpg", 0, (ViewRecord(0, 2, 0.75), ViewRecord(2, 2, 0.25))),
        ShownViews("food101", "0000.jpg", 0, (ViewRecord(0, 2, 0.75),)),
    ]
    store.add([], seen=seen)
    return store


def test_figure_5_shows_a_image_that_tells_something(tmp_path: Path) -> None:
    found = as_figures(ITEMS["figure-5"], looked_at(tmp_path))
    axes = [each for each in found.figures["figure-5"].axes if each.images]
    captions = [" ".join(each.get_xlabel().split()) for each in axes]
    assert [caption.rpartition("entropy ")[2] for caption in captions] == ["1.25", "0.12", "0.50", "0.75", "0.25"]
    assert "✓ red fox" in captions[0]
    assert "✗" in captions[1]
    assert all(np.asarray(each.images[0].get_array()).shape == (224, 224, 3) for each in axes)
    assert found.notes == (
        "no results yet: ImageNet",
        "Food101: food101: no strong views of its images were written down",
    )


def test_figure_5_tells_which_images_are_gone(tmp_path: Path) -> None:
    store = looked_at(tmp_path)
    (tmp_path / "pets" / "0001.jpg").unlink()
    (tmp_path / "eurosat" / "0000.jpg").write_bytes(b"")
    found = as_figures(ITEMS["figure-5"], store)
    assert found.figures == {}
    assert "Pets: " in found.notes[1]
    assert "0001.jpg: no such file" in found.notes[1]
    assert "file is empty" in found.notes[2]


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_with_nothing_for_a_figure_is_no_error(tmp_path: Path, name: str) -> None:
    with Store(tmp_path) as store:
        found = as_figures(ITEMS[name], store)
    assert found.figures == {}
    assert found.notes[0].startswith("no results yet: ")


def test_gains_need_the_weak_view_and_another(tmp_path: Path) -> None:
    found = as_figures(ITEMS["figure-2"], make_run(tmp_path, answers("pets", "clip", "11")))
    assert found.figures == {}
    assert "no results yet of strong on Pets" in found.notes


def test_tables_and_figures_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(ValueError, match="figure-2 is not a table"):
            as_table(ITEMS["figure-2"], store)
        with pytest.raises(ValueError, match="table-2 is not a figure"):
            as_figures(ITEMS["table-2"], store)
