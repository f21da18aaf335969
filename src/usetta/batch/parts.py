"""Predictions on disk: one Parquet file, or a directory of such files that programs read as one table.

A file appears under its name when it is complete, and what it holds is not computed again. What the rows depend on is
in `_facts.json`, which readers of Parquet directories ignore; predictions made with different settings are never mixed.
An image that could not be read has a row with an error until it is tried again: such rows are removed when the
directory is opened next.

One file is written as a directory beside it, `NAME.parts`, which becomes the file when the work ends or is interrupted;
if the file exists already, it is the first part. The facts are in its metadata.

Several processes may write to one directory, each as a shard of the run. Each part has one owner, who alone may change
it: rank R of a world of W owns the parts whose rank is R modulo W, so that a run can be continued with another W.
"""

import hashlib
import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, Self

from usetta.distributed import Shard
from usetta.files import arrow, atomic_file, write_atomically

FACTS = "_facts.json"
_LOCK = "_lock"
_FACTS_LOCK = "_facts.lock"
"""Held only while the facts are checked."""
_PART = re.compile(r"part-(?:(\d+)-)?(\d+)\.parquet")
"""Its rank, if there were several processes, and its number."""
_MAX_ROWS = 10_000
"""Of a part."""
_SAVE_SECONDS = 10.0
"""After which rows are saved: a kill loses no more."""
_PART_SECONDS = 300.0
"""After which a part is finished, however small. Until then it is written anew whenever rows are saved, so that slow
images do not make thousands of files."""
_METADATA = b"usetta"
"""Key of the facts in a file's metadata."""


class OutputError(ValueError):
    """A file or directory cannot take these predictions; the message says why."""


@dataclass(frozen=True)
class PredictionRow:
    """The answer for an image."""

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
    """The label by the image itself, without further views."""
    delta: float | None = None
    beta: float | None = None
    skipped: bool | None = None
    """Whether tuning was left out; None if the method tunes nothing."""
    views: int | None = None
    """Views that were encoded."""
    error: str | None = None
    """Why there is no answer."""
    rejected: bool | None = None
    """Whether the label is only the closest class; None if nothing was to be rejected."""
    calibrated: float | None = None
    """Share of answers with this confidence that are right; None without a calibration."""


def is_one_file(out: Path) -> bool:
    """Whether `out` names a Parquet file rather than a directory of them."""
    return out.suffix.lower() in (".parquet", ".pq") and not out.is_dir()


def check_output(out: Path, shard: Shard | None = None) -> None:
    """Refuse a target that cannot be written to."""
    if is_one_file(out):
        if shard is not None and not shard.is_whole:
            raise OutputError(f"several processes cannot write to one file: give a directory instead of {out}")
        if out.exists():
            _facts_in(out)
    elif out.is_file():
        raise OutputError(f"{out} is a file: give a directory, or a file name that ends in .parquet")
    elif out.is_dir() and not (out / FACTS).exists() and not all(map(_is_internal, out.iterdir())):
        raise OutputError(f"{out} contains other files than predictions: choose another directory")


