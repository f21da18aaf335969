"""Shards of a run become the run that one process would have made, however often and whenever they are merged."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from usetta.cli import app
from usetta.distributed import Shard
from usetta.evaluate.merge import find_shards, merge_shards, shard_folder
from usetta.evaluate.store import FILE, FailedImage, ResultRow, ShownViews, Store, StoreError, ViewRecord

ROW = ResultRow("pets", "a.jpg", 0, "use", 3, 4, 0.6, 0.3, 1, 0.45, 0.25, 0.4, 3, True, 64, 0.1)
ROWS = [replace(ROW, image=f"{i:02}.jpg", seed=seed, method=m) for i in range(9) for seed in (0, 1) for m in "ab"]
FACTS = [("run", "model", {"name": "tiny"}), ("dataset", "pets", {"images": 9}), ("recipe", "a on other", {})]
VIEWS = (ViewRecord(0, 3, 0.5), ViewRecord(17, 4, 0.25))


def shown(row: ResultRow) -> ShownViews:
    return ShownViews(row.dataset, row.image, row.seed, VIEWS)


def write_shard(run: Path, shard: Shard, facts: list[Any] | None = None, rows: list[ResultRow] | None = None) -> None:
    rows = ROWS if rows is None else rows
    with Store(shard_folder(run, shard)) as store:
        store.fix_all(facts or FACTS)
        store.note("root", "pets", f"/data/{shard.rank}")
        store.note_next("invocation", {"images": 1})
        mine = list(shard.take(rows))
        store.add(mine, map(shown, mine))


def whole(run: Path) -> tuple[list[ResultRow], list[FailedImage], Any]:
    with Store(run, create=False) as store:
        views = {(row.image, row.seed): store.shown_views(row.dataset, row.image, row.seed) for row in store.rows()}
        assert set(views) == {key for key, value in views.items() if value and value.views == VIEWS}
        return list(store.rows()), store.failed_images(), {kind: store.facts(kind) for kind in store.kinds()}


def test_merged_shards_are_the_whole_run_and_merging_again_changes_nothing(tmp_path: Path) -> None:
    for rank in range(3):
        write_shard(tmp_path, Shard(rank, 3))
    messages: list[str] = []
    done = merge_shards(tmp_path, messages.append)
    assert (done.shards, done.missing, done.new_rows, done.failed) == (3, (), len(ROWS), 0)
    assert messages == [f"{rank}-of-3: 12 new rows" for rank in range(3)]
    rows, bad, facts = whole(tmp_path)
    assert rows == sorted(ROWS, key=lambda row: (row.seed, row.method, row.image))
    assert bad == []
    assert {kind: facts[kind] for kind in ("run", "dataset", "recipe")} == {
        kind: {name: value} for kind, name, value in FACTS
    }
    assert list(facts["invocation"]) == ["0-of-3/1", "1-of-3/1", "2-of-3/1"]
    assert merge_shards(tmp_path).new_rows == 0
    assert whole(tmp_path) == (rows, bad, facts)


def test_rows_that_come_later_are_added_and_rows_that_are_there_stay(tmp_path: Path) -> None:
    write_shard(tmp_path, Shard(0, 2), rows=ROWS[:10])
    write_shard(tmp_path, Shard(1, 2), rows=ROWS[:10])
    assert merge_shards(tmp_path).new_rows == 10
    with Store(tmp_path) as store:  # the whole run was continued without shards meanwhile
        store.add([replace(ROWS[11], prediction=0)], [shown(ROWS[11])])
    for rank in range(2):
        write_shard(tmp_path, Shard(rank, 2))
    assert merge_shards(tmp_path).new_rows == len(ROWS) - 11
    rows, _, _ = whole(tmp_path)
    assert len(rows) == len(ROWS)
    assert [row for row in rows if row.prediction == 0] == [replace(ROWS[11], prediction=0)]


def test_an_image_failed_only_if_no_shard_could_read_it(tmp_path: Path) -> None:
    for rank in range(2):
        write_shard(tmp_path, Shard(rank, 2), rows=ROWS[:8])
    failed, recovered = FailedImage("pets", "08.jpg", "file is empty"), FailedImage("pets", "00.jpg", "truncated")
    with Store(shard_folder(tmp_path, Shard(0, 2))) as store:
        store.add([], failed=[failed, recovered])
    assert merge_shards(tmp_path).failed == 1
    assert whole(tmp_path)[1] == [failed]
    with Store(shard_folder(tmp_path, Shard(0, 2))) as store:  # the image was repaired and the shard continued
        store.add([ROWS[-1]], [shown(ROWS[-1])])
    assert merge_shards(tmp_path).failed == 0


def test_shards_of_another_run_are_refused_before_any_row_is_copied(tmp_path: Path) -> None:
    write_shard(tmp_path, Shard(0, 2))
    write_shard(tmp_path, Shard(1, 2), facts=[("run", "model", {"name": "other"}), *FACTS[1:]])
    with pytest.raises(StoreError, match="the shard 1-of-2 does not belong to this run: .*model: name was"):
        merge_shards(tmp_path)
    with Store(tmp_path) as store:
        assert store.groups() == []


def test_missing_shards_are_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there are no shards in .*--rank R --world-size W"):
        merge_shards(tmp_path)
    for rank in (0, 2):
        write_shard(tmp_path, Shard(rank, 4))
    (tmp_path / "shards" / "1-of-4").mkdir()  # its process was killed before it wrote anything
    (tmp_path / "shards" / "notes.txt").touch()
    with pytest.raises(StoreError, match="these shards are missing: 1-of-4, 3-of-4. .*--allow-missing"):
        merge_shards(tmp_path)
    assert not (tmp_path / FILE).exists()
    done = merge_shards(tmp_path, allow_missing=True)
    assert (done.shards, done.missing, done.new_rows) == (2, ("1-of-4", "3-of-4"), 18)
    for rank in range(2):  # started anew with fewer processes
        write_shard(tmp_path, Shard(rank, 2))
    assert [path.name for path in find_shards(tmp_path)[0]] == ["0-of-2", "1-of-2", "0-of-4", "2-of-4"]
    assert merge_shards(tmp_path).new_rows == len(ROWS) - 18


@pytest.mark.parametrize("calls", [1, 4, 8])
def test_a_merge_that_is_killed_leaves_whole_shards_and_can_be_repeated(tmp_path: Path, calls: int) -> None:
    """Killed after so many statements of the second shard's transaction, or in the midst of the facts."""
    for rank in range(2):
        write_shard(tmp_path, Shard(rank, 2))
    script = (
        "import os, signal, sqlite3, sys; from pathlib import Path\n"
        "from usetta.evaluate import merge, store\n"
        "class Connection(sqlite3.Connection):\n"
        "    copies = 0\n"
        "    def execute(self, query, *values):\n"
        "        Connection.copies += bool(Connection.copies) or query.startswith('ATTACH')\n"
        f"        if Connection.copies > {calls}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().execute(query, *values)\n"
        "connect = sqlite3.connect\n"
        "sqlite3.connect = lambda *values, **options: connect(*values, factory=Connection, **options)\n"
        f"merge.merge_shards(Path({str(tmp_path)!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    with Store(tmp_path) as store:
        assert len(list(store.rows())) == (0 if calls < 6 else len(ROWS) // 2)
    assert merge_shards(tmp_path).shards == 2
    assert len(whole(tmp_path)[0]) == len(ROWS)


def test_the_command(tmp_path: Path) -> None:
    write_shard(tmp_path, Shard(0, 2))
    refused = CliRunner().invoke(app, ["merge", str(tmp_path)])
    assert refused.exit_code == 2
    assert "these shards are missing: 1-of-2" in refused.stderr
    partial = CliRunner().invoke(app, ["merge", str(tmp_path), "--allow-missing"])
    assert partial.exit_code == 0
    assert "usetta: warning: missing shards: 1-of-2" in partial.stderr
    write_shard(tmp_path, Shard(1, 2))
    result = CliRunner().invoke(app, ["merge", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"2 shards, 18 new rows: {tmp_path}\n"
    assert result.stderr == "0-of-2: 0 new rows\n1-of-2: 18 new rows\n"
