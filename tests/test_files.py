"""Files that are either whole or not there: after an error, after a kill, and while others read."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from usetta.files import arrow, atomic_file, connect_frozen, write_atomically


def test_a_file_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "deep" / "result.bin"
    write_atomically(target, b"content")
    assert target.read_bytes() == b"content"
    assert [path.name for path in target.parent.iterdir()] == ["result.bin"]


def test_nothing_is_seen_before_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "result.bin"
    target.write_bytes(b"old")
    with atomic_file(target) as file:
        file.write(b"new")
        file.flush()
        assert target.read_bytes() == b"old"
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["result.bin"]
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, b"old"])
def test_an_error_inside_the_block_leaves_what_was_there(
    tmp_path: Path, before: bytes | None, error: type[BaseException]
) -> None:
    target = tmp_path / "result.bin"
    if before is not None:
        target.write_bytes(before)

    def fail() -> None:
        with atomic_file(target) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])


PROGRAM = """
import os, signal, sys
from pathlib import Path
from usetta.files import atomic_file

with atomic_file(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_process_that_is_killed_leaves_the_old_file_and_only_a_hidden_part(tmp_path: Path) -> None:
    target = tmp_path / "result.bin"
    write_atomically(target, b"old")
    assert subprocess.run([sys.executable, "-c", PROGRAM, target], check=False).returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    parts = [path.name for path in tmp_path.iterdir() if path != target]
    assert [name for name in parts if not (name.startswith(".result.bin.") and name.endswith(".part"))] == []
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"


def test_the_content_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(number: int) -> None:
        events.append("folder" if Path(f"/dev/fd/{number}").resolve() == tmp_path else "file")
        real_sync(number)

    def replace(self: Path, target: Path) -> Path:
        events.append("name")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    write_atomically(tmp_path / "result.bin", b"content")
    assert events == ["file", "name", "folder"]


def test_a_place_that_cannot_be_written_to_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a folder")
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file" / "result.bin", b"content")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "folder", b"content")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_readers_and_writers_at_once_see_whole_versions_only(tmp_path: Path) -> None:
    target, versions = tmp_path / "result.bin", [bytes([i]) * 100_000 for i in range(20)]
    write_atomically(target, versions[0])
    seen: set[bytes] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(target.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda version: write_atomically(target, version), versions))
    done.set()
    reader.join()
    assert seen <= set(versions)
    assert list(tmp_path.iterdir()) == [target]


def test_a_database_with_changes_in_its_log_is_not_read_without_them(tmp_path: Path) -> None:
    path = tmp_path / "results.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE t (x)")
        db.execute("INSERT INTO t VALUES (7)")
    with closing(connect_frozen(path)) as frozen:
        assert frozen.execute("SELECT x FROM t").fetchall() == [(7,)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            frozen.execute("INSERT INTO t VALUES (8)")
    (tmp_path / "results.sqlite-wal").write_bytes(b"")
    connect_frozen(path).close()
    (tmp_path / "results.sqlite-wal").write_bytes(b"changes")
    with pytest.raises(sqlite3.OperationalError, match="its last changes are in a log"):
        connect_frozen(path)


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"Parquet needs pyarrow: pip install 'usetta\[parquet\]'"):
        arrow("pyarrow.parquet")