class Parts:
    """Predictions that are open for writing by this process, in the file or directory `out`."""

    def __init__(self, out: Path, facts: Mapping[str, Any], shard: Shard | None = None) -> None:
        self.out = out
        self.folder = out.with_name(f"{out.name}.parts") if is_one_file(out) else out
        self.rows = 0
        """Saved since it was opened."""
        self._shard = shard or Shard()
        self._prefix = "part-" if self._shard.is_whole else f"part-{self._shard.rank}-"
        self._pending: list[PredictionRow] = []
        """The rows of the part that is not finished."""
        self._in_part = 0
        """How many of them are saved."""
        self._begun = self._saved = time.monotonic()
        self._schema = _schema()
        self._facts = json.loads(json.dumps(facts))
        check_output(out, shard)
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._lock = stack.enter_context(_lock_shard(folder, self._shard))
            if folder != out and out.exists():
                self._take_file()
            self._check()
            # What a killed process left unfinished; other ranks may be writing theirs in this moment.
            for path in folder.glob(f".{self._prefix}*.part"):
                path.unlink()
            numbers = [int(path.stem.rpartition("-")[2]) for path in self.files() if self._is_numbered_here(path)]
            self._next = 1 + max(numbers, default=-1)
            stack.pop_all()  # the lock is kept until `__exit__`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
            if self.folder != self.out:
                self._make_file()
        finally:
            self._lock.close()

    def files(self) -> list[Path]:
        """The finished parts of all ranks."""
        return sorted(path for path in self.folder.iterdir() if _PART.fullmatch(path.name))

    def finished(self) -> Iterator[tuple[str, str]]:
        """Source and key of the images that have an answer; rows with errors are removed from this shard's parts."""
        parquet, compute = arrow("pyarrow.parquet"), arrow("pyarrow.compute")
        for path in self.files():
            try:
                table = parquet.ParquetFile(path).read()
            except FileNotFoundError:  # its owner has just removed it, because it held nothing but errors
                continue
            answered = table.filter(compute.is_null(table["error"]))
            if self._owns(path):
                if not len(answered):
                    path.unlink()
                elif len(answered) < len(table):
                    self._write(path.name, answered)
            yield from zip(answered["source"].to_pylist(), answered["key"].to_pylist(), strict=True)

    def add(self, row: PredictionRow) -> None:
        """Take a row; it is saved together with others."""
        now = time.monotonic()
        if not self._pending:
            self._begun = now
        self._pending.append(row)
        if len(self._pending) >= _MAX_ROWS or not 0 <= now - self._begun < _PART_SECONDS:
            self.flush()
        elif not 0 <= now - self._saved < _SAVE_SECONDS:
            self._save()

    def flush(self) -> None:
        """Save all rows, and finish the part."""
        if self._pending:
            self._save()
            self._next += 1
            self._pending, self._in_part = [], 0

    def _save(self) -> None:
        """Write the part that is not finished, in the place of what was saved of it before."""
        table = arrow("pyarrow").Table.from_pylist([asdict(row) for row in self._pending], schema=self._schema)
        self._write(f"{self._prefix}{self._next:06}.parquet", table)
        self.rows += len(self._pending) - self._in_part
        self._in_part = len(self._pending)
        self._saved = time.monotonic()

    def _write(self, name: str, table: Any) -> None:
        with atomic_file(self.folder / name) as file:
            arrow("pyarrow.parquet").write_table(table, file)

    def _is_numbered_here(self, path: Path) -> bool:
        """Whether new parts of this shard could get the name of that one."""
        part = _PART.fullmatch(path.name)
        return part is not None and part[1] == (None if self._shard.is_whole else str(self._shard.rank))

    def _owns(self, path: Path) -> bool:
        part = _PART.fullmatch(path.name)
        return part is not None and int(part[1] or 0) % self._shard.world_size == self._shard.rank

    def _check(self) -> None:
        """Record what the rows depend on; refuse a directory of predictions made with different settings."""
        path = self.folder / FACTS
        with _lock(self.folder / _FACTS_LOCK, wait=True):  # ranks that start at once must not all find it missing
            for unfinished in self.folder.glob(f".{FACTS}.*.part"):
                unfinished.unlink()
            if not path.exists():
                write_atomically(path, json.dumps(self._facts, indent=1, ensure_ascii=False).encode())
                return
        _compare(json.loads(path.read_text(encoding="utf-8")), self._facts, self.out)

    def _take_file(self) -> None:
        """Make a finished file the first part. Parts beside it are in it: a process died before it removed them."""
        try:
            _compare(_facts_in(self.out), self._facts, self.out)
        except OutputError:
            shutil.rmtree(self.folder)
            raise
        for path in self.files():
            path.unlink()
        (self.folder / FACTS).unlink(missing_ok=True)
        self.out.replace(self.folder / f"{self._prefix}{0:06}.parquet")

    def _make_file(self) -> None:
        """Join the parts into one file, and remove them."""
        pa, parquet = arrow("pyarrow"), arrow("pyarrow.parquet")
        schema = self._schema.with_metadata({_METADATA: json.dumps(self._facts, ensure_ascii=False)})
        if parts := self.files():
            with atomic_file(self.out) as file, parquet.ParquetWriter(file, schema) as writer:
                for part in parts:
                    for batch in parquet.ParquetFile(part).iter_batches():
                        # A part of an earlier version may lack the last columns.
                        known = batch.schema.names
                        full = [batch[c.name] if c.name in known else pa.nulls(len(batch), c.type) for c in schema]
                        writer.write_batch(pa.RecordBatch.from_arrays(full, schema=schema))
        shutil.rmtree(self.folder)


