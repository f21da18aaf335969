"""Images in tars and Parquet files: what is found in them, the index, and reading by it."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from data.archives import tar_of
from data.world import jpeg, table_of
from usetta.data import DataError
from usetta.data.packed import INDEX, IndexedImage, PackedReader, PackedRow, read_packed, scan, write_index
from usetta.images import ImageError


def scanned(file: Path, content: bytes) -> list[PackedRow]:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return list(scan([file]).rows)


def test_labels_of_a_tar_are_beside_the_images_as_text_or_in_json(tmp_path: Path) -> None:
    files = {
        "a/1.jpg": b"one",
        "a/1.json": json.dumps({"caption": "a fox", "label": 3}).encode(),
        "a/2.jpg": b"two",
        "a/2.json": json.dumps({"class_name": "red fox"}).encode(),
        "a/3.jpg": b"three",
        "a/3.json": b'{"caption": "a fox"}',
        "a/3.cls": b"7\n",
        "a/4.jpg": b"four",
        "a/4.label.txt": b"emu",
        "a/5.jpg": b"five",
        "a/5.txt": b"a caption",
        "a/5.json": b"5",
    }
    rows = scanned(tmp_path / "0.tar", tar_of(files))
    assert [(row.name, row.label) for row in rows] == [
        ("a/1.jpg", 3),
        ("a/2.jpg", "red fox"),
        ("a/3.jpg", 7),
        ("a/4.jpg", "emu"),
        ("a/5.jpg", None),
    ]
    content = (tmp_path / "0.tar").read_bytes()
    assert [content[start : start + size] for start, size in (row.place for row in rows)] == [
        b"one", b"two", b"three", b"four", b"five",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/7.jpg": b"x", "a/7.left.png": b"y"}, "the sample a/7 has 2 images; expected one"),
        ({"7.jpg": b"x", "7.json": b'{"label": '}, "7.json is not JSON; download it again"),
    ],
)
def test_a_tar_that_is_not_as_expected_is_reported(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError) as caught:
        scanned(tmp_path / "0.tar", tar_of(files))
    assert str(caught.value) == f"{tmp_path / '0.tar'}: {message}"


def test_a_compressed_tar_cannot_be_read_in_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0\.tar cannot be read in place: .*; expected a tar without compression"):
        scanned(tmp_path / "0.tar", tar_of({"1.jpg": b"x"}, "gz"))


def test_a_table_without_images_or_that_is_none_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"0\.parquet has no column of images; its columns are label, text$"):
        scanned(tmp_path / "0.parquet", table_of([{"label": 1, "text": "a fox"}]))
    whole = table_of([{"image": b"x", "label": 1}])
    thrift = whole[:-30] + b"\xff" * 22 + whole[-8:]  # Arrow raises another error for a damaged footer
    for content in (b"", b"no table", whole[:-3], thrift):
        with pytest.raises(DataError, match=r"0\.parquet is damaged or not a Parquet file; download it again$"):
            scanned(tmp_path / "0.parquet", content)


def packed(folder: Path, *rows: dict[str, Any]) -> PackedReader:
    """A reader of a table with these rows, which are the images `0.jpg`, `1.jpg` and so on."""
    pytest.importorskip("pyarrow")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0.parquet").write_bytes(table_of(rows))
    found = scan([folder / "0.parquet"])
    images = [IndexedImage(f"{n}.jpg", 0, row.file, row.place) for n, row in enumerate(found.rows)]
    write_index(folder, found, images, ["fox"], "here")
    return PackedReader(folder)


def test_an_image_of_a_table_is_its_bytes_or_the_file_at_its_path(tmp_path: Path) -> None:
    (tmp_path / "packed" / "images").mkdir(parents=True)
    (tmp_path / "packed" / "images" / "a.jpg").write_bytes(jpeg("a"))
    paths = ("b.jpg", "images/a.jpg", "images/gone.jpg")
    rows = [{"image": {"bytes": jpeg("b") if path == "b.jpg" else None, "path": path}, "label": 0} for path in paths]
    reader = pickle.loads(pickle.dumps(packed(tmp_path / "packed", *rows)))
    assert reader("0.jpg") == jpeg("b")
    assert reader("1.jpg") == str(tmp_path / "packed" / "images" / "a.jpg")
    with pytest.raises(ImageError) as caught:
        reader("2.jpg")
    assert caught.value.reason == "the table holds neither its bytes nor its path"
    with pytest.raises(ImageError, match=r"9\.jpg.*the index does not contain it"):
        reader("9.jpg")


def test_rows_of_all_groups_are_read_in_any_order(tmp_path: Path) -> None:
    """A group has two rows, and three groups are kept."""
    reader = packed(tmp_path, *({"image": jpeg(str(n)), "label": 0} for n in range(11)))
    for number in (*range(11), *range(10, -1, -1)):
        assert reader(f"{number}.jpg") == jpeg(str(number))
    assert len(reader._groups) == 3


def test_a_file_that_was_damaged_or_removed_after_indexing_fails_its_images_alone(tmp_path: Path) -> None:
    reader = packed(tmp_path, {"image": jpeg("a"), "label": 0})
    whole = (tmp_path / "0.parquet").read_bytes()
    for content in (whole[:-3], bytes(len(whole)), b"PAR1" + bytes(len(whole) - 200) + whole[-196:]):
        (tmp_path / "0.parquet").write_bytes(content)
        with pytest.raises(ImageError, match=r"0\.parquet: 0\.jpg.*cannot be read \("):
            reader("0.jpg")
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(ImageError, match=r"0\.parquet: 0\.jpg.*cannot be read \(No such file or directory\)"):
        reader("0.jpg")
    assert read_packed(tmp_path).missing == ("0.jpg",)
    (tmp_path / "0.parquet").write_bytes(whole[:-3])
    assert read_packed(tmp_path).missing == ("0.jpg",), "another size"
    (tmp_path / "0.parquet").write_bytes(whole)
    assert read_packed(tmp_path).missing == ()
    assert reader("0.jpg") == jpeg("a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has the format 2, which this version does not know"),
        ({"images": [["0.jpg", 0]]}, "is damaged; delete it and fetch or import the dataset again"),
        ({"files": None}, "is damaged; delete it"),
        (None, "is damaged; delete it"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(tmp_path: Path, change: dict[str, Any] | None, message: str) -> None:
    packed(tmp_path, {"image": jpeg("a"), "label": 0})
    index = tmp_path / INDEX
    changed = json.loads(index.read_text()) | (change or {})
    index.write_text(json.dumps(changed) if change else index.read_text()[:-9])
    with pytest.raises(DataError) as caught:
        read_packed(tmp_path)
    assert str(caught.value).startswith(f"{index} {message}")
