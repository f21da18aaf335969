"""Predictions on disk: a directory of Parquet files that programs read as one table.

A file appears under its name when it is whole, and what it holds is not computed again. What the rows depend on is in
`_facts.json`, which readers of Parquet directories pass over; predictions of two kinds are never mixed. An image that
could not be read has a row with an error until it is tried again: when the directory is opened next, such rows go.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Self

from usetta.batch.tables import arrow

FACTS = "_facts.json"
_LOCK = "_lock"
_ROWS = 10_000
"""Of a part at most."""
_SECONDS = 60.0
"""After which a part is written even if it is small: nobody wants to lose an hour of slow images."""


class OutputError(ValueError):
    """A directory cannot take these predictions; the message says why."""


@dataclass(frozen=True)
class PredictionRow:
    """What is told about an image."""

    source: str
    key: str
    """Its name in the source."""
    label: str | None = None
    confidence: float | None = None
    """Probability of the label."""
    top_labels: tuple[str, ...] | None = None
    """The most probable classes, most probable first."""
    top_probabilities: tuple[float, ...] | None = None
    zero_shot: str | None = None
    """What the image looked at once would have been called."""
    delta: float | None = None
    beta: float | None = None
    skipped: bool | None = None
    """Whether tuning was left out; None where the method tunes nothing."""
    views: int | None = None
    """Views that were looked at."""
    error: str | None = None
    """Why there is no answer."""


class Parts:
    """A directory of predictions, open for one process to write to."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rows = 0
        """Written since it was opened."""
        self._waiting: list[PredictionRow] = []
        self._since = time.monotonic()
        self._schema = _schema()
        if folder.is_file():
            raise OutputError(f"{folder} is a file; predictions go to a directory of Parquet files")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FACTS).exists() and any(each.name != _LOCK for each in folder.iterdir() if not _begun(each)):
            raise OutputError(f"{folder} holds something else than predictions; choose another directory with --out")
        self._lock = _locked(folder)
        for path in filter(_begun, folder.iterdir()):
            path.unlink()
        self._check(dict(facts))
        self._next = 1 + max((int(path.stem.rpartition("-")[2]) for path in self.files()), default=-1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._lock.close()

    def files(self) -> list[Path]:
        """The finished parts."""
        return sorted(self.folder.glob("part-[0-9]*.parquet"))

    def finished(self) -> Iterator[tuple[str, str]]:
        """Source and key of the images that have an answer; the rows of others are taken out."""
        parquet, compute = arrow("pyarrow.parquet"), arrow("pyarrow.compute")
        for path in self.files():
            table = parquet.ParquetFile(path).read()
            answered = table.filter(compute.is_null(table["error"]))
            if not len(answered):
                path.unlink()
            elif len(answered) < len(table):
                self._write(path.name, answered)
            yield from zip(answered["source"].to_pylist(), answered["key"].to_pylist(), strict=True)

    def add(self, row: PredictionRow) -> None:
        """Take a row, which is written with others in time."""
        self._waiting.append(row)
        if len(self._waiting) >= _ROWS or time.monotonic() - self._since > _SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write all rows that wait."""
        if self._waiting:
            rows = [asdict(row) for row in self._waiting]
            self._write(f"part-{self._next:06}.parquet", arrow("pyarrow").Table.from_pylist(rows, schema=self._schema))
            self.rows += len(rows)
            self._next += 1
            self._waiting = []
        self._since = time.monotonic()

    def _write(self, name: str, table: Any) -> None:
        begun = self.folder / f".{name}.tmp"
        with begun.open("wb") as file:
            arrow("pyarrow.parquet").write_table(table, file)
            _to_disk(file)
        begun.replace(self.folder / name)
        _folder_to_disk(self.folder)

    def _check(self, facts: dict[str, Any]) -> None:
        """Write down what rows depend on; refuse a directory of other predictions."""
        path = self.folder / FACTS
        new = json.loads(json.dumps(facts))
        if not path.exists():
            begun = self.folder / f".{FACTS}.tmp"
            with begun.open("w", encoding="utf-8") as file:
                json.dump(new, file, indent=1, ensure_ascii=False)
                _to_disk(file)
            begun.replace(path)
            return
        old = json.loads(path.read_text(encoding="utf-8"))
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                was, now = (_short(each.get(name)) for each in (old, new))
                raise OutputError(
                    f"the predictions in {self.folder} were made with another {name}: it was {was} and is {now}. "
                    "Choose another directory with --out"
                )


class SeenKeys:
    """Images that were met, by source and key. They are kept on disk, so memory does not grow with their number."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("")  # a file of its own that goes with the connection
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, source: str, key: str) -> bool:
        """Remember an image; whether it is new."""
        digest = hashlib.blake2b(f"{source}\0{key}".encode(), digest_size=16).digest()
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self._db.close()


def _schema() -> Any:
    """Columns as of `PredictionRow`."""
    pa = arrow("pyarrow")
    kinds: dict[Any, Any] = {str: pa.string(), float: pa.float32(), bool: pa.bool_(), int: pa.int32()}
    kinds |= {tuple[str, ...]: pa.list_(pa.string()), tuple[float, ...]: pa.list_(pa.float32())}
    declared = {field.name: field.type for field in fields(PredictionRow)}
    return pa.schema([(name, kinds[getattr(kind, "__args__", (kind,))[0]]) for name, kind in declared.items()])


def _locked(folder: Path) -> IO[bytes]:
    """A file whose lock goes with this process, however that ends."""
    file = (folder / _LOCK).open("ab")
    with suppress(ImportError):  # Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise OutputError(f"another process is writing to {folder}") from None
    return file


def _begun(path: Path) -> bool:
    """Whether a file is one that was not finished."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    """Make a new name last; where folders cannot be opened, the system does without."""
    with suppress(PermissionError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
