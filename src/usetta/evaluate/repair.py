"""Save what is intact in a damaged run: every row that can still be read goes into a new database.

A damaged page makes SQLite give up a scan, so each table is read from both ends, results in every group of dataset,
seed and method, and what lies between two damaged pages is asked for image by image. A row that is no answer (a
prediction that is no class, a probability beyond 1, no number at all) was damaged or edited, and is left out: the same
`usetta eval` computes it again.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from usetta.evaluate.store import COLUMNS, FILE, NO_ORDER, Store, StoreError
from usetta.evaluate.writing import only_writer

_TABLES = ("facts", "results", "shown", "failed", "contents")
_NUMBERS = ("label", "prediction", "rank", "views", "seed")
_PROBABILITIES = ("confidence", "true_probability", "sum_of_squares")


@dataclass(frozen=True)
class Repaired:
    """What became of a run."""

    rows: int
    """That were kept."""
    wrong: int
    """That could be read, but are no answers."""
    old: Path
    """The database as it was."""


def repair(folder: Path) -> Repaired:
    """Replace the database of a run by one with all intact rows; StoreError if there are none."""
    path = folder / FILE
    if not path.is_file():
        raise StoreError(f"there is no run in {folder}")
    with only_writer(folder), TemporaryDirectory(prefix=".repair-", dir=folder) as part:
        Store(Path(part)).__exit__()  # makes the tables
        with closing(sqlite3.connect(path)) as damaged:  # not read-only: what is in its log has to come in
            try:
                tables = {table: _read_all(damaged, table) for table in _TABLES}
            except sqlite3.DatabaseError as error:
                raise StoreError(f"nothing in {path} can be read ({error}): remove it and run it again") from None
        if not tables["facts"][1]:
            raise StoreError(f"{path} does not say any more what its results depend on: remove it and run it again")
        columns, rows = tables["results"]
        right = [row for row in rows if _is_answer(dict(zip(columns, row, strict=True)))]
        tables["results"] = columns, right
        if "order_seed" not in columns:  # a version that had no streams wrote it
            tables["results"] = [*columns, "order_seed"], [(*row, NO_ORDER) for row in right]
        with closing(sqlite3.connect(Path(part) / FILE)) as new, new:
            for table, (names, values) in tables.items():
                if not values:  # the columns of a table that is lost are not known either
                    continue
                places = ", ".join("?" * len(names))
                new.executemany(f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({places})", values)  # noqa: S608
        old = next(place for n in range(1, 1000) if not (place := folder / f"damaged-{n}.sqlite").exists())
        for suffix in ("-wal", "-shm"):  # of the damaged database; they would be taken for those of the new one
            path.with_name(FILE + suffix).unlink(missing_ok=True)
        path.rename(old)
        (Path(part) / FILE).rename(path)
    return Repaired(len(right), len(rows) - len(right), old)


def _read_all(db: sqlite3.Connection, table: str) -> tuple[Sequence[str], list[tuple[Any, ...]]]:
    """The columns of a table and its rows, as far as they can be read."""
    info = db.execute(f"PRAGMA table_info({table})").fetchall()
    columns = [column[1] for column in info]
    if table == "results":
        columns = [column for column in columns if column in COLUMNS]
    key = [column[1] for column in sorted(info, key=lambda column: column[5]) if column[5]]
    if not key:
        return columns, []
    names = ", ".join(columns)
    rows: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    places = [columns.index(column) for column in key]

    def take(condition: str, values: Sequence[Any]) -> None:
        for direction in ("ASC", "DESC"):
            order = ", ".join(f"{column} {direction}" for column in key)
            query = f"SELECT {names} FROM {table} WHERE {condition} ORDER BY {order}"  # noqa: S608
            with suppress(sqlite3.DatabaseError):
                for row in db.execute(query, tuple(values)):
                    rows[tuple(row[place] for place in places)] = row

    take("1", ())
    for group in dict.fromkeys(row[:-1] for row in list(rows)):
        take(" AND ".join(f"{column} = ?" for column in key[:-1]), group)
        for image in _images(db) if key[-1] == "image" else ():
            if (*group, image) not in rows:
                take(" AND ".join(f"{column} = ?" for column in key), (*group, image))
    return columns, list(rows.values())


def _images(db: sqlite3.Connection) -> Iterator[str]:
    """The images that any table knows of."""
    images: set[str] = set()
    for table in ("shown", "contents"):
        with suppress(sqlite3.DatabaseError):
            for (image,) in db.execute(f"SELECT image FROM {table}"):  # noqa: S608
                images.add(image)
    yield from sorted(images)


def _is_answer(row: dict[str, Any]) -> bool:
    """Whether the values can be those of an answer."""
    return all(isinstance(row[name], int) for name in _NUMBERS) and all(
        isinstance(row[name], float) and 0 <= row[name] <= 1 + 1e-6 for name in _PROBABILITIES
    )
