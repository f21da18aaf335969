"""All rows of a run in one file for other programs: Parquet, CSV, JSON or JSON lines, chosen by the file's suffix.

Rows are streamed, so memory does not grow with the run. A file appears under its name only once it is complete.
Beside every class index stands the name of the class.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from usetta.evaluate.store import ResultRow, Store
from usetta.files import atomic_file, spreadsheet_safe

_CLASSES = ("label", "prediction", "before")
"""Columns that hold a class index."""
_FACTS = ("run", "dataset", "recipe", "classes", "root", "invocation")
GROUP_ROWS = 2**16
"""Rows in a group of a Parquet file: all that is in memory at once."""


def export(store: Store, path: Path) -> int:
    """Write all rows to `path`, whose suffix is one of `FORMATS`, and return their number.

    JSON also holds the facts of the run and its failed images, and so does the metadata of a Parquet file.
    """
    write = FORMATS.get(path.suffix.lower())
    if write is None:
        raise ValueError(f"cannot export to {path.name!r}: the name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path.name}: there is no folder {str(path.parent)!r}")
    count = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal count
        for count, record in enumerate(_records(store), start=1):  # noqa: B007
            yield record

    with atomic_file(path) as file:
        write(file, counted(), store)
    return count


def _columns() -> Iterator[tuple[str, Any]]:
    """Names and types of the columns: those of `ResultRow`, and after each class index the name of the class."""
    for field in fields(ResultRow):
        yield field.name, field.type
        if field.name in _CLASSES:
            yield f"{field.name}_name", str


def _records(store: Store) -> Iterator[dict[str, Any]]:
    classes = store.facts("classes")
    for row in store.rows():
        names = classes.get(row.dataset, ())
        record = {}
        for name, value in vars(row).items():
            record[name] = value
            if name in _CLASSES:
                record[f"{name}_name"] = names[value] if value is not None and value < len(names) else None
        yield record


def _about(store: Store) -> dict[str, Any]:
    return {
        "facts": {kind: store.facts(kind) for kind in _FACTS},
        "bad": [bad._asdict() for bad in store.failed_images()],
    }


@contextmanager
def _text(file: IO[bytes]) -> Iterator[io.TextIOWrapper]:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    yield text
    text.detach()  # flushes, and leaves the file open for its owner


def _write_csv(file: IO[bytes], records: Iterable[dict[str, Any]], _store: Store) -> None:
    with _text(file) as text:
        writer = csv.DictWriter(text, [name for name, _ in _columns()], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: spreadsheet_safe(cell) for name, cell in record.items()} for record in records)


def _write_jsonl(file: IO[bytes], records: Iterable[dict[str, Any]], _store: Store) -> None:
    with _text(file) as text:
        text.writelines(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)


def _write_json(file: IO[bytes], records: Iterable[dict[str, Any]], store: Store) -> None:
    with _text(file) as text:
        about = json.dumps(_about(store), ensure_ascii=False)
        text.write(f'{about[:-1]}, "rows": [')
        separators = chain(("\n",), iter(lambda: ",\n", None))
        text.writelines(f"{next(separators)}{json.dumps(record, ensure_ascii=False)}" for record in records)
        text.write("\n]}\n")


def _write_parquet(file: IO[bytes], records: Iterable[dict[str, Any]], store: Store) -> None:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(f"Parquet needs pyarrow: pip install 'usetta[parquet]' ({error})") from None
    kinds = {int: arrow.int64(), float: arrow.float64(), str: arrow.string(), bool: arrow.bool_()}
    schema = arrow.schema(
        [(name, kinds[_without_none(declared)]) for name, declared in _columns()],
        metadata={"usetta": json.dumps(_about(store), ensure_ascii=False)},
    )
    with parquet.ParquetWriter(file, schema) as writer:
        rest = iter(records)
        while group := list(islice(rest, GROUP_ROWS)):
            writer.write_batch(arrow.RecordBatch.from_pylist(group, schema=schema))


def _without_none(declared: Any) -> Any:
    return getattr(declared, "__args__", (declared,))[0]


FORMATS: dict[str, Callable[[IO[bytes], Iterable[dict[str, Any]], Store], None]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".json": _write_json,
    ".jsonl": _write_jsonl,
}
"""By the suffix of the file."""
