"""Images of one's own: any folder that holds a folder for each class, and any list of images.

In a folder, classes are in the order of their folders' names. A folder without images is an error rather than a class:
it is more often something that does not belong there than a class nobody has an image of, and it would change every
answer.

A list is a table (`.csv`, `.tsv`), a JSON object per line (`.jsonl`), or a `manifest.json`. Each row has a `path`,
relative to the file, and may have a `label` (a number counted from 0, or a class name) and a `class` (a name, beside a
number). Class names come from the rows, in alphabetical order unless numbers say otherwise, or from the caller. Either
all rows have labels or none has; errors name the line.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from usetta.data.dataset import DataError, Dataset, class_name, missing_images
from usetta.images import ImageError, find_images

LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
MANIFESTS = tuple(f"manifest{suffix}" for suffix in LIST_SUFFIXES)
"""Lists of these names are read when the folder that they lie in is loaded."""

_PARTS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
_ROW = "each row needs a path and may have a label and a class"


def read_folder(root: Path) -> Dataset:
    """Read `root/class/image.jpg`; images may lie deeper, hidden files and folders are skipped."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise DataError(f"{root} contains no folders", "expected one folder of images per class")
    if all(folder.name.lower() in _PARTS for folder in folders):
        raise DataError(f"{root} contains the parts of a dataset", f"choose one, such as {folders[0]}")
    if splits := sorted(root.glob("*split_zhou_*.json")):
        raise DataError(f"{root} contains {splits[0].name}, so it is a benchmark dataset", "load it by its name")
    classes = [class_name(folder.name) for folder in folders]
    if repeated := next((name for label, name in enumerate(classes) if name in classes[:label]), None):
        raise DataError(f"two folders of {root} have the class name {repeated!r}", "merge them")
    ids: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        try:
            images = find_images(folder)
        except ImageError as error:
            raise DataError(str(error), "every folder is a class and must contain images") from error
        ids += [image.relative_to(root).as_posix() for image in images]
        labels += [label] * len(images)
    return Dataset(
        name=root.name,
        title=root.name,
        family="other",
        classes=tuple(classes),
        ids=tuple(ids),
        labels=tuple(labels),
        root=root,
        layout=f"{root}, a folder for each class",
    )


class _ListRow(NamedTuple):
    where: str
    path: str
    number: int | None
    name: str | None


def read_list(file: Path, classes: Sequence[str] | None = None) -> Dataset:
    """Read the images that `file` lists; `classes` gives the class names by label."""
    rows = list(_rows(file))
    if not rows:
        raise DataError(f"{file} lists no images", "add a row for each image")
    names = tuple(map(class_name, classes)) if classes is not None else _class_names(file, rows)
    labels = _labels(file, rows, names)
    ids: list[str] = []
    seen: dict[str, str] = {}
    for row in rows:
        image_id = _id(file.parent, row.path)
        if image_id in seen:
            raise DataError(f"{file}, {row.where}: {row.path} is already listed in {seen[image_id]}", "list it once")
        seen[image_id] = row.where
        ids.append(image_id)
    if missing := missing_images(file.parent, ids):
        raise DataError(
            f"{file}, {seen[missing[0]]}: there is no {missing[0]} ({len(missing)} of {len(ids)} images are missing)",
            f"paths are relative to {file.parent}",
        )
    name = file.parent.name if file.name in MANIFESTS else file.stem
    return Dataset(
        name=name,
        title=name,
        family="other",
        classes=names,
        ids=tuple(ids),
        labels=labels,
        root=file.parent,
        layout=str(file),
    )


def _class_names(file: Path, rows: list[_ListRow]) -> tuple[str, ...]:
    """Class names by label, from the rows."""
    if all(row.number is None for row in rows):
        names = sorted({row.name for row in rows if row.name is not None})
        if not names:
            raise DataError(f"{file} contains no class names", "add a column label or class")
        return tuple(names)
    by_number: dict[int, str] = {}
    for row in rows:
        if row.number is None:
            continue  # `_labels` reports it, since only there it is known whether other rows have one
        if row.name is None:
            raise DataError(
                f"{file}, {row.where}: label {row.number} has no name", "add a column class, or use names as labels"
            )
        if by_number.setdefault(row.number, row.name) != row.name:
            raise DataError(
                f"{file}, {row.where}: label {row.number} is {row.name!r} here and {by_number[row.number]!r} above",
                "give each label one name",
            )
    for number in range(len(by_number)):
        if number not in by_number:
            raise DataError(
                f"{file} has no label {number}, though labels go up to {max(by_number)}", "give the class names"
            )
    return tuple(by_number[number] for number in sorted(by_number))


