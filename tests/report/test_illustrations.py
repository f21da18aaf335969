"""What of a run goes into the figures of its report."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from conftest import make_image
from usetta.evaluate.store import ResultRow, ShownViews, Store, ViewRecord
from usetta.report import figures, illustrations
from usetta.report.measured import Measured
from usetta.report.run_images import Album

Given = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """What each figure was asked to show."""
    found: Given = {}

    def drawing(name: str) -> Any:
        def draw(*data: Any, **more: Any) -> Figure:
            found[name] = data, more
            return Figure(figsize=(2, 1))

        return draw

    for name in ("gains", "reliability", "skips", "cost", "view_grid"):
        monkeypatch.setattr(figures, name, drawing(name))
    return found


def row(dataset: str, image: str, method: str, right: bool, *, seed: int = 0, **more: Any) -> ResultRow:
    """An answer about an image that shows class 0."""
    usual = {"confidence": 0.5, "before": None, "skipped": None, "seconds": 1.0}
    found = {**usual, **more}
    return ResultRow(
        dataset, image, seed, method, 0, 0 if right else 1, found["confidence"], 0.5, 0, 0.5, None, 1.0,
        found["before"], found["skipped"], found["seconds"],
    )  # fmt: skip


def measured(store: Store, rows: list[ResultRow]) -> Measured:
    store.add(rows)
    return Measured(store, illustrations.METRICS)


def test_gains_have_the_mean_over_seeds_and_its_deviation(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        rows = [row("a", "1", "clip", False, seed=seed) for seed in (0, 1)]
        found = measured(store, [*rows, row("a", "1", "se", True), row("a", "1", "se", False, seed=1)])
        drawn = illustrations.gains(found, "clip")
        assert given["gains"] == (
            ({"clip": {"a": 0.0}, "se": {"a": 50.0}}, "clip"),
            {"std": {"clip": {"a": 0.0}, "se": {"a": 50.0}}},
        )
        assert drawn is not None
        assert drawn.width == 200
        assert drawn.address.startswith("data:image/png;base64,")
        assert illustrations.gains(found, "use") is None
        assert illustrations.gains(Measured(store, ("top1",), {"none"}), "clip") is None


def test_reliability_takes_all_data_sets_and_seeds_together(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        found = measured(
            store,
            [
                row("a", "1", "clip", True, confidence=0.9),
                row("a", "1", "clip", False, confidence=0.8, seed=1),
                row("b", "1", "clip", True, confidence=0.7),
                row("b", "1", "use", False, confidence=0.6),
            ],
        )
        illustrations.reliability(store, found)
    assert given["reliability"][0] == (
        {"clip": [0.9, 0.8, 0.7], "use": [0.6]},
        {"clip": [True, False, True], "use": [False]},
    )


def test_skips_are_those_of_the_last_method_that_skips(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        found = measured(
            store,
            [
                row("a", "1", "clip", True),
                row("a", "1", "rce", True, before=0, skipped=True),
                row("a", "1", "tpt", True, before=0, skipped=False),
                row("a", "1", "use", True, before=0, skipped=True),
                row("a", "2", "use", True, before=1, skipped=False),
                row("a", "3", "use", True, before=1, skipped=False),
                row("a", "4", "use", False, before=1, skipped=False),
            ],
        )
        skips = illustrations.skips(store, found)
        assert skips is not None
        assert skips[0] == "use"
        assert given["skips"][0] == ({"a": 25.0}, {"a": 25.0}, {"a": 75.0})


def test_without_skipped_images_there_is_no_figure_of_them(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        found = measured(store, [row("a", "1", "clip", True), row("a", "1", "tpt", True, before=0, skipped=False)])
        assert illustrations.skips(store, found) is None


def test_cost_is_compared_on_the_data_sets_that_all_methods_have(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        found = measured(
            store,
            [
                row("a", "1", "clip", True, seconds=1.0),
                row("b", "1", "clip", False, seconds=3.0),
                row("a", "1", "use", True, seconds=4.0),
                row("b", "1", "use", True, seconds=6.0),
                row("c", "1", "use", True, seconds=1000.0),
            ],
        )
        illustrations.cost(found)
        assert given["cost"][0] == ({"clip": 2.0, "use": 5.0}, {"clip": 50.0, "use": 100.0})
        assert illustrations.mean_over_datasets(found, "top1") == {"clip": 50.0, "use": 100.0}


def test_nothing_in_common_has_no_cost_and_no_mean(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path) as store:
        found = measured(store, [row("a", "1", "clip", True), row("b", "1", "use", True)])
        assert illustrations.cost(found) is None
        assert illustrations.mean_over_datasets(found, "top1") == {}


def test_data_sets_with_the_same_title_go_by_their_names(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for name, title in (("a", "Pets"), ("b", "Pets"), ("c", "Cars")):
            store.fix("dataset", name, {"title": title})
        found = measured(store, [row(name, "1", "clip", True) for name in "abc"])
        assert illustrations.titles(found) == {"a": "a", "b": "b", "c": "Cars"}


def test_typical_views_are_spread_over_data_sets_and_images(tmp_path: Path, given: Given) -> None:
    with Store(tmp_path / "run") as store:
        recipe = {"views": 4, "size": 16, "scale": [0.08, 1.0], "ratio": [0.75, 1.5], "severity": 1.0}
        store.fix("run", "views", recipe)
        for name in "abc":
            (tmp_path / name).mkdir()
            store.fix("dataset", name, {"title": name, "augmix": False})
            store.note("root", name, str(tmp_path / name))
            store.note("classes", name, [f"{name} cat", f"{name} dog"])
            for i in range(4):
                make_image(i).save(tmp_path / name / f"{i}.png")
        rows = [row(name, f"{i}.png", "clip", True) for name in "abc" for i in range(4)]
        seen = [
            ShownViews(each.dataset, each.image, 0, (ViewRecord(0, 0, 0.5), ViewRecord(3, 1, 0.25))) for each in rows
        ]
        store.add([], seen)
        found = measured(store, rows)
        (tmp_path / "b" / "1.png").unlink()
        drawn = illustrations.typical_views(store, found, Album(store))
    ((images,), _) = given["view_grid"]
    assert [image.label for image in images] == ["a cat", "a cat", "b cat"]  # four, and one of them is gone
    for image in images:
        assert [(view.label[2:], view.entropy) for view in image.views] == [("cat", 0.5), ("dog", 0.25)]
        assert all(view.image.shape == (16, 16, 3) for view in image.views)
    assert drawn is not None
    assert drawn.address.startswith("data:image/jpeg;base64,")
    assert "a cat: a cat, a dog; a cat: a cat, a dog; b cat: b cat, b dog" in drawn.alt
