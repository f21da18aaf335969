"""Files that are either whole or not there, whatever happens while they are written.

The content goes to a hidden file beside the target and takes its name at the end, which is one step for everybody who
reads. A process that is killed leaves at most that hidden file behind. SQLite keeps the same promise by its own means.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
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
