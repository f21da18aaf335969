"""Predictions on disk: complete files or none, one kind in a directory, and several processes that write to it."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from usetta.batch import parts
from usetta.batch.parts import OutputError, Parts, PredictionRow, SeenKeys
from usetta.distributed import Shard

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

FACTS = {"model": {"name": "tiny"}, "views": 4}


def answer(number: int) -> PredictionRow:
    return PredictionRow("zoo", f"{number}.png", "cat", 0.75, ("cat", "dog"), (0.75, 0.25), "dog", 0.5, 0.5, True, 4)


def bad(number: int) -> PredictionRow:
    return PredictionRow("zoo", f"{number}.png", error="file is empty")


def read(folder: Path) -> list[dict[str, Any]]:
    """As other programs do."""
    rows: list[dict[str, Any]] = parquet.read_table(folder).to_pylist()
    return rows


def test_rows_come_back_as_they_were_and_a_directory_reads_as_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_MAX_ROWS", 3)
    out = tmp_path / "predictions"
    with Parts(out, FACTS) as opened:
        for number in range(7):
            opened.add(answer(number))
        opened.add(bad(7))
        assert [path.name for path in opened.files()] == ["part-000000.parquet", "part-000001.parquet"]
    rows = read(out)
    assert [row["key"] for row in rows] == [f"{n}.png" for n in range(8)]
    assert rows[0] == {
        "source": "zoo",
        "key": "0.png",
        "label": "cat",
        "confidence": 0.75,
        "top_labels": ["cat", "dog"],
        "top_probabilities": [0.75, 0.25],
        "zero_shot": "dog",
        "delta": 0.5,
        "beta": 0.5,
        "skipped": True,
        "views": 4,
        "error": None,
        "rejected": None,
        "calibrated": None,
    }
    assert {name for name, value in rows[7].items() if value is not None} == {"source", "key", "error"}


def test_a_file_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    out = tmp_path / "old.parquet"
    with Parts(out, FACTS) as opened:
        opened.add(answer(0))
    parquet.write_table(parquet.read_table(out).drop_columns(["rejected", "calibrated"]), out)
    with Parts(out, FACTS) as opened:
        opened.add(replace(answer(1), rejected=True))
    assert [(row["key"], row["rejected"]) for row in read(out)] == [("0.png", None), ("1.png", True)]


def test_finished_images_are_known_and_bad_images_are_tried_again(tmp_path: Path) -> None:
    with Parts(tmp_path, FACTS) as opened:
        for row in (answer(0), bad(1), answer(2)):
            opened.add(row)
        opened.flush()
        opened.add(bad(3))
    with Parts(tmp_path, FACTS) as opened:
        assert list(opened.finished()) == [("zoo", "0.png"), ("zoo", "2.png")]
        assert [path.name for path in opened.files()] == ["part-000000.parquet"], "a part of errors alone is gone"
        opened.add(answer(1))
    assert [row["key"] for row in read(tmp_path)] == ["0.png", "2.png", "1.png"]


def test_slow_rows_are_saved_every_ten_seconds_and_share_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: now))
    with Parts(tmp_path, FACTS) as opened:
        for number, (passed, saved, files) in enumerate(
            [(1, 0, 0), (8, 0, 0), (2, 3, 1), (1, 3, 1), (9, 5, 1), (299, 6, 1), (1, 6, 1), (10, 8, 2)]
        ):
            now += passed
            opened.add(answer(number))
            assert (opened.rows, len(opened.files())) == (saved, files), number
            if saved:
                assert [row["key"] for row in read(tmp_path)] == [f"{n}.png" for n in range(saved)]
        now -= 500  # the clock was set back
        opened.add(answer(8))
        assert opened.rows == 9
    assert [row["key"] for row in read(tmp_path)] == [f"{n}.png" for n in range(9)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"views": 8}, "were made with other settings (views was 4 and is now 8): choose another --out"),
        ({"model": {"name": "other"}}, 'model was {"name": "tiny"} and is now {"name": "other"}'),
        ({"seed": 1}, "seed was null and is now 1"),
    ],
)
def test_predictions_with_other_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with Parts(tmp_path, FACTS) as opened:
        opened.add(answer(0))
    with pytest.raises(OutputError) as caught:
        Parts(tmp_path, FACTS | change)
    assert message in str(caught.value)
    assert len(read(tmp_path)) == 1


def test_one_file_is_continued_and_its_parts_survive_a_kill(tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    with Parts(out, FACTS) as opened:
        opened.add(answer(0))
        opened.add(bad(1))
    assert [row["key"] for row in read(out)] == ["0.png", "1.png"]
    killed = Parts(out, FACTS)
    assert list(killed.finished()) == [("zoo", "0.png")]
    killed.add(answer(2))
    killed.flush()
    killed._lock.close()
    assert not out.exists()
    with Parts(out, FACTS) as opened:
        assert list(opened.finished()) == [("zoo", "0.png"), ("zoo", "2.png")]
        left = tmp_path / "left"
        shutil.copytree(opened.folder, left)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["answers.parquet", "left"]
    left.rename(tmp_path / "answers.parquet.parts")  # a process that died after it had written the file
    with Parts(out, FACTS) as opened:
        assert list(opened.finished()) == [("zoo", "0.png"), ("zoo", "2.png")]
    assert [row["key"] for row in read(out)] == ["0.png", "2.png"]


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(OutputError, match="contains other files than predictions"):
        Parts(tmp_path, FACTS)
    with pytest.raises(OutputError, match="is a file: give a directory, or a file name that ends in .parquet"):
        Parts(tmp_path / "thesis.tex", FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with Parts(tmp_path, FACTS), pytest.raises(OutputError, match="another process is writing"):
        Parts(tmp_path, FACTS)
    Parts(tmp_path, FACTS).__exit__()


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_that_is_killed_while_it_writes_leaves_complete_parts(tmp_path: Path, moment: str) -> None:
    script = (
        "import os, signal; from pathlib import Path\n"
        "from usetta.batch import parts\n"
        f"opened = parts.Parts(Path({str(tmp_path)!r}), {FACTS!r})\n"
        "row = lambda n: parts.PredictionRow('zoo', f'{n}.png', 'cat')\n"
        "opened.add(row(0)); opened.flush(); opened.add(row(1))\n"
        "kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{'os.fsync' if moment == 'fsync' else 'Path.replace'} = kill\n"
        "opened.flush()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [row["key"] for row in read(tmp_path)] == ["0.png"]
    assert any(path.suffix == ".part" for path in tmp_path.iterdir())
    with Parts(tmp_path, FACTS) as opened:
        assert list(opened.finished()) == [("zoo", "0.png")]
        opened.add(answer(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_facts.json",
        "_facts.lock",
        "_lock",
        "part-000000.parquet",
        "part-000001.parquet",
    ]


def test_several_ranks_write_to_one_directory_each_its_own_parts(tmp_path: Path) -> None:
    with Parts(tmp_path, FACTS, Shard(0, 2)) as first, Parts(tmp_path, FACTS, Shard(1, 2)) as second:
        for number in range(4):
            (first, second)[number % 2].add(answer(number))
        first.flush()
        second.add(bad(5))
        second.flush()
        assert [path.name for path in first.files()] == ["part-0-000000.parquet", "part-1-000000.parquet"]
        with pytest.raises(OutputError, match="another process is writing"):
            Parts(tmp_path, FACTS, Shard(1, 2))
    assert {row["key"] for row in read(tmp_path)} == {f"{n}.png" for n in (0, 1, 2, 3, 5)}
    done = {("zoo", f"{n}.png") for n in range(4)}
    with Parts(tmp_path, FACTS, Shard(0, 2)) as first:
        assert set(first.finished()) == done, "all ranks' images are known"
        assert len(read(tmp_path)) == 5, "the other rank's error is left alone"
        with Parts(tmp_path, FACTS, Shard(1, 2)) as second:
            assert set(second.finished()) == done
            second.add(answer(5))
    assert sorted(row["key"] for row in read(tmp_path) if not row["error"]) == [f"{n}.png" for n in (0, 1, 2, 3, 5)]
    assert len(read(tmp_path)) == 5
    with pytest.raises(OutputError, match="views was 4 and is now 8"):
        Parts(tmp_path, FACTS | {"views": 8}, Shard(1, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_is_continued_with_another_world_size(tmp_path: Path, world_size: int) -> None:
    """Each part has exactly one owner, who removes its errors."""
    for rank in range(4):
        with Parts(tmp_path, FACTS, Shard(rank, 4)) as parts_of_rank:
            parts_of_rank.add(answer(rank))
            parts_of_rank.add(bad(10 + rank))
    for rank in range(world_size):
        with Parts(tmp_path, FACTS, Shard(rank, world_size)) as continued:
            assert len(list(continued.finished())) == 4 + rank
            continued.add(answer(20 + rank))
    assert all(row["error"] is None for row in read(tmp_path))
    assert len(read(tmp_path)) == 4 + world_size


@pytest.mark.parametrize("running", [Shard(), Shard(0, 2)])
def test_processes_of_different_world_sizes_do_not_write_at_once(tmp_path: Path, running: Shard) -> None:
    with Parts(tmp_path, FACTS, running), pytest.raises(OutputError, match="with world size .*, not 3"):
        Parts(tmp_path, FACTS, Shard(1, 3))
    Parts(tmp_path, FACTS, Shard(1, 3)).__exit__()
    with Parts(tmp_path, FACTS, Shard(1, 3)), pytest.raises(OutputError, match="with world size 3, not"):
        Parts(tmp_path, FACTS, running)


def test_ranks_that_start_at_once_agree_on_the_facts(tmp_path: Path) -> None:
    """Half of them have other settings: whoever is first wins, and the others are refused."""
    barrier = threading.Barrier(8)

    def start(rank: int, folder: Path) -> int | None:
        barrier.wait()
        try:
            opened = Parts(folder, {"views": rank % 2}, Shard(rank, 8))
        except OutputError:
            return None
        barrier_of_exit.wait(timeout=10)
        opened.__exit__()
        return rank % 2

    for number in range(20):
        barrier_of_exit = threading.Barrier(4)
        with ThreadPoolExecutor(8) as threads:
            started = Counter(threads.map(lambda rank: start(rank, tmp_path / str(number)), range(8)))  # noqa: B023
        assert started[None] == 4
        assert {started[0], started[1]} == {0, 4}


def test_ranks_leave_the_unfinished_files_of_others_alone(tmp_path: Path) -> None:
    unfinished = [tmp_path / f".part-{rank}-000000.parquet.77.part" for rank in (0, 1, 10)]
    with Parts(tmp_path, FACTS, Shard(1, 11)):
        pass
    for path in unfinished:
        path.touch()
    with Parts(tmp_path, FACTS, Shard(1, 11)):
        assert [path.exists() for path in unfinished] == [True, False, True]


def test_a_part_that_its_owner_has_just_removed_is_passed_over(tmp_path: Path) -> None:
    with Parts(tmp_path, FACTS, Shard(0, 2)) as other, Parts(tmp_path, FACTS, Shard(1, 2)) as own:
        for row in (answer(0), bad(1), answer(2)):
            other.add(row)
            other.flush()
        finished = own.finished()
        assert next(finished) == ("zoo", "0.png")
        (tmp_path / "part-0-000001.parquet").unlink()
        assert list(finished) == [("zoo", "2.png")]


def test_facts_that_a_killed_process_left_unfinished_are_removed(tmp_path: Path) -> None:
    unfinished = tmp_path / "._facts.json.77-1.part"
    unfinished.write_text('{"views": ')
    with Parts(tmp_path, FACTS) as opened:
        opened.add(answer(0))
    assert not unfinished.exists()
    with pytest.raises(OutputError, match="views was 4 and is now 8"):
        Parts(tmp_path, FACTS | {"views": 8})


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OutputError, match=f"^{tmp_path} is on a file system without locks \\(No locks available\\)$"):
        Parts(tmp_path, FACTS)


def test_images_are_new_once() -> None:
    seen = SeenKeys()
    assert [seen.add("a", "b"), seen.add("a", "b"), seen.add("ab", ""), seen.add("", "ab")] == [True, False, True, True]
    seen.close()
