"""Predictions on disk: whole files or none, never two kinds in one place."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from usetta.batch import parts
from usetta.batch.parts import OutputError, Parts, PredictionRow, SeenKeys

parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

FACTS = {"model": {"name": "tiny"}, "views": 4}


def answer(number: int) -> PredictionRow:
    return PredictionRow("zoo", f"{number}.png", "cat", 0.75, ("cat", "dog"), (0.75, 0.25), "dog", 0.5, 0.5, True)


def bad(number: int) -> PredictionRow:
    return PredictionRow("zoo", f"{number}.png", error="file is empty")


def read(folder: Path) -> list[dict[str, Any]]:
    """As other programs do."""
    found: list[dict[str, Any]] = parquet.read_table(folder).to_pylist()
    return found


def test_rows_come_back_as_they_were_and_a_directory_reads_as_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_ROWS", 3)
    out = tmp_path / "predictions.parquet"
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
        "error": None,
    }
    assert {name for name, value in rows[7].items() if value is not None} == {"source", "key", "error"}


def test_what_is_finished_is_known_and_bad_images_are_tried_again(tmp_path: Path) -> None:
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


def test_slow_rows_are_written_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(parts.time, "monotonic", lambda: now)
    with Parts(tmp_path, FACTS) as opened:
        opened.add(answer(0))
        now += 59
        opened.add(answer(1))
        assert opened.rows == 0
        now += 2
        opened.add(answer(2))
        assert opened.rows == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"views": 8}, "were made with another views: it was 4 and is 8. Choose another directory with --out"),
        ({"model": {"name": "other"}}, 'another model: it was {"name": "tiny"} and is {"name": "other"}'),
        ({"seed": 1}, "another seed: it was null and is 1"),
    ],
)
def test_predictions_of_another_kind_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with Parts(tmp_path, FACTS) as opened:
        opened.add(answer(0))
    with pytest.raises(OutputError) as caught:
        Parts(tmp_path, FACTS | change)
    assert message in str(caught.value)
    assert len(read(tmp_path)) == 1


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(OutputError, match="holds something else than predictions"):
        Parts(tmp_path, FACTS)
    with pytest.raises(OutputError, match="is a file; predictions go to a directory"):
        Parts(tmp_path / "thesis.tex", FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_write_to_one_directory(tmp_path: Path) -> None:
    with Parts(tmp_path, FACTS), pytest.raises(OutputError, match="another process is writing"):
        Parts(tmp_path, FACTS)
    Parts(tmp_path, FACTS).__exit__()


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_that_is_killed_while_it_writes_leaves_whole_parts(tmp_path: Path, moment: str) -> None:
    script = (
        "import os, signal; from pathlib import Path\n"
        "from usetta.batch import parts\n"
        f"opened = parts.Parts(Path({str(tmp_path)!r}), {FACTS!r})\n"
        "row = lambda n: parts.PredictionRow('zoo', f'{n}.png', 'cat')\n"
        "opened.add(row(0)); opened.flush(); opened.add(row(1))\n"
        "kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{'parts.os.fsync' if moment == 'fsync' else 'Path.replace'} = kill\n"
        "opened.flush()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [row["key"] for row in read(tmp_path)] == ["0.png"]
    assert any(path.suffix == ".tmp" for path in tmp_path.iterdir())
    with Parts(tmp_path, FACTS) as opened:
        assert list(opened.finished()) == [("zoo", "0.png")]
        opened.add(answer(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_facts.json",
        "_lock",
        "part-000000.parquet",
        "part-000001.parquet",
    ]


def test_images_are_new_once() -> None:
    seen = SeenKeys()
    assert [seen.add("a", "b"), seen.add("a", "b"), seen.add("ab", ""), seen.add("", "ab")] == [True, False, True, True]
    seen.close()
