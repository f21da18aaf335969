"""Datasets that somebody else adds by name: they are loaded, checked, listed and fetched as the paper's fifteen are."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from usetta.data.protocols import apply_protocol, protocol_note

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
    with pytest.raises(DataError, match="zoo-2 cannot be fetched: it has no known source"):
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


CUB, USED = re.findall(
    r"^```python\n(.*?)^```",
    (Path(__file__).parents[2] / "docs" / "data.md")
    .read_text(encoding="utf-8")
    .partition("## Adding a named dataset")[2],
    flags=re.DOTALL | re.MULTILINE,
)


def test_the_example_of_the_documentation_adds_a_dataset(tmp_path: Path) -> None:
    assert len(CUB.splitlines()) <= 30
    home = tmp_path / "CUB_200_2011"
    put(home / "images", ["002.Laysan_Albatross/b.jpg", "001.Black_footed_Albatross/a.jpg"])
    for file, content in {
        "images.txt": "1 001.Black_footed_Albatross/a.jpg\n2 002.Laysan_Albatross/b.jpg\n3 002.Laysan_Albatross/c\n",
        "image_class_labels.txt": "1 1\n2 2\n3 2\n",
        "train_test_split.txt": "1 0\n2 0\n3 1\n",
        "classes.txt": "1 001.Black_footed_Albatross\n2 002.Laysan_Albatross\n",
    }.items():
        (home / file).write_text(content)
    space: dict[str, Any] = {}
    exec(compile(CUB, "cub.py", "exec"), space)
    try:
        exec(compile(USED.replace("/data", str(tmp_path)), "data.md", "exec"), space)
        absent = check(tmp_path / "CUB_200_2011", ["cub"])[0]
    finally:
        DATASETS.unregister("cub")
    birds, report = space["birds"], space["report"]
    assert birds.classes == ("Black footed Albatross", "Laysan Albatross")
    assert (birds.ids, birds.labels) == (("001.Black_footed_Albatross/a.jpg", "002.Laysan_Albatross/b.jpg"), (0, 1))
    assert (birds.augmix, birds[1].path.is_file()) == (True, True)
    assert (report.state, report.problem) == ("incomplete", "2 images instead of 5,794; 2 classes instead of 200")
    assert absent.state == "absent"


def test_a_protocol_exchanges_two_names_of_food101() -> None:
    names = (*(f"class {n}" for n in range(16)), "cheese plate", "cheesecake")
    food = Dataset("food101", "Food101", "fine-grained", names, ("a.jpg", "b.jpg"), (16, 17), Path("x"), "x")
    assert apply_protocol(food, "lists").fingerprint == food.fingerprint
    published = apply_protocol(food, "tta-vlm")
    assert published.classes == (*names[:16], "cheesecake", "cheese plate")
    assert published.fingerprint != food.fingerprint  # so a run directory cannot mix them
    assert "exchanged, see Footguns" in str(protocol_note("food101", food.classes, paper=True))
    assert protocol_note("food101", food.classes, paper=False) is None
    assert "as the benchmark tta-vlm has them" in str(protocol_note("food101", published.classes, paper=False))
    assert protocol_note("dtd", names, paper=True) is None
    with pytest.raises(ValueError, match="unknown protocol 'tta'; did you mean 'tta-vlm'"):
        apply_protocol(food, "tta")
