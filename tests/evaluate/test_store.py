"""The store: what is written is there, whole batches or nothing, and a run never mixes two of a kind."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from usetta.evaluate.store import FILE, FailedImage, ResultRow, ShownViews, Store, StoreError, ViewRecord

ROW = ResultRow("pets", "a/b.jpg", 0, "use", 3, 4, 0.6, 0.3, 1, 0.45, 0.25, 0.4, 3, True, 64, 0.1)


def test_rows_come_back_as_they_were_in_the_order_of_their_keys(tmp_path: Path) -> None:
    rows = [
        replace(ROW, image="z.jpg", delta=None, skipped=None),
        ROW,
        replace(ROW, seed=1, skipped=False),
        replace(ROW, dataset="dtd", image="ü'\"%.jpg"),
    ]
    with Store(tmp_path) as store:
        store.add(rows)
    with Store(tmp_path, create=False) as store:
        found = list(store.rows())
        assert found == [rows[3], rows[1], rows[0], rows[2]]
        assert [type(row.skipped) for row in found] == [bool, bool, type(None), bool]
        assert list(store.rows({"dataset": "pets", "seed": 1})) == [rows[2]]
        assert store.done("pets", 0, "use") == {"a/b.jpg", "z.jpg"}
        assert store.done("pets", 0, "se") == set()
        assert store.columns(("label", "delta"), {"seed": 0}) == {"label": [3, 3, 3], "delta": [0.25, 0.25, None]}
        assert store.groups() == [("dtd", 0, "use", 1), ("pets", 0, "use", 2), ("pets", 1, "use", 1)]


def test_the_same_key_is_one_row(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add([ROW])
        store.add([replace(ROW, prediction=5)])
        assert [row.prediction for row in store.rows()] == [5]


def test_a_batch_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        with pytest.raises(ZeroDivisionError):
            store.add(replace(ROW, seed=10 // (3 - seed)) for seed in range(5))
        assert list(store.rows()) == []


def test_bad_images_are_remembered_with_their_reason(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add([], failed=[FailedImage("pets", "b.jpg", "empty"), FailedImage("pets", "a.jpg", "truncated")])
        store.add([], failed=[FailedImage("pets", "b.jpg", "empty file")])
        assert store.failed_images() == [("pets", "a.jpg", "truncated"), ("pets", "b.jpg", "empty file")]


def test_an_image_that_was_seen_is_not_bad_any_more_and_its_views_come_back(tmp_path: Path) -> None:
    seen = ShownViews("pets", "b.jpg", 0, (ViewRecord(0, 3, 0.5), ViewRecord(17, 4, 0.25)))
    with Store(tmp_path) as store:
        store.add([], failed=[FailedImage("pets", "b.jpg", "empty"), FailedImage("dtd", "b.jpg", "empty")])
        store.add([], [seen])
        assert store.failed_images() == [("dtd", "b.jpg", "empty")]
        assert store.shown_views("pets", "b.jpg", 0) == seen
        assert store.shown_views("pets", "b.jpg", 1) is None


def test_notes_are_replaced_and_what_the_run_depends_on_is_called_by_its_name(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.note("place", "pets", "/a")
        store.note("place", "pets", "/b")
        assert store.facts("place") == {"pets": "/b"}
        store.fix("run", "model", {"name": "a"})
        with pytest.raises(StoreError, match="model: name was 'a' and is now 'b'"):
            store.fix("run", "model", {"name": "b"})


def test_what_rows_depend_on_cannot_change(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.fix("model", "ViT-B-16", {"weights": "abc", "scale": 100.0})
        store.fix("model", "ViT-B-16", {"scale": 100.0, "weights": "abc"})
        with pytest.raises(
            StoreError, match=r"model 'ViT-B-16': weights was 'abc' and is now 'abd'\)\. Choose another"
        ):
            store.fix("model", "ViT-B-16", {"weights": "abd", "scale": 100.0})
        store.fix("views", "count", 64)
        with pytest.raises(StoreError, match="views 'count': it was 64 and is now 32"):
            store.fix("views", "count", 32)
        assert store.facts("model") == {"ViT-B-16": {"weights": "abc", "scale": 100.0}}
        assert store.facts("dataset") == {}


def test_of_several_facts_all_are_written_or_none(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.fix("run", "model", 1)
        with pytest.raises(StoreError, match="model: it was 1 and is now 2"):
            store.fix_all([("run", "views", 64), ("run", "model", 2), ("run", "prompt", "a")])
        assert store.facts("run") == {"model": 1}
        store.fix_all([("run", "views", 64), ("run", "model", 1)])
        assert store.facts("run") == {"model": 1, "views": 64}


def test_notes_of_two_processes_get_numbers_of_their_own(tmp_path: Path) -> None:
    with Store(tmp_path) as one, Store(tmp_path) as other:
        assert [one.note_next("invocation", "a"), other.note_next("invocation", "b")] == ["1", "2"]
        assert one.note_next("invocation", "c") == "3"
        one.note("invocation", "1", "d")
        assert list(other.facts("invocation").items()) == [("1", "d"), ("2", "b"), ("3", "c")]


def test_processes_that_begin_a_run_at_once_do_not_get_in_each_other_s_way(tmp_path: Path) -> None:
    """Each round a new store, which four processes open and fix at the same time."""
    script = (
        "import sys, time; from pathlib import Path; from usetta.evaluate.store import Store\n"
        "for number in range(20):\n"
        f"    time.sleep(max(0, {time.time() + 1} + 0.05 * number - time.time()))\n"
        f"    with Store(Path({str(tmp_path)!r}, str(number))) as store:\n"
        "        store.fix('run', 'model', {'name': 'a'}); store.note_next('invocation', 1)\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script], env=os.environ) for _ in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    with Store(tmp_path / "19") as store:
        assert list(store.facts("invocation")) == ["1", "2", "3", "4"]


def test_looking_at_a_run_writes_nothing(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add([ROW])
    before = (tmp_path / FILE).read_bytes()
    with Store(tmp_path, create=False) as store:
        list(store.rows())
    assert (tmp_path / FILE).read_bytes() == before


def test_what_is_not_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no run in"):
        Store(tmp_path, create=False)
    (tmp_path / FILE).write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(StoreError, match="is not a database of results"):
        Store(tmp_path)


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="another version of usetta"):
        Store(tmp_path)


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    with Store(tmp_path) as store, pytest.raises(ValueError, match="no column colour"):
        store.columns(("colour",), {})


def test_a_killed_process_leaves_whole_batches(tmp_path: Path) -> None:
    """A process writes batches of ten until it kills itself in the middle of one."""
    script = (
        "import os, signal, sys; from dataclasses import replace; from pathlib import Path\n"
        "from usetta.evaluate.store import ResultRow, Store\n"
        f"row = {ROW!r}\n"
        "def batch(n):\n"
        "    for i in range(10):\n"
        "        if (n, i) == (7, 5): os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield replace(row, seed=n, image=str(i))\n"
        f"store = Store(Path({str(tmp_path)!r}))\n"
        "for n in range(100): store.add(batch(n))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    with Store(tmp_path) as store:
        assert store.groups() == [("pets", seed, "use", 10) for seed in range(7)]