def _labels(file: Path, rows: list[_ListRow], names: tuple[str, ...]) -> tuple[int, ...] | None:
    if all(row.number is None and row.name is None for row in rows):
        return None
    # Reversed, so that of two classes with one name the first gets the images.
    by_name = {name: label for label, name in reversed(list(enumerate(names)))}
    labels = []
    for row in rows:
        if row.number is None and row.name is None:
            raise DataError(
                f"{file}, {row.where}: {row.path} has no label, but others have", "label all images or none"
            )
        label = by_name.get(row.name or "") if row.number is None else row.number
        if label is None:
            known = f"they are {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            raise DataError(f"{file}, {row.where}: {row.name!r} is not one of the {len(names)} classes", known)
        if label >= len(names):
            raise DataError(
                f"{file}, {row.where}: label {label} is out of range for {len(names)} classes", "labels count from 0"
            )
        labels.append(label)
    return tuple(labels)


def _id(root: Path, path: str) -> str:
    """`path` relative to `root` and without detours, so that one image has one id."""
    absolute = Path(os.path.normpath(root.absolute() / path))
    try:
        return absolute.relative_to(root.absolute()).as_posix()
    except ValueError:  # beside the list or elsewhere: still relative unless it was written in full
        return absolute.as_posix() if Path(path).is_absolute() else PurePosixPath(os.path.normpath(path)).as_posix()


def _rows(file: Path) -> Iterator[_ListRow]:
    reader = {".csv": _table, ".tsv": _table, ".jsonl": _json_lines, ".json": _json_items}.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file} is not a list of images", f"its name must end in {', '.join(LIST_SUFFIXES)}")
    try:
        yield from reader(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text", "save it as UTF-8") from error


def _table(file: Path) -> Iterator[_ListRow]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", skipinitialspace=True)
        try:
            columns = [column.strip() for column in reader.fieldnames or ()]
            if "path" not in columns:
                header = ", ".join(columns) or "none"
                raise DataError(f"{file}, line 1: there is no column 'path' (found: {header})", _ROW)
            reader.fieldnames = columns
            for row in reader:
                if None in row:
                    raise DataError(
                        f"{file}, line {reader.line_num}: more values than columns",
                        "put quotes around values with commas",
                    )
                yield _row(file, f"line {reader.line_num}", row)
        except csv.Error as error:
            raise DataError(f"{file}, line {reader.line_num}: {error}", _ROW) from error


def _json_lines(file: Path) -> Iterator[_ListRow]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}, line {number}: not JSON ({error.msg})", _ROW) from error
            yield _row(file, f"line {number}", row)


def _json_items(file: Path) -> Iterator[_ListRow]:
    """`{"items": [...]}` or a list; an item is an object or `[path, label, class, ...]`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {error.lineno}: not JSON ({error.msg})", _ROW) from error
    items = content.get("items") if isinstance(content, dict) else content
    if not isinstance(items, list):
        raise DataError(f"{file} has no list 'items'", _ROW)
    for number, item in enumerate(items, 1):
        row = dict(zip(("path", "label", "class"), item, strict=False)) if isinstance(item, list) else item
        yield _row(file, f"item {number}", row)


def _row(file: Path, where: str, row: Any) -> _ListRow:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not row["path"].strip():
        raise DataError(f"{file}, {where}: no path", _ROW)
    label, name = row.get("label"), row.get("class")
    if isinstance(label, str):
        label = label.strip()
        label = int(label) if label.isdecimal() else label
    if isinstance(label, bool) or not (label is None or isinstance(label, int | str)):
        raise DataError(f"{file}, {where}: label {label!r} is neither a number nor a name", _ROW)
    if not (name is None or isinstance(name, str)):
        raise DataError(f"{file}, {where}: class {name!r} is not a name", _ROW)
    if isinstance(label, int) and label < 0:
        raise DataError(f"{file}, {where}: label {label} is negative", "labels count from 0")
    if isinstance(label, str) and label and name:
        raise DataError(f"{file}, {where}: two names, label {label!r} and class {name!r}", _ROW)
    name = (label if isinstance(label, str) else None) or (name or "").strip() or None
    return _ListRow(where, row["path"].strip(), label if isinstance(label, int) else None, name and class_name(name))
