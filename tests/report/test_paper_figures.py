"""The paper's figures from runs whose answers are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from conftest import make_image
from report.stores import answers, full, make_run
from usetta.evaluate.metrics import FINE_GRAINED, IMAGENET, Interval
from usetta.evaluate.store import ShownViews, Store, ViewRecord
from usetta.report import figures
from usetta.report.paper_figures import as_figures
from usetta.report.reproduce import ITEMS

DATASETS = (*IMAGENET, *FINE_GRAINED)
FIGURES = [name for name in ITEMS if name.startswith("figure")]

Drawn = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The arguments of every figure; nothing is drawn, which takes long and is tested by test_figures."""
    calls: Drawn = []

    def record(*given: Any, **named: Any) -> Figure:
        calls.append((given, named))
        return Figure()

    for name in ("gains", "beta_strategies", "skips", "steps", "gamma_sweep"):
        monkeypatch.setattr(figures, name, record)
    return calls


def test_figure_2_shows_gains_over_the_weak_view(tmp_path: Path, drawn: Drawn) -> None:
    result = as_figures(ITEMS["figure-2"], make_run(tmp_path, full("figure-2", ("dtd", "pets"))))
    assert drawn[0][0] == (
        {
            method: dict.fromkeys(("DTD", "Pets"), Interval(points, points - 2.5, points + 2.5))
            for method, points in (("strong", 5.0), ("average", 10.0), ("uniform", 15.0))
        },
    )
    assert list(result.figures) == ["figure-2"]
    assert result.notes == (
        "no results yet: Flowers102, Caltech101, Aircraft, UCF101, Cars, EuroSAT, SUN397, Food101",
        "error bars: standard deviation over seeds 0, 1",
    )


def test_figure_3_shows_means_or_else_datasets(tmp_path: Path, drawn: Drawn) -> None:
    for name, datasets in (("all", DATASETS), ("fine", FINE_GRAINED), ("part", ("pets", "imagenet"))):
        result = as_figures(ITEMS["figure-3"], make_run(tmp_path / name, full("figure-3", datasets)))
        assert list(result.figures) == ["figure-3"]
    whole, fine, part = (accuracy for (accuracy,), _ in drawn)
    assert list(whole) == ["0", "0.5", "1", "uniform", "adaptive"]
    assert whole["0"] == pytest.approx({"IN&O": 27.5, "FGVC": 27.5, "Avg": 27.5})
    assert whole["adaptive"] == pytest.approx({"IN&O": 47.5, "FGVC": 47.5, "Avg": 47.5})
    assert fine["uniform"] == pytest.approx({"FGVC": 42.5})
    assert part["uniform"] == {"ImageNet": 42.5, "Pets": 42.5}


def test_figure_4_compares_skipping_with_tuning_every_image(tmp_path: Path, drawn: Drawn) -> None:
    result = as_figures(ITEMS["figure-4"], make_run(tmp_path, full("figure-4", ("pets",))))
    assert drawn[0][0] == ({"Pets": 50.0}, {"Pets": 27.5}, {"Pets": 32.5})
    assert drawn[0][1] == {"named": ("without skipping", "with skipping")}
    assert not any("error bars" in note for note in result.notes)


def test_figure_6_has_the_papers_order_of_datasets(tmp_path: Path, drawn: Drawn) -> None:
    as_figures(ITEMS["figure-6"], make_run(tmp_path, full("figure-6", ("imagenet-v2", "dtd"))))
    ((accuracy,), named) = drawn[0]
    assert list(accuracy) == ["DTD", "ImageNet-V2"]
    assert accuracy["DTD"] == {
        "tpt": {1: 27.5, 2: 32.5, 4: 37.5, 6: 42.5},
        "use": {1: 47.5, 2: 52.5, 4: 57.5, 6: 62.5},
    }
    assert named["std"]["DTD"]["use"][6] == 2.5


def test_figure_7_is_named_by_its_model(tmp_path: Path, drawn: Drawn) -> None:
    result = as_figures(ITEMS["figure-7"], make_run(tmp_path, full("figure-7", FINE_GRAINED), model="RN50"))
    assert list(result.figures) == ["figure-7-RN50"]
    ((accuracy,), _) = drawn[0]
    expected = {0.2: 27.5, 0.4: 32.5, 0.6: 37.5, 0.8: 42.5, 1.0: 47.5}
    assert {gamma: row["FGVC"] for gamma, row in accuracy.items()} == pytest.approx(expected)


def run_with_views(folder: Path) -> Store:
    """A run on two datasets with recorded views; the second image of pets is the instructive one."""
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
    store.add([], shown=seen)
    return store


def test_figure_5_shows_an_instructive_image(tmp_path: Path) -> None:
    result = as_figures(ITEMS["figure-5"], run_with_views(tmp_path))
    axes = [each for each in result.figures["figure-5"].axes if each.images]
    captions = [" ".join(each.get_xlabel().split()) for each in axes]
    assert [caption.rpartition("entropy ")[2] for caption in captions] == ["1.25", "0.12", "0.50", "0.75", "0.25"]
    assert "✓ red fox" in captions[0]
    assert "✗" in captions[1]
    assert all(np.asarray(each.images[0].get_array()).shape == (224, 224, 3) for each in axes)
    assert result.notes == (
        "no results yet: ImageNet",
        "Food101: food101: no strong views of its images were recorded",
    )


def test_figure_5_names_the_images_that_are_gone(tmp_path: Path) -> None:
    store = run_with_views(tmp_path)
    (tmp_path / "pets" / "0001.jpg").unlink()
    (tmp_path / "eurosat" / "0000.jpg").write_bytes(b"")
    result = as_figures(ITEMS["figure-5"], store)
    assert result.figures == {}
    assert "Pets: " in result.notes[1]
    assert "0001.jpg: no such file" in result.notes[1]
    assert "file is empty" in result.notes[2]


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_with_nothing_for_a_figure_is_no_error(tmp_path: Path, name: str) -> None:
    with Store(tmp_path) as store:
        result = as_figures(ITEMS[name], store)
    assert result.figures == {}
    assert result.notes[0].startswith("no results yet: ")


def test_gains_need_the_weak_view_and_another(tmp_path: Path) -> None:
    result = as_figures(ITEMS["figure-2"], make_run(tmp_path, answers("pets", "clip", "11")))
    assert result.figures == {}
    assert "no results yet of strong, average, uniform on Pets" in result.notes
