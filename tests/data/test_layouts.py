"""The paper's fifteen as they lie on disks, in every known layout: lists, classes, order of labels, folders."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.miniature import LAYOUTS, SPLITS, UNSEEN, list_file, make_aircraft, make_class_folders, make_split, put
from usetta.data import DataError, load_dataset
from usetta.data.layouts import class_folders, imagenet_classes
from usetta.images import open_image

V2 = "imagenetv2-matched-frequency-format-val"
IMAGENET = {
    "imagenet": ("imagenet/images/val", "ImageNet/val", "ILSVRC2012/val"),
    "imagenet-a": ("imagenet-adversarial/imagenet-a", "imagenet-a"),
    "imagenet-v2": (f"imagenetv2/{V2}", V2, f"imagenet-v2/{V2}"),
    "imagenet-r": ("imagenet-rendition/imagenet-r", "imagenet-r"),
    "imagenet-sketch": ("imagenet-sketch/images", "ImageNet-Sketch", "imagenet-sketch/sketch"),
}
FOLDERS = {"imagenet": 1000, "imagenet-a": 200, "imagenet-v2": 1000, "imagenet-r": 200, "imagenet-sketch": 1000}


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
    datasets = [load_dataset(name, tmp_path / layout) for layout in LAYOUTS]
    assert len({frozenset(dataset.ids) for dataset in datasets}) == 1
    assert len({dataset.fingerprint for dataset in datasets}) == 1
    assert len({dataset.root for dataset in datasets}) == len(LAYOUTS)


def test_the_sets_own_folder_is_a_root_too(tmp_path: Path) -> None:
    make_split(tmp_path, "pets")
    assert load_dataset("pets", tmp_path / "oxford_pets").fingerprint == load_dataset("pets", tmp_path).fingerprint


def test_the_folder_with_the_images_wins(tmp_path: Path) -> None:
    """CoOp's folder is there but holds other files; the images lie as in the benchmark of the paper."""
    make_split(tmp_path, "pets", "benchmark")
    put(tmp_path / "oxford_pets" / "images", ["something_else.jpg"])
    assert load_dataset("pets", tmp_path).root == tmp_path / "few-shot-datasets/oxford_pets/images"


def test_a_missing_list_is_reported(tmp_path: Path) -> None:
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


def test_a_list_without_images_is_reported(tmp_path: Path) -> None:
    make_split(tmp_path, "caltech101", images=False)
    with pytest.raises(DataError, match=r"its images are not in .*expected a folder caltech-101/101_ObjectCategories"):
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
def test_a_malformed_list_is_reported(tmp_path: Path, content: Any, why: str) -> None:
    file = make_split(tmp_path, "pets")
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=rf"{list_file('pets')} cannot be used: .*{why}.*; download it again"):
        load_dataset("pets", tmp_path)


def test_a_list_that_is_no_text_is_reported(tmp_path: Path) -> None:
    make_split(tmp_path, "pets").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        load_dataset("pets", tmp_path)


def test_an_image_listed_twice_is_reported(tmp_path: Path) -> None:
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


def test_the_thousand_classes() -> None:
    classes = imagenet_classes()
    assert len(classes) == 1000
    assert [known.wnid for known in classes] == sorted({known.wnid for known in classes})
    assert classes[0] == ("n01440764", "tench", "-")
    assert classes[999] == ("n15075141", "toilet paper", "-")
    twice = {name for name, count in Counter(known.name for known in classes).items() if count > 1}
    assert twice == {"missile", "sunglasses"}
    assert [label for label, known in enumerate(classes) if known.name == "missile"] == [657, 744]
    assert [label for label, known in enumerate(classes) if known.name == "sunglasses"] == [836, 837]
    assert Counter(known.also_in for known in classes) == {"-": 686, "A": 114, "R": 114, "AR": 86}
    assert not any("_" in known.name or known.name != known.name.strip() for known in classes)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("imagenet-a", ("n01498041", "stingray"), ("n12267677", "acorn")),
        ("imagenet-r", ("n01443537", "goldfish"), ("n12267677", "acorn")),
    ],
)
def test_the_subsets_of_200(name: str, first: tuple[str, str], last: tuple[str, str]) -> None:
    folders = class_folders(name)
    assert len(folders) == 200
    assert list(folders) == sorted(folders)
    assert next(iter(folders.items())) == first
    assert list(folders.items())[-1] == last