def _facts_in(file: Path) -> dict[str, Any]:
    """What the rows of a finished file depend on."""
    arrow_error = arrow("pyarrow").ArrowException
    try:
        facts = (arrow("pyarrow.parquet").read_schema(file).metadata or {})[_METADATA]
    except (arrow_error, OSError, KeyError):
        raise OutputError(f"{file} exists and was not written by `usetta classify`: choose another file") from None
    known: dict[str, Any] = json.loads(facts)
    return known


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], out: Path) -> None:
    """Refuse to mix predictions that depend on different facts."""
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            raise OutputError(
                f"the predictions in {out} were made with other settings ({name.replace('_', ' ')} was "
                f"{_shorten(old.get(name))} and is now {_shorten(new.get(name))}): choose another --out"
            )


class SeenKeys:
    """Images that occurred already, by source and key; on disk, so that memory does not grow with their number."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("")  # a temporary file that is deleted with the connection
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, source: str, key: str) -> bool:
        """Remember an image; returns whether it is new."""
        digest = hashlib.blake2b(f"{source}\0{key}".encode(), digest_size=16).digest()
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        self._db.close()


def _schema() -> Any:
    """The columns of `PredictionRow`."""
    pa = arrow("pyarrow")
    kinds: dict[Any, Any] = {str: pa.string(), float: pa.float32(), bool: pa.bool_(), int: pa.int32()}
    kinds |= {tuple[str, ...]: pa.list_(pa.string()), tuple[float, ...]: pa.list_(pa.float32())}
    declared = {field.name: field.type for field in fields(PredictionRow)}
    return pa.schema([(name, kinds[getattr(kind, "__args__", (kind,))[0]]) for name, kind in declared.items()])


def _lock_shard(folder: Path, shard: Shard) -> IO[bytes]:
    """The lock of a shard. Processes that share out the work differently would do the same images twice: refused.

    Every process takes its own lock before it looks at others', so of two that start at once at least one notices.
    """
    own = folder / (_LOCK if shard.is_whole else f"{_LOCK}-{shard.name}")
    lock = _lock(own)
    for other in folder.glob(f"{_LOCK}*"):
        # the lock of the whole run is `_lock`; shards of this world are `_lock-0-of-4`, `_lock-1-of-4`, …
        world_size = other.name.rpartition("-of-")[2] if "-of-" in other.name else "1"
        if world_size != str(shard.world_size):
            try:
                _lock(other, shared=True).close()
            except OutputError:
                lock.close()
                raise OutputError(
                    f"another process is writing to {folder} with world size {world_size}, not {shard.world_size}"
                ) from None
    return lock


def _lock(path: Path, *, shared: bool = False, wait: bool = False) -> IO[bytes]:
    """An open file with a lock that ends with this process, however that ends."""
    file = path.open("ab")
    with suppress(ImportError):  # Windows
        import fcntl

        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.close()
            raise OutputError(f"another process is writing to {path.parent}") from None
        except OSError as error:
            file.close()
            raise OutputError(f"{path.parent} is on a file system without locks ({error.strerror})") from None
    return file


def _is_internal(path: Path) -> bool:
    """Whether a file may be there while the facts are written, or appear right after they were missing."""
    unfinished = path.name.startswith(f".{FACTS}.") and path.suffix == ".part"
    return unfinished or path.name == FACTS or path.name.startswith((_LOCK, _FACTS_LOCK))


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
