"""Datasets that somebody else adds by name: they are loaded, checked, listed and fetched as the paper's fifteen are."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import usetta.registry
from data.archives import zip_of
from data.miniature import IMAGE, put
from data.server import Shelf
from usetta.cli import app
from usetta.data import (
    Archive,
    DataError,
    Dataset,
    NamedDataset,
    Source,
    UnknownDatasetError,
    check,
    fetch,
    list_datasets,
    load_dataset,
    load_datasets,
    read_folder,
    register_dataset,
)
from usetta.data.named import DATASETS, DatasetRegistry, normalize

ZOO = NamedDataset("zoo-2", "Zoo", "fine-grained", 2, 2, lambda root: read_folder(root / "zoo"), aliases=("menagerie",))


@pytest.fixture
def zoo() -> Iterator[NamedDataset]:
    yield register_dataset(ZOO)
    DATASETS.unregister("zoo-2")


@pytest.mark.usefixtures("zoo")
def test_it_is_loaded_by_any_spelling_under_its_own_name(tmp_path: Path) -> None:
    put(tmp_path / "zoo", ["emu/a.jpg", "red_fox/b.jpg"])
    for name in ("zoo-2", "Zoo_2", "menagerie"):
        dataset = load_dataset(name, tmp_path)
        assert (dataset.name, dataset.title, dataset.family, dataset.augmix) == ("zoo-2", "Zoo", "fine-grained", True)
        assert dataset.classes == ("emu", "red fox")
    assert [dataset.name for dataset in load_datasets([], tmp_path)] == ["zoo-2"]
    assert list_datasets()[-1] is ZOO
    rows = json.loads(CliRunner().invoke(app, ["ls", "datasets", "--json"]).stdout)
    assert rows[-1] == {"name": "zoo-2", "title": "Zoo", "family": "fine-grained", "images": 2, "classes": 2}
    with pytest.raises(UnknownDatasetError, match="did you mean 'zoo-2'"):
        load_dataset("zoo3", tmp_path)


@pytest.mark.usefixtures("zoo")
def test_it_is_checked(tmp_path: Path) -> None:
    absent = check(tmp_path, ["zoo-2"])[0]
    assert (absent.state, absent.problem) == ("absent", f"zoo-2: there is no {tmp_path / 'zoo'}")
    put(tmp_path / "zoo", ["emu/a.jpg", "red_fox/b.jpg"])
    assert check(tmp_path, ["zoo-2"])[0].state == "complete"
    put(tmp_path / "zoo", ["red_fox/c.jpg"])
    report = check(tmp_path)[-1]
    assert (report.name, report.state) == ("zoo-2", "incomplete")
    assert (report.problem, report.todo) == ("3 images instead of 2", "Unpack it again.")
    (tmp_path / "zoo" / "empty").mkdir()
    assert check(tmp_path, ["zoo-2"])[0].state == "broken"


def test_images_that_are_missing_are_noticed_without_the_plug_in_s_help(tmp_path: Path) -> None:
    def read(root: Path) -> Dataset:
        return Dataset("?", "?", "other", ("cat",), ("a.jpg", "in/b.jpg"), (0, 0), root, "here")

    put(tmp_path, ["a.jpg"])
    reading = NamedDataset("two", "Two", "other", 2, 1, read).read(tmp_path)
    assert (reading.missing, reading.missing_kind) == (("in/b.jpg",), "images")


@pytest.mark.parametrize("error", [ValueError("no number"), IndexError("row 3"), PermissionError(13, "denied")])
def test_a_reader_that_fails_does_not_end_a_check_of_all(tmp_path: Path, error: Exception) -> None:
    def read(_: Path) -> Dataset:
        raise error

    register_dataset(NamedDataset("shaky", "Shaky", "other", 2, 1, read))
    try:
        report = check(tmp_path)[-1]
    finally:
        DATASETS.unregister("shaky")
    assert report.state == "broken"
    assert report.problem == f"shaky cannot be read: {type(error).__name__}: {error}"


def test_it_is_fetched_if_it_has_a_source(tmp_path: Path, shelf: Shelf, zoo: NamedDataset) -> None:
    with pytest.raises(DataError, match="zoo-2 cannot be fetched: nobody said where it comes from"):
        fetch("zoo-2", tmp_path, print)
    shelf.files["zoo.zip"] = zip_of({"images/emu/a.jpg": IMAGE, "images/red_fox/b.jpg": IMAGE})
    source = Source("zoo", Archive(f"{shelf.url}/zoo.zip", None, "images", "zoo"))
    register_dataset(NamedDataset("zoo-3", "Zoo 3", "other", 2, 2, zoo.reader, source=source))
    try:
        assert check(tmp_path, ["zoo-3"])[0].todo == f"Run `usetta data fetch zoo-3 {tmp_path}`."
        fetched = fetch("zoo-3", tmp_path, print)
    finally:
        DATASETS.unregister("zoo-3")
    assert (fetched.report.state, fetched.by_hand) == ("complete", ())
    assert fetch("zoo-2", tmp_path, print).report.state == "complete"


def test_it_comes_by_an_entry_point(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def point(name: str, value: object) -> SimpleNamespace:
        return SimpleNamespace(name=name, value=f"package:{name}", load=lambda: value)

    points = [point("zoo-2", ZOO), point("other", ZOO), point("rubbish", 7)]
    monkeypatch.setattr(usetta.registry, "entry_points", lambda group: points if group == "usetta.datasets" else [])
    registry = DatasetRegistry("dataset", group="usetta.datasets", normalize=normalize)
    with caplog.at_level(logging.WARNING, "usetta"):
        assert registry.names() == ["zoo-2"]
    assert registry.get("Menagerie") is ZOO
    assert "the dataset 'zoo-2' cannot be registered as 'other'" in caplog.text
    assert "'rubbish' must be a usetta.data.NamedDataset, not a int" in caplog.text


@pytest.mark.usefixtures("zoo")
def test_a_name_that_is_taken_is_refused() -> None:
    for name in ("Pets", "oxford-pets", "zoo2", "I"):
        with pytest.raises(ValueError, match=f"there is already a dataset called '{name}'"):
            register_dataset(NamedDataset(name, "Pets", "other", 1, 1, read_folder))
