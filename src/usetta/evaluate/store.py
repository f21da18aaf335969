"""What a run has found out so far: one SQLite database in the run's directory.

A row per (dataset, image, seed, method, order of the stream). Rows of a batch are written in one transaction, so a
process that is killed at any instant leaves whole batches behind, and the same command computes the rest. What the rows
depend on (model, views, datasets, recipes) is written down with them; a run directory never mixes two of a kind.
"""

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from usetta.files import connect, connect_frozen

FILE = "results.sqlite"
REPAIR = "`usetta repair RUN` keeps what is intact, and the same `usetta eval` computes the rest"
_VERSION = 3

NO_ORDER = -1
"""In place of the seed of an order."""
NO_LABEL = -1
"""In place of the class of an image that is of none: out of distribution."""


class StoreError(ValueError):
    """A run directory cannot be used for this; the message says why."""


@dataclass(frozen=True)
class ResultRow:
    """The answer of a method for an image, and what the metrics need to know about it."""

    dataset: str
    image: str
    """Its path within the dataset."""
    seed: int
    method: str
    label: int
    prediction: int
    confidence: float
    """Probability of the prediction."""
    true_probability: float
    """Probability of the label."""
    rank: int
    """Classes that are more probable than the label."""
    sum_of_squares: float
    """Of the probabilities, for the Brier score."""
    delta: float | None
    """The weak view's entropy rank; None without strong views."""
    beta: float
    """The weak view's weight in SE."""
    before: int | None
    """The prediction without tuning; None for methods that tune nothing."""
    skipped: bool | None
    """Whether tuning was left out; None likewise."""
    views: int
    """Views that the method looked at."""
    seconds: float
    """Time the image took: the views that the method looks at, shared with other methods, and the method itself."""
    order_seed: int = NO_ORDER
    """Seed of the order of the stream; `NO_ORDER` for methods that answer every image by itself."""
    position: int | None = None
    """Place of the image in the stream."""
    entropy: float | None = None
    """Of the probabilities, in nats; None in runs of older versions."""
    energy: float | None = None
    """Logsumexp of the logits behind the answer; None where there are none."""


class ViewRecord(NamedTuple):
    """What a view says by itself, before anything is tuned."""

    number: int
    """0 is the weak view, the image itself."""
    label: int
    entropy: float


@dataclass(frozen=True)
class ShownViews:
    """The views of an image that a report shows: the weak one, and the most confident of the strong ones."""

    dataset: str
    image: str
    seed: int
    views: tuple[ViewRecord, ...]


class FailedImage(NamedTuple):
    """An image that could not be read."""

    dataset: str
    image: str
    reason: str


class FileContent(NamedTuple):
    """Shows whether the file of an image is still the same: size and time of change, and if these differ a hash."""

    size: int
    mtime: int
    digest: str


_KINDS = {int: "INTEGER", float: "REAL", str: "TEXT", bool: "INTEGER"}
_KEY = ("dataset", "seed", "method", "order_seed", "image")  # in the order in which rows are asked for
COLUMNS = tuple(field.name for field in fields(ResultRow))


