"""The sets with a list of their test images, in every known layout."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.miniature import LAYOUTS, SPLITS, UNSEEN, make_aircraft, make_split, put, split_file
from usetta.data import DataError, load_dataset
from usetta.images import open_image


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPLITS)
def test_every_layout_is_read(tmp_path: Path, name: str, layout: str) -> None:
    file = make_split(tmp_path, name, layout)
    dataset = load_dataset(name, tmp_path)
    items = sorted(SPLITS[name][0]) if layout == "use" else SPLITS[name][0]
    assert dataset.ids == tuple(image for image, _, _ in items)
    assert dataset.labels == tuple(label for _, label, _ in items)
    names = {label: called.replace("_", " ") for _, label, called in items}
    assert dataset.classes == (names[0], names[1], names[2], UNSEEN)
    assert (dataset.name, dataset.family, dataset.augmix) == (name, "fine-grained", True)
    assert dataset.layout.endswith(f"listed in {file.relative_to(tmp_path).as_posix()}")
    assert {open_image(item.path).size for item in dataset} == {(2, 2)}


@pytest.mark.parametrize("name", SPLITS)
def test_the_layout_changes_neither_ids_nor_fingerprint(tmp_path: Path, name: str) -> None:
    for layout in LAYOUTS:
        make_split(tmp_path / layout, name, layout)
    sets = [load_dataset(name, tmp_path / layout) for layout in LAYOUTS]
    assert len({frozenset(dataset.ids) for dataset in sets}) == 1
    assert len({dataset.fingerprint for dataset in sets}) == 1
    assert len({dataset.root for dataset in sets}) == len(LAYOUTS)


def test_the_sets_own_folder_is_a_root_too(tmp_path: Path) -> None:
    make_split(tmp_path, "pets")
    assert load_dataset("pets", tmp_path / "oxford_pets").fingerprint == load_dataset("pets", tmp_path).fingerprint


def test_the_folder_with_the_images_wins(tmp_path: Path) -> None:
    """CoOp's folder is there but holds other files; the images lie as in the benchmark of the paper."""
    make_split(tmp_path, "pets", "benchmark")
    put(tmp_path / "oxford_pets" / "images", ["something_else.jpg"])
    assert load_dataset("pets", tmp_path).root == tmp_path / "few-shot-datasets/oxford_pets/images"


def test_a_missing_list_is_told(tmp_path: Path) -> None:
    make_split(tmp_path, "dtd").unlink()
    with pytest.raises(
        DataError, match=r"dtd: there is no split_zhou_DescribableTextures\.json in .*; `usetta data fe"
    ):
        load_dataset("dtd", tmp_path)


def test_missing_images_are_counted_and_named(tmp_path: Path) -> None:
    make_split(tmp_path, "food101")
    (tmp_path / "food-101/images/baklava/3832160.jpg").unlink()
    with pytest.raises(
        DataError, match=r"food101 is incomplete: 1 listed images missing in .*first is baklava/3832160"
    ):
        load_dataset("food101", tmp_path)


def test_a_list_without_images_is_told(tmp_path: Path) -> None:
    make_split(tmp_path, "caltech101", images=False)
    with pytest.raises(
        DataError, match=r"its images are not in .*expected is a folder caltech-101/101_ObjectCategories"
    ):
        load_dataset("caltech101", tmp_path)


GOOD = ["a.jpg", 0, "cat"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"test": [\n["a.jpg", 0', r"not JSON \(line 2"),
        ("[]", "it has no list 'test'"),
        ({"test": []}, "its list 'test' is empty"),
        ({"train": [GOOD], "test": [["a.jpg", 0]]}, r"entry 0 of 'test' is \['a.jpg', 0\], not \[path, label, class"),
        ({"test": [GOOD, ["b.jpg", "1", "dog"]]}, "entry 1 of 'test'"),
        ({"test": [GOOD, ["b.jpg", True, "dog"]]}, "entry 1 of 'test'"),
        ({"test": [GOOD, ["b.jpg", -1, "dog"]]}, "entry 1 of 'test'"),
        ({"test": [GOOD, ["b.jpg", 0, "dog"]]}, "class 0 is called 'cat' and 'dog'"),
        ({"test": [GOOD, ["b.jpg", 10**12, "dog"]]}, "no image has label 1, though labels go up to 1000000000000"),
    ],
)
def test_a_malformed_list_is_told(tmp_path: Path, content: Any, why: str) -> None:
    file = make_split(tmp_path, "pets")
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=rf"{split_file('pets')} cannot be used: .*{why}.*; download it anew"):
        load_dataset("pets", tmp_path)


def test_a_list_that_is_no_text_is_told(tmp_path: Path) -> None:
    make_split(tmp_path, "pets").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        load_dataset("pets", tmp_path)


def test_a_image_listed_twice_is_told(tmp_path: Path) -> None:
    file = make_split(tmp_path, "pets")
    file.write_text(json.dumps({"test": [["Abyssinian_71.jpg", 0, "cat"]] * 2}), encoding="utf-8")
    with pytest.raises(DataError, match="pets lists the image Abyssinian_71.jpg twice"):
        load_dataset("pets", tmp_path)


@pytest.mark.parametrize(
    "folder", ["fgvc_aircraft", "fgvc-aircraft-2013b/data", "few-shot-datasets/fgvc_aircraft", "aircraft"]
)
def test_aircraft(tmp_path: Path, folder: str) -> None:
    make_aircraft(tmp_path / folder)
    dataset = load_dataset("aircraft", tmp_path)
    assert dataset.ids == ("1514522.jpg", "0747566.jpg", "1008575.jpg")
    assert dataset.labels == (1, 0, 3)
    assert dataset.classes == ("707-320", "727-200", "A300B4", "An-12")
    assert dataset.root == tmp_path / folder / "images"
    assert dataset.augmix


def test_aircraft_with_an_unknown_variant(tmp_path: Path) -> None:
    make_aircraft(tmp_path / "fgvc_aircraft")
    with (tmp_path / "fgvc_aircraft" / "images_variant_test.txt").open("a") as file:
        file.write("1234567 Zeppelin NT\n")
    with pytest.raises(DataError, match=r"line 4: 'Zeppelin NT' is not in variants\.txt"):
        load_dataset("aircraft", tmp_path)


@pytest.mark.parametrize("file", ["variants.txt", "images_variant_test.txt"])
def test_aircraft_without_its_lists(tmp_path: Path, file: str) -> None:
    make_aircraft(tmp_path / "fgvc_aircraft")
    (tmp_path / "fgvc_aircraft" / file).unlink()
    with pytest.raises(DataError, match=file):
        load_dataset("aircraft", tmp_path)