@pytest.mark.parametrize("name", IMAGENET)
def test_every_place_is_read(tmp_path: Path, name: str) -> None:
    home = make_class_folders(tmp_path, name, IMAGENET[name][0])
    first = load_dataset(name, tmp_path)
    assert len(first) == FOLDERS[name] + 1
    assert len(first.classes) == FOLDERS[name]
    assert first.labels == (0, 1, 2, 2, *range(3, FOLDERS[name]))
    assert first.ids[2:4] == tuple(f"{list(class_folders(name))[2]}/{file}" for file in ("a.jpg", "b.JPEG"))
    assert [first.classes[item.label or 0] for item in first] == [
        class_folders(name)[item.id.split("/")[0]] for item in first
    ]
    assert first[2].path.is_file()
    assert (first.family, first.augmix) == ("imagenet", False)
    assert first.layout == IMAGENET[name][0]
    for place in IMAGENET[name][1:]:
        moved = tmp_path / place
        moved.parent.mkdir(parents=True, exist_ok=True)
        home = home.rename(moved)
        again = load_dataset(name, tmp_path)
        assert (again.fingerprint, again.layout) == (first.fingerprint, place)
    assert load_dataset(name, home).fingerprint == first.fingerprint  # the folder itself


def test_v2_is_in_the_order_of_strings() -> None:
    names = [known.name for known in imagenet_classes()]
    folders = class_folders("imagenet-v2")
    assert list(folders)[:6] == ["0", "1", "10", "100", "101", "102"]
    assert list(folders.values())[:5] == [names[0], names[1], names[10], names[100], names[101]]
    assert list(folders.items())[-1] == ("999", names[999])
    assert folders == {str(label): name for label, name in enumerate(names)}


def empty_a_class(home: Path) -> None:
    (home / "n01498041" / "b.JPEG").unlink()


def remove_a_class(home: Path) -> None:
    shutil.rmtree(home / "n01498041")


@pytest.mark.parametrize("damage", [empty_a_class, remove_a_class])
def test_a_class_without_images_does_not_shift_the_others(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(make_class_folders(tmp_path, "imagenet-a", "imagenet-a"))
    with pytest.raises(DataError, match=r"imagenet-a is incomplete: 1 classes without images .*first is n01498041"):
        load_dataset("imagenet-a", tmp_path)


def test_another_dataset_is_recognised_by_its_classes(tmp_path: Path) -> None:
    home = tmp_path / "imagenet-r"
    put(home, ["n01443537/goldfish.jpg", "n01440764/tench.jpg"])
    with pytest.raises(DataError, match="has the folder n01440764, which is not of the 200 classes of imagenet-r"):
        load_dataset("imagenet-r", tmp_path)
    put(home, ["n01491361/tiger.jpg"])
    with pytest.raises(DataError, match="has the folder n01440764 and 1 more, which are not of the 200 classes"):
        load_dataset("imagenet-r", tmp_path)


def test_folders_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    home = make_class_folders(tmp_path, "imagenet-a", "imagenet-a")
    put(home, ["__MACOSX/x.jpg", "n01498041/._b.JPEG", "n01498041/notes.txt"])
    assert len(load_dataset("imagenet-a", tmp_path)) == 201


def test_validation_images_in_one_heap_are_reported(tmp_path: Path) -> None:
    put(tmp_path / "imagenet/images/val", ["ILSVRC2012_val_00000001.JPEG"])
    with pytest.raises(DataError, match=r"the images are directly in .*val; sort them into one folder per class"):
        load_dataset("imagenet", tmp_path)


def test_an_absent_dataset_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its images are not in .*such as imagenetv2/imagenetv2-match.*-val/0"):
        load_dataset("imagenet-v2", tmp_path)
