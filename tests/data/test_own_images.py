"""Folders and lists that belong to no benchmark, and what a dataset is."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from data.miniature import put
from usetta.data import DataError, Dataset, load_dataset
from usetta.images import open_image


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "animals"
    put(root, ["red_fox/b.jpg", "red_fox/deeper/a.PNG", "Cat/1.jpeg", "cat_fish/9.webp", ".hidden/x.jpg"])
    (root / "notes.txt").write_text("not a class")
    return root


def test_a_folder_of_class_folders(folder: Path) -> None:
    dataset = load_dataset(folder)
    assert dataset.classes == ("Cat", "cat fish", "red fox")
    assert dataset.ids == ("Cat/1.jpeg", "cat_fish/9.webp", "red_fox/b.jpg", "red_fox/deeper/a.PNG")
    assert dataset.labels == (0, 1, 2, 2)
    assert (dataset.name, dataset.family, dataset.augmix, dataset.root) == ("animals", "other", False, folder)
    assert [item.path for item in dataset] == [folder / image for image in dataset.ids]
    assert dataset[-1].label == 2
    with pytest.raises(IndexError):
        dataset[4]


def test_the_current_folder_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    dataset = load_dataset(".")
    assert (dataset.name, dataset.root, len(dataset)) == ("animals", folder, 4)


def test_a_folder_without_images_is_no_class(folder: Path) -> None:
    (folder / "annotations").mkdir()
    with pytest.raises(DataError, match=r"annotations: folder contains no images.*every folder is a class"):
        load_dataset(folder)


def test_two_folders_of_one_class_are_reported(folder: Path) -> None:
    put(folder, ["red fox/c.jpg"])
    with pytest.raises(DataError, match="two folders of .* have the class name 'red fox'"):
        load_dataset(folder)


def test_parts_are_not_classes(tmp_path: Path) -> None:
    put(tmp_path, ["test/cat/a.jpg", "train/cat/a.jpg"])
    with pytest.raises(DataError, match=r"contains the parts of a dataset; choose one, such as .*test"):
        load_dataset(tmp_path)
    assert load_dataset(tmp_path / "test").classes == ("cat",)


def test_a_folder_of_the_benchmark_is_not_read_as_classes(folder: Path) -> None:
    (folder / "split_zhou_OxfordPets.json").write_text("{}")
    with pytest.raises(DataError, match="load it by its name"):
        load_dataset(folder)


def test_an_empty_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no folders; expected one folder of images per class"):
        load_dataset(tmp_path)


PATHS = ("a.jpg", "in/b.jpg", "c.jpg")


def write(root: Path, name: str, content: str) -> Path:
    put(root, PATHS)
    file = root / name
    file.write_text(content, encoding="utf-8")
    return file


EQUAL = {
    "list.csv": "path,label\na.jpg,red_fox\nin/b.jpg,cat\nc.jpg,red fox\n",
    "bom.csv": "\ufefflabel , path\nred_fox,a.jpg\n cat, in/../in/b.jpg\nred fox,./c.jpg\n",
    "list.tsv": "path\tclass\na.jpg\tred fox\nin/b.jpg\tcat\nc.jpg\tred fox\n",
    "numbers.csv": "path,label,class\na.jpg,1,red fox\nin/b.jpg,0,cat\nc.jpg,1,red fox\n",
    "list.jsonl": '{"path": "a.jpg", "label": "red fox"}\n\n{"path": "in/b.jpg", "label": "cat", "more": 1}\n'
    '{"path": "c.jpg", "label": "red fox"}\n',
    "numbers.jsonl": '{"path": "a.jpg", "label": 1, "class": "red_fox"}\n'
    '{"path": "in/b.jpg", "label": 0, "class": "cat"}\n'
    '{"path": "c.jpg", "label": 1, "class": "red fox"}\n',
    "manifest.json": json.dumps(
        {"n": 3, "items": [["a.jpg", 1, "red fox", "x"], ["in/b.jpg", 0, "cat"], ["c.jpg", 1, "red fox"]]}
    ),
    "plain.json": json.dumps([{"path": "a.jpg", "label": "red fox"}, ["in/b.jpg", "cat"], ["c.jpg", "red fox"]]),
}


@pytest.mark.parametrize("name", EQUAL)
def test_every_kind_of_list_reads_the_same(tmp_path: Path, name: str) -> None:
    dataset = load_dataset(write(tmp_path / "photos", name, EQUAL[name]))
    assert dataset.classes == ("cat", "red fox")
    assert dataset.ids == PATHS
    assert dataset.labels == (1, 0, 1)
    assert dataset.name == ("photos" if name == "manifest.json" else Path(name).stem)
    assert dataset.root == tmp_path / "photos"
    assert {open_image(item.path).size for item in dataset} == {(2, 2)}
    assert dataset.fingerprint == load_dataset(write(tmp_path / "other", "list.csv", EQUAL["list.csv"])).fingerprint


def test_a_folder_with_a_manifest_is_read_by_it(tmp_path: Path) -> None:
    write(tmp_path, "manifest.csv", EQUAL["list.csv"])
    assert load_dataset(tmp_path).ids == PATHS


def test_given_class_names_decide_the_order(tmp_path: Path) -> None:
    file = write(tmp_path, "list.csv", EQUAL["list.csv"])
    dataset = load_dataset(file, classes=["zebra", "red_fox", "cat"])
    assert dataset.classes == ("zebra", "red fox", "cat")
    assert dataset.labels == (1, 2, 1)
    file.write_text("path,label\na.jpg,2\nc.jpg,0\n")
    assert load_dataset(file, classes=["zebra", "red fox", "cat"]).labels == (2, 0)


def test_images_without_labels(tmp_path: Path) -> None:
    file = write(tmp_path, "list.csv", "path\na.jpg\nc.jpg\n")
    dataset = load_dataset(file, classes=["cat", "dog"])
    assert dataset.labels is None
    assert [item.label for item in dataset] == [None, None]
    assert len(dataset.fingerprint) == 32
    with pytest.raises(DataError, match="contains no class names; add a column label or class"):
        load_dataset(file)


def test_images_elsewhere_keep_relative_ids(tmp_path: Path) -> None:
    put(tmp_path, ["side/x.jpg"])
    file = write(tmp_path / "lists", "list.csv", f"path,label\n../side/x.jpg,cat\n{tmp_path}/lists/a.jpg,dog\n")
    dataset = load_dataset(file)
    assert dataset.ids == ("../side/x.jpg", "a.jpg")
    assert all(item.path.is_file() for item in dataset)


BAD: list[tuple[str, Any, str]] = [
    ("list.csv", "", r"line 1: there is no column 'path' \(found: none\)"),
    ("list.csv", "path,label\n", "lists no images"),
    ("list.csv", "file,label\na.jpg,cat\n", r"line 1: there is no column 'path' \(found: file, label\)"),
    ("list.csv", "path,label\na.jpg,cat\n,cat\n", "line 3: no path"),
    ("list.csv", "path,label\na.jpg,cat\nin/b.jpg,\n", r"line 3: in/b\.jpg has no label, but others have"),
    ("list.csv", "path,label\na.jpg,cat,dog\n", "line 2: more values than columns"),
    ("list.csv", "path,label\na.jpg,0\n", "line 2: label 0 has no name; add a column class"),
    ("list.csv", "path,label,class\na.jpg,cat,dog\n", "line 2: two names, label 'cat' and class 'dog'"),
    ("list.csv", "path,label,class\na.jpg,0,cat\nc.jpg,0,dog\n", "line 3: label 0 is 'dog' here and 'cat' above"),
    ("list.csv", "path,label,class\na.jpg,0,cat\nc.jpg,7,dog\n", "has no label 1, though labels go up to 7"),
    ("list.csv", "path,label\na.jpg,cat\n./a.jpg,cat\n", r"line 3: \./a\.jpg is already listed in line 2"),
    ("list.csv", "path,label\na.jpg,cat\nz.jpg,cat\n", r"line 3: there is no z\.jpg \(1 of 2 images are missing\)"),
    ("list.jsonl", '{"path": "a.jpg", "label": "cat"}\n{"path": \n', "line 2: not JSON"),
    ("list.jsonl", '{"path": "a.jpg", "label": -1}\n', "line 1: label -1 is negative"),
    ("list.jsonl", '{"path": "a.jpg", "label": 1.5}\n', "line 1: label 1.5 is neither a number nor a name"),
    ("list.jsonl", '{"path": "a.jpg", "label": true}\n', "line 1: label True is neither a number nor a name"),
    ("list.jsonl", '{"path": "a.jpg", "label": 0, "class": 3}\n', "line 1: class 3 is not a name"),
    ("list.jsonl", '["a.jpg", "cat"]\n', "line 1: no path"),
    ("list.jsonl", "", "lists no images"),
    ("manifest.json", '{"items": [\n["a.jpg"', "line 2: not JSON"),
    ("manifest.json", '{"images": []}', "has no list 'items'"),
    ("manifest.json", '{"items": []}', "lists no images"),
    ("manifest.json", '{"items": [["a.jpg", 0, "cat"], [7, 0, "cat"]]}', "item 2: no path"),
    ("list.txt", "a.jpg", "is not a list of images; its name must end in .csv, .tsv, .jsonl, .json"),
]


@pytest.mark.parametrize(("name", "content", "why"), BAD)
def test_a_bad_list_is_reported_with_its_line(tmp_path: Path, name: str, content: str, why: str) -> None:
    file = write(tmp_path, name, content)
    with pytest.raises(DataError, match=why) as caught:
        load_dataset(file)
    assert str(caught.value).startswith(str(file))


def test_a_list_in_another_encoding_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path, "list.csv", "")
    file.write_bytes("path,label\na.jpg,käse\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8 text; save it as UTF-8"):
        load_dataset(file)


def test_labels_beyond_the_given_names_are_reported(tmp_path: Path) -> None:
    file = write(tmp_path, "list.csv", "path,label\na.jpg,2\n")
    with pytest.raises(DataError, match="line 2: label 2 is out of range for 2 classes"):
        load_dataset(file, classes=["cat", "dog"])
    file.write_text("path,label\na.jpg,wolf\n")
    with pytest.raises(DataError, match="line 2: 'wolf' is not one of the 2 classes; they are cat, dog"):
        load_dataset(file, classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("name", "images", "classes", "first"),
    [
        ("caltech101", 500, 100, "face"),
        ("oxford_pets", 370, 37, "abyssinian"),
        ("flowers102", 387, 102, "pink primrose"),
        ("dtd10", 200, 10, "banded"),
        ("imagenet1000", 1000, 1000, "tench"),
    ],
)
def test_real_images(real_images: Path, name: str, images: int, classes: int, first: str) -> None:
    dataset = load_dataset(real_images / name)
    assert (len(dataset), len(dataset.classes), dataset.classes[0]) == (images, classes, first)
    assert dataset.labels is not None
    assert sorted(set(dataset.labels)) == list(range(classes))
    assert min(open_image(dataset[images // 2].path).size) > 32


def test_real_images_in_folders(real_images: Path, tmp_path: Path) -> None:
    listed = load_dataset(real_images / "dtd10")
    for item in listed:
        assert item.label is not None
        link = tmp_path / listed.classes[item.label] / item.id
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(item.path)
    dataset = load_dataset(tmp_path)
    assert dataset.classes == listed.classes
    assert dataset.labels == listed.labels


def make_dataset(**changes: Any) -> Dataset:
    parts: dict[str, Any] = {
        "name": "pair",
        "title": "Pair",
        "family": "other",
        "classes": ("cat", "dog"),
        "ids": ("a.jpg", "b.jpg"),
        "labels": (0, 1),
        "root": Path("/somewhere"),
        "layout": "",
    }
    return Dataset(**(parts | changes))


def test_the_fingerprint_is_of_ids_labels_and_names_only() -> None:
    same = make_dataset().fingerprint
    assert len(same) == 32
    assert make_dataset(root=Path("/elsewhere"), name="other", layout="x").fingerprint == same
    assert make_dataset(ids=("b.jpg", "a.jpg"), labels=(1, 0)).fingerprint == same
    others = [
        make_dataset(labels=(1, 0)),
        make_dataset(labels=None),
        make_dataset(ids=("a.jpg", "c.jpg")),
        make_dataset(classes=("cat", "hound")),
        make_dataset(classes=("dog", "cat")),
        make_dataset(classes=("cat", "dog", "fox")),
    ]
    assert len({same, *(other.fingerprint for other in others)}) == 7


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ids": (), "labels": ()}, "pair has no images"),
        ({"classes": ()}, "pair has no classes"),
        ({"labels": (0,)}, "2 images and 1 labels"),
        ({"labels": (0, 2)}, r"labels outside 0\.\.1"),
        ({"labels": (-1, 0)}, r"labels outside 0\.\.1"),
        ({"ids": ("a.jpg", "a.jpg")}, r"lists the image a\.jpg twice"),
    ],
)
def test_a_dataset_is_consistent(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        make_dataset(**changes)


def test_a_dataset_prints_short_and_travels_between_processes() -> None:
    dataset = make_dataset(ids=tuple(f"{i}.jpg" for i in range(1000)), labels=(0,) * 1000)
    assert len(repr(dataset)) < 200
    assert pickle.loads(pickle.dumps(dataset)).fingerprint == dataset.fingerprint
    error = pickle.loads(pickle.dumps(DataError("no image", "add one")))
    assert str(error) == "no image; add one"