class Store:
    """The database of a run, open for reading and writing."""

    def __init__(self, folder: Path, *, create: bool = True) -> None:
        path = folder / FILE
        if not create and not path.is_file():
            raise StoreError(f"there is no run in {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        try:
            self._db = connect(path) if create or os.access(folder, os.W_OK) else connect_frozen(path)
            if create and (damage := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise StoreError(f"{path} is damaged ({damage.splitlines()[-1]}): {REPAIR}")
            self._prepare()
        except sqlite3.OperationalError as error:  # such as a full disk, which says nothing about the file
            raise StoreError(f"{path} cannot be used ({error})") from None
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} is not a database of results ({error}): {REPAIR}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def _prepare(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, 2, _VERSION):
            raise StoreError(f"the results in {self.folder} were written by another version of usetta")
        columns = ", ".join(f"{field.name} {_kind(field.type)}" for field in fields(ResultRow))
        with self._db:
            if version == 2:  # which had no streams
                self._db.execute("ALTER TABLE results RENAME TO results_2")
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS results ({columns}, PRIMARY KEY ({', '.join(_KEY)})) WITHOUT ROWID"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS facts (kind, name, value, PRIMARY KEY (kind, name))")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS shown (dataset, image, seed, views, PRIMARY KEY (dataset, image, seed))"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS failed (dataset, image, reason, PRIMARY KEY (dataset, image))")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS contents "
                "(dataset, image, size, mtime, digest, PRIMARY KEY (dataset, image))"
            )
            if version == 2:
                old = [column[1] for column in self._db.execute("PRAGMA table_info(results_2)")]
                copied = ", ".join(old)
                self._db.execute(
                    f"INSERT INTO results ({copied}, order_seed) SELECT {copied}, {NO_ORDER} FROM results_2"  # noqa: S608
                )
                self._db.execute("DROP TABLE results_2")
            if version != _VERSION:  # a run that is only looked at is not written to
                self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def fix(self, kind: str, name: str, value: Any) -> None:
        """Record what rows depend on; refuse another value than the recorded one.

        What the whole run depends on is of the kind `run`, and called by its name alone.
        """
        self.fix_all([(kind, name, value)])

    def fix_all(self, facts: Iterable[tuple[str, str, Any]]) -> None:
        """Record what rows depend on, each of a kind and with a name; if one is refused, none is written."""
        written = [(kind, name, json.dumps(value, sort_keys=True)) for kind, name, value in facts]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")  # nobody else may write between looking and writing
            for kind, name, new in written:
                old = self._db.execute("SELECT value FROM facts WHERE kind = ? AND name = ?", (kind, name)).fetchone()
                if old is None:
                    self._db.execute("INSERT INTO facts VALUES (?, ?, ?)", (kind, name, new))
                elif old[0] != new:
                    what = name if kind == "run" else f"{kind} '{name}'"
                    raise StoreError(
                        f"the run in {self.folder} was made with other settings ({what}: {_difference(old[0], new)}). "
                        "Choose another directory with --out"
                    )

    def note(self, kind: str, name: str, value: Any) -> None:
        """Record what rows do not depend on, in place of what was recorded."""
        query = "INSERT INTO facts VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        with self._db:
            self._db.execute(query, (kind, name, json.dumps(value)))

    def note_next(self, kind: str, value: Any) -> str:
        """Record what rows do not depend on under the next number of its kind, which is the answer."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            (count,) = self._db.execute("SELECT COUNT(*) FROM facts WHERE kind = ?", (kind,)).fetchone()
            self._db.execute("INSERT INTO facts VALUES (?, ?, ?)", (kind, str(count + 1), json.dumps(value)))
        return str(count + 1)

    def facts(self, kind: str) -> dict[str, Any]:
        """What was recorded of that kind, by name."""
        rows = self._db.execute("SELECT name, value FROM facts WHERE kind = ? ORDER BY rowid", (kind,))
        return {name: json.loads(value) for name, value in rows}

    def done(self, dataset: str, seed: int, method: str, order_seed: int = NO_ORDER) -> set[str]:
        """Images that have a row."""
        query = "SELECT image FROM results WHERE dataset = ? AND seed = ? AND method = ? AND order_seed = ?"
        return {image for (image,) in self._db.execute(query, (dataset, seed, method, order_seed))}

    def right(self, dataset: str, seed: int, order_seed: int = NO_ORDER) -> dict[str, tuple[int, int]]:
        """Right answers and answers of each method."""
        query = (
            "SELECT method, SUM(label = prediction), COUNT(*) FROM results "
            "WHERE dataset = ? AND seed = ? AND order_seed = ? GROUP BY 1"
        )
        return {method: (right, n) for method, right, n in self._db.execute(query, (dataset, seed, order_seed))}

    def failed_images(self) -> list[FailedImage]:
        """Images that could not be read when they were last tried."""
        return [FailedImage(*row) for row in self._db.execute("SELECT * FROM failed ORDER BY dataset, image")]

    def contents(self, dataset: str) -> dict[str, FileContent]:
        """The files of images as they were when they were answered."""
        query = "SELECT image, size, mtime, digest FROM contents WHERE dataset = ?"
        return {image: FileContent(*row) for image, *row in self._db.execute(query, (dataset,))}

    def note_contents(self, dataset: str, contents: Mapping[str, FileContent]) -> None:
        """Record the files of images."""
        rows = [(dataset, image, *content) for image, content in contents.items()]
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO contents VALUES (?, ?, ?, ?, ?)", rows)

    def forget(self, dataset: str, images: Iterable[str]) -> None:
        """Remove everything about images of a dataset."""
        keys = [(dataset, image) for image in images]
        with self._db:
            for table in ("results", "shown", "failed", "contents"):
                self._db.executemany(f"DELETE FROM {table} WHERE dataset = ? AND image = ?", keys)  # noqa: S608

    def shown_views(self, dataset: str, image: str, seed: int) -> ShownViews | None:
        """The recorded views of an image."""
        query = "SELECT views FROM shown WHERE dataset = ? AND image = ? AND seed = ?"
        row = self._db.execute(query, (dataset, image, seed)).fetchone()
        return row and ShownViews(dataset, image, seed, tuple(ViewRecord(*view) for view in json.loads(row[0])))

    def add(
        self, rows: Iterable[ResultRow], shown: Iterable[ShownViews] = (), failed: Iterable[FailedImage] = ()
    ) -> None:
        """Write rows, views and images that could not be read, together or not at all.

        An image whose views are known has not failed any more.
        """
        rows, shown = list(rows), list(shown)
        places = ", ".join("?" * len(COLUMNS))
        views = [(row.dataset, row.image, row.seed, json.dumps(row.views)) for row in shown]
        with self._db:
            self._db.executemany(f"INSERT OR REPLACE INTO results VALUES ({places})", map(astuple, rows))  # noqa: S608
            self._db.executemany(
                "INSERT INTO shown VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET views = excluded.views "
                "WHERE length(excluded.views) > length(views)",  # with the weak view alone, a report has less to show
                views,
            )
            self._db.executemany(
                "DELETE FROM failed WHERE dataset = ? AND image = ?", [(row.dataset, row.image) for row in shown]
            )
            self._db.executemany("INSERT OR REPLACE INTO failed VALUES (?, ?, ?)", failed)

    def rows(self, where: Mapping[str, Any] | None = None) -> Iterator[ResultRow]:
        """Rows in the order of their keys, those alone whose columns have the values of `where`."""
        place = COLUMNS.index("skipped")
        for values in self._select(COLUMNS, where or {}):
            row = list(values)
            row[place] = None if row[place] is None else bool(row[place])  # SQLite has no truth values
            yield ResultRow(*row)

    def columns(self, names: Sequence[str], where: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Some columns of rows, in the order of their keys."""
        rows = list(self._select(names, where))
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def groups(self) -> list[tuple[str, int, str, int]]:
        """Dataset, seed and method that have rows of labelled images, and of how many images."""
        query = (
            "SELECT dataset, seed, method, COUNT(DISTINCT image) FROM results "
            "WHERE label != ? GROUP BY dataset, seed, method"
        )
        return list(self._db.execute(query, (NO_LABEL,)))

    def orders(self, dataset: str, seed: int, method: str) -> list[int]:
        """Seeds of the orders in which a method has seen a dataset; `NO_ORDER` for one without a memory."""
        query = "SELECT DISTINCT order_seed FROM results WHERE dataset = ? AND seed = ? AND method = ?"
        return sorted(order for (order,) in self._db.execute(query, (dataset, seed, method)))

    def kinds(self) -> list[str]:
        """The kinds of facts that were written down."""
        return [kind for (kind,) in self._db.execute("SELECT DISTINCT kind FROM facts ORDER BY kind")]

    def copy_from(self, folder: Path) -> int:
        """Copy the rows, views and failed images of another store, in one transaction; returns how many rows are new.

        A row that is there already stays. The databases copy it among themselves, so that memory does not grow.
        """
        self._db.execute("ATTACH ? AS other", (str(folder / FILE),))
        try:
            with self._db:
                new = self._db.execute("INSERT OR IGNORE INTO results SELECT * FROM other.results").rowcount
                self._db.execute(
                    "INSERT INTO shown SELECT * FROM other.shown WHERE true ON CONFLICT DO UPDATE "
                    "SET views = excluded.views WHERE length(excluded.views) > length(views)"
                )
                self._db.execute("INSERT OR IGNORE INTO failed SELECT * FROM other.failed")
                self._db.execute("INSERT OR IGNORE INTO contents SELECT * FROM other.contents")
                self._db.execute("DELETE FROM failed WHERE (dataset, image) IN (SELECT dataset, image FROM shown)")
        finally:
            self._db.execute("DETACH other")
        return new

    def _select(self, names: Sequence[str], where: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
        unknown = {*names, *where} - set(COLUMNS)
        if unknown:
            raise ValueError(f"results have no column {', '.join(sorted(unknown))}")
        condition = " AND ".join(f"{name} = ?" for name in where) or "1"
        query = f"SELECT {', '.join(names)} FROM results WHERE {condition} ORDER BY {', '.join(_KEY)}"  # noqa: S608
        with closing(self._db.execute(query, tuple(where.values()))) as rows:
            yield from rows


def _kind(declared: Any) -> str:
    return next(sql for kind, sql in _KINDS.items() if declared == kind or kind in getattr(declared, "__args__", ()))


def _difference(old: str, new: str) -> str:
    before, after = json.loads(old), json.loads(new)
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return ", ".join(f"{name} was {before.get(name)!r} and is now {after.get(name)!r}" for name in names)
    return f"it was {before!r} and is now {after!r}"
