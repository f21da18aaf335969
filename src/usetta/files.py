"""Files that are either whole or not there, whatever happens while they are written or afterwards.

The content goes to a hidden file beside the target and takes its name at the end, which is one step for everybody who
reads. A process that is killed leaves at most that hidden file behind. SQLite keeps the same promise by its own means.

Disks and people damage files later. So a large file that is kept for long has its SHA-256 in a file beside it (`seal`),
which is compared when the file is used for the first time as it is, by size and time of change (`is_intact`).
"""

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_file(target: Path) -> Iterator[IO[bytes]]:
    """A binary file to write to. It takes the place of `target` when the block ends without an error.

    It is on the disk by then, and so is its name: a machine that loses power afterwards still has it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, so that readers of a folder skip it; of this process and thread, so that two writers do not mix.
    part = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(target.parent)


def write_atomically(target: Path, content: bytes) -> None:
    """Write a whole file at once, see `atomic_file`."""
    with atomic_file(target) as file:
        file.write(content)


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sealed(target: Path, content: bytes) -> None:
    """Write a whole file at once, and its SHA-256 beside it."""
    seal_of(target).unlink(missing_ok=True)  # else a crash in between leaves the new file with the old hash
    write_atomically(target, content)
    _seal(target, hashlib.sha256(content).hexdigest())


def is_intact(path: Path, *, known: str | None = None, thorough: bool = False) -> bool:
    """Whether a file is there and has the content that was sealed, or that is `known` by its SHA-256.

    The content is read only if it was never read as the file is now, by size and time of change, or if it is
    `thorough`.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    state = f"{status.st_size} {status.st_mtime_ns}"
    stated, _, read_as = seal_of(path).read_text().strip().partition(" ") if seal_of(path).is_file() else ("", "", "")
    if not thorough and stated and read_as == state:
        return True
    actual = sha256(path)
    if actual not in (stated, known):
        return False
    with suppress(OSError):  # a cache that cannot be written to is read each time
        _seal(path, actual, state)
    return True


def seal_of(path: Path) -> Path:
    """The file that holds the SHA-256 of another."""
    return path.with_name(f"{path.name}.sha256")


def _seal(path: Path, digest: str, state: str = "") -> None:
    write_atomically(seal_of(path), f"{digest} {state}".encode())


@contextmanager
def exclusive(lock: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Wait until no other process or thread is in here with the same `lock`; it is free when its holder has died."""
    from filelock import FileLock, Timeout

    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        on_wait()
        held.acquire()
    try:
        yield
    finally:
        held.release()


def spreadsheet_safe(cell: Any) -> Any:
    """A cell of a CSV file; a text that a spreadsheet would execute as a formula gets a quote in front of it."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _sync_folder(folder: Path) -> None:
    """Make a new name outlast a loss of power. Windows cannot open folders and does without."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def connect(path: Path, *, threads: bool = False) -> sqlite3.Connection:
    """An SQLite database that processes may share, and `threads` that take turns; it is created if it is absent."""
    db = sqlite3.connect(path, timeout=60, check_same_thread=not threads)
    with suppress(sqlite3.OperationalError):  # another process is switching it right now, and the switch is permanent
        db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def connect_frozen(path: Path) -> sqlite3.Connection:
    """An SQLite database to read from a disk that cannot be written to, where SQLite cannot lock it either."""
    log = path.with_name(f"{path.name}-wal")
    if log.is_file() and log.stat().st_size:
        raise sqlite3.OperationalError("its last changes are in a log, which takes a disk that can be written to")
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def cache_dir() -> Path:
    """Where fetched and converted files are kept: `$USETTA_CACHE`, or `usetta` in the user's cache directory."""
    if chosen := os.environ.get("USETTA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "usetta"


def arrow(module: str) -> Any:
    """A module of pyarrow, which is an optional dependency."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"Parquet needs pyarrow: pip install 'usetta[parquet]' ({error})") from None
