"""ImageNet and its relatives: classes, order of labels, folders."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from data.miniature import put
from usetta.data import DataError, load_dataset
from usetta.data.imagenet import class_folders, imagenet_classes

V2 = "imagenetv2-matched-frequency-format-val"
PLACES = {
    "imagenet": ("imagenet/images/val", "ImageNet/val", "ILSVRC2012/val"),
    "imagenet-a": ("imagenet-adversarial/imagenet-a", "imagenet-a"),
    "imagenet-v2": (f"imagenetv2/{V2}", V2, f"imagenet-v2/{V2}"),
    "imagenet-r": ("imagenet-rendition/imagenet-r", "imagenet-r"),
    "imagenet-sketch": ("imagenet-sketch/images", "ImageNet-Sketch", "imagenet-sketch/sketch"),
}
FOLDERS = {"imagenet": 1000, "imagenet-a": 200, "imagenet-v2": 1000, "imagenet-r": 200, "imagenet-sketch": 1000}


def make(root: Path, name: str, place: str | None = None) -> Path:
    """Every class has an image, and the third has two."""
    home = root / (place or PLACES[name][0])
    folders = list(class_folders(name))
    put(home, [f"{folder}/b.JPEG" for folder in folders])
    put(home, [f"{folders[2]}/a.jpg"])
    (home / "README.txt").write_text("not a class")
    return home


def test_the_thousand_classes() -> None:
    classes = imagenet_classes()
    assert len(classes) == 1000
    assert [each.wnid for each in classes] == sorted({each.wnid for each in classes})
    assert classes[0] == ("n01440764", "tench", "-")
    assert classes[999] == ("n15075141", "toilet paper", "-")
    twice = {name for name, count in Counter(each.name for each in classes).items() if count > 1}
    assert twice == {"missile", "sunglasses"}
    assert [label for label, each in enumerate(classes) if each.name == "missile"] == [657, 744]
    assert [label for label, each in enumerate(classes) if each.name == "sunglasses"] == [836, 837]
    assert Counter(each.also_in for each in classes) == {"-": 686, "A": 114, "R": 114, "AR": 86}
    assert not any("_" in each.name or each.name != each.name.strip() for each in classes)


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


@pytest.mark.parametrize("name", PLACES)
def test_every_place_is_read(tmp_path: Path, name: str) -> None:
    home = make(tmp_path, name)
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
    assert first.layout == PLACES[name][0]
    for place in PLACES[name][1:]:
        moved = tmp_path / place
        moved.parent.mkdir(parents=True, exist_ok=True)
        home = home.rename(moved)
        again = load_dataset(name, tmp_path)
        assert (again.fingerprint, again.layout) == (first.fingerprint, place)
    assert load_dataset(name, home).fingerprint == first.fingerprint  # the folder itself


def test_v2_is_in_the_order_of_strings() -> None:
    names = [each.name for each in imagenet_classes()]
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
    damage(make(tmp_path, "imagenet-a"))
    with pytest.raises(DataError, match=r"imagenet-a is incomplete: 1 classes without images .*first is n01498041"):
        load_dataset("imagenet-a", tmp_path)


def test_another_set_is_told_by_its_classes(tmp_path: Path) -> None:
    home = tmp_path / "imagenet-r"
    put(home, ["n01443537/goldfish.jpg", "n01440764/tench.jpg"])
    with pytest.raises(DataError, match="has the folder n01440764, which is not of the 200 classes of ImageNet-R"):
        load_dataset("imagenet-r", tmp_path)
    put(home, ["n01491361/tiger.jpg"])
    with pytest.raises(DataError, match="has the folder n01440764 and 1 more, which are not of the 200 classes"):
        load_dataset("imagenet-r", tmp_path)


def test_folders_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    home = make(tmp_path, "imagenet-a")
    put(home, ["__MACOSX/x.jpg", "n01498041/._b.JPEG", "n01498041/notes.txt"])
    assert len(load_dataset("imagenet-a", tmp_path)) == 201


def test_validation_images_in_one_heap_are_told(tmp_path: Path) -> None:
    put(tmp_path / "imagenet/images/val", ["ILSVRC2012_val_00000001.JPEG"])
    with pytest.raises(DataError, match=r"the images lie in .*val itself; sort them into one folder for each wnid"):
        load_dataset("imagenet", tmp_path)


def test_an_absent_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"its images are not in .*such as imagenetv2/imagenetv2-match.*-val/0"):
        load_dataset("imagenet-v2", tmp_path)
