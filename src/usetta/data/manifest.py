"""Any list of images: a table (`.csv`, `.tsv`), a JSON object per line (`.jsonl`), or a `manifest.json`.

Each row has a `path`, relative to the file, and may have a `label` (a number counted from 0, or a class name) and a
`class` (a name, beside a number). Class names come from the rows, in alphabetical order unless numbers say otherwise,
or from the caller. Either all rows have labels or none has; errors name the line.
"""

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from usetta.data.dataset import DataError, Dataset, class_name
from usetta.data.locate import missing_images

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
NAMES = tuple(f"manifest{suffix}" for suffix in SUFFIXES)


class _ManifestRow(NamedTuple):
    where: str
    path: str
    number: int | None
    name: str | None


def read_manifest(file: Path, classes: Sequence[str] | None = None) -> Dataset:
    """Read the images that `file` lists; `classes` gives the class names by label."""
    rows = list(_rows(file))
    if not rows:
        raise DataError(f"{file} lists no images", "give it a row for each image")
    names = tuple(map(class_name, classes)) if classes is not None else _names(file, rows)
    labels = _labels(file, rows, names)
    ids: list[str] = []
    seen: dict[str, str] = {}
    for row in rows:
        image = _id(file.parent, row.path)
        if image in seen:
            raise DataError(f"{file}, {row.where}: {row.path} was listed before, in {seen[image]}", "list it once")
        seen[image] = row.where
        ids.append(image)
    if missing := missing_images(file.parent, ids):
        raise DataError(
            f"{file}, {seen[missing[0]]}: there is no {missing[0]} ({len(missing)} of {len(ids)} images are missing)",
            f"paths are relative to {file.parent}",
        )
    return Dataset(
        name=file.parent.name if file.name in NAMES else file.stem,
        title=file.parent.name if file.name in NAMES else file.stem,
        family="other",
        classes=names,
        ids=tuple(ids),
        labels=labels,
        root=file.parent,
        layout=str(file),
    )


def _names(file: Path, rows: list[_ManifestRow]) -> tuple[str, ...]:
    """Class names by label, from the rows."""
    if all(row.number is None for row in rows):
        names = sorted({row.name for row in rows if row.name is not None})
        if not names:
            raise DataError(f"{file} names no classes", "give the class names")
        return tuple(names)
    by_number: dict[int, str] = {}
    for row in rows:
        if row.number is None:
            continue  # told by `_labels`, which sees whether all rows agree
        if row.name is None:
            raise DataError(
                f"{file}, {row.where}: label {row.number} has no name", "add a column class, or give the names"
            )
        if by_number.setdefault(row.number, row.name) != row.name:
            raise DataError(
                f"{file}, {row.where}: label {row.number} is {row.name!r} here and {by_number[row.number]!r} before",
                "give each label one name",
            )
    for number in range(len(by_number)):
        if number not in by_number:
            raise DataError(
                f"{file} has no label {number}, though labels go up to {max(by_number)}", "give the class names"
            )
    return tuple(by_number[number] for number in sorted(by_number))


def _labels(file: Path, rows: list[_ManifestRow], names: tuple[str, ...]) -> tuple[int, ...] | None:
    if all(row.number is None and row.name is None for row in rows):
        return None
    by_name = {name: label for label, name in reversed(list(enumerate(names)))}
    labels = []
    for row in rows:
        if row.number is None and row.name is None:
            raise DataError(f"{file}, {row.where}: {row.path} has no label, others have", "label all images or none")
        label = by_name.get(row.name or "") if row.number is None else row.number
        if label is None:
            raise DataError(f"{file}, {row.where}: {row.name!r} is none of the {len(names)} classes", _known(names))
        if label >= len(names):
            raise DataError(f"{file}, {row.where}: label {label} is too high for {len(names)} classes", "count from 0")
        labels.append(label)
    return tuple(labels)


def _known(names: tuple[str, ...]) -> str:
    return f"they are {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _id(root: Path, path: str) -> str:
    """`path` relative to `root` and without detours, so that one image has one id."""
    absolute = Path(os.path.normpath(root.absolute() / path))
    try:
        return absolute.relative_to(root.absolute()).as_posix()
    except ValueError:  # beside the list or elsewhere: still relative unless it was written in full
        return absolute.as_posix() if Path(path).is_absolute() else PurePosixPath(os.path.normpath(path)).as_posix()


def _rows(file: Path) -> Iterator[_ManifestRow]:
    reader = {".csv": _table, ".tsv": _table, ".jsonl": _json_lines, ".json": _json_items}.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file} is not a list of images", f"its name must end in {', '.join(SUFFIXES)}")
    try:
        yield from reader(file)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text", "save it as UTF-8") from error


def _table(file: Path) -> Iterator[_ManifestRow]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", skipinitialspace=True)
        try:
            columns = [column.strip() for column in reader.fieldnames or ()]
            if "path" not in columns:
                found = ", ".join(columns) or "none"
                raise DataError(f"{file}, line 1: there is no column 'path' (found: {found})", _ROW)
            reader.fieldnames = columns
            for row in reader:
                if None in row:
                    raise DataError(f"{file}, line {reader.line_num}: more values than columns", "quote commas")
                yield _row(file, f"line {reader.line_num}", row)
        except csv.Error as error:
            raise DataError(f"{file}, line {reader.line_num}: {error}", _ROW) from error


def _json_lines(file: Path) -> Iterator[_ManifestRow]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{file}, line {number}: not JSON ({error.msg})", _ROW) from error
            yield _row(file, f"line {number}", row)


def _json_items(file: Path) -> Iterator[_ManifestRow]:
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


_ROW = "a row has a path and may have a label and a class"


def _row(file: Path, where: str, row: Any) -> _ManifestRow:
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
        raise DataError(f"{file}, {where}: label {label} is negative", "count from 0")
    if isinstance(label, str) and label and name:
        raise DataError(f"{file}, {where}: two names, label {label!r} and class {name!r}", _ROW)
    name = (label if isinstance(label, str) else None) or (name or "").strip() or None
    return _ManifestRow(
        where, row["path"].strip(), label if isinstance(label, int) else None, name and class_name(name)
    )
