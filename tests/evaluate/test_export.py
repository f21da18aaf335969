"""Runs as files for other programs: every row, whole files or none."""

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report.stores import CLASSES, answers, make_run
from usetta.evaluate import export as exporting
from usetta.evaluate.export import FORMATS, export
from usetta.evaluate.store import FailedImage, ResultRow, Store

ROWS = [
    replace(answers("pets", "use", "0")[0], image='a, "b"\nü.jpg', confidence=1 / 3),
    replace(answers("pets", "clip", "1")[0], delta=None),
    replace(answers("dtd", "use", "1", seed=7)[0], prediction=99),
]
NAMES = [
    *("dataset", "image", "seed", "method", "label", "label_name", "prediction", "prediction_name", "confidence"),
    *("true_probability", "rank", "sum_of_squares", "delta", "beta", "before", "before_name"),
    *("skipped", "views", "seconds", "order_seed", "position", "entropy", "energy"),
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Store]:
    with make_run(tmp_path / "run", ROWS) as store:
        store.add([], failed=[FailedImage("pets", "broken.jpg", "file is empty")])
        store.note("invocation", "1", {"command": "usetta eval"})
        yield store


def expected(store: Store) -> list[dict[str, Any]]:
    """The rows of the store, with class names."""
    result = []
    for row in store.rows():
        names = {
            f"{column}_name": None if number is None or number > 2 else CLASSES[number]
            for column, number in (("label", row.label), ("prediction", row.prediction), ("before", row.before))
        }
        result.append({name: {**vars(row), **names}[name] for name in NAMES})
    assert len(result) == 3
    return result


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()}


def test_csv(run: Store, tmp_path: Path) -> None:
    assert export(run, tmp_path / "rows.csv") == 3
    with (tmp_path / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == NAMES
    texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in expected(run)]
    assert rows == texts


def test_json_lines(run: Store, tmp_path: Path) -> None:
    assert export(run, tmp_path / "rows.JSONL") == 3
    lines = (tmp_path / "rows.JSONL").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == expected(run)
    assert "naïve" in lines[2]


def test_json_is_one_object_with_all_that_the_run_knows(run: Store, tmp_path: Path) -> None:
    assert export(run, tmp_path / "run.json") == 3
    result = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert list(result) == ["facts", "bad", "rows"]
    assert result["rows"] == expected(run)
    assert result["bad"] == [{"dataset": "pets", "image": "broken.jpg", "reason": "file is empty"}]
    assert result["facts"]["run"]["model"]["name"] == "ViT-B-16"
    assert result["facts"]["classes"]["pets"] == CLASSES
    assert result["facts"]["invocation"] == {"1": {"command": "usetta eval"}}
    assert result["facts"]["dataset"] == run.facts("dataset")


def test_parquet_comes_back_as_it_was(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(exporting, "GROUP_ROWS", 2)
    assert export(run, tmp_path / "rows.parquet") == 3
    file = parquet.ParquetFile(tmp_path / "rows.parquet")
    assert file.num_row_groups == 2  # three rows, two at a time
    result = file.read()
    assert result.column_names == NAMES
    assert result.to_pylist() == expected(run)
    types = {str(field.name): str(field.type) for field in result.schema}
    assert (types["image"], types["seed"], types["delta"], types["skipped"]) == ("string", "int64", "double", "bool")
    about = json.loads(result.schema.metadata[b"usetta"])
    assert about["facts"]["dataset"] == run.facts("dataset")
    assert about["bad"][0]["image"] == "broken.jpg"


def test_a_run_without_rows_or_class_names(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with Store(tmp_path / "run") as store:
        for suffix in FORMATS:
            assert export(store, tmp_path / f"none{suffix}") == 0
        assert (tmp_path / "none.csv").read_text(encoding="utf-8") == ",".join(NAMES) + "\n"
        assert json.loads((tmp_path / "none.json").read_text(encoding="utf-8"))["rows"] == []
        store.add(answers("pets", "clip", "1"))
        export(store, tmp_path / "one.jsonl")
    assert json.loads((tmp_path / "one.jsonl").read_text(encoding="utf-8"))["label_name"] is None


def test_parquet_without_pyarrow_names_the_extra(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'usetta\[parquet\]'"):
        export(run, tmp_path / "rows.parquet")
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("name", ["rows.xlsx", "rows", "rows.csv.gz"])
def test_other_endings_are_refused(run: Store, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in \.parquet, \.csv, \.json, \.jsonl"):
        export(run, tmp_path / name)
    with pytest.raises(ValueError, match="no folder"):
        export(run, tmp_path / "nowhere" / "rows.csv")
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("suffix", list(FORMATS))
def test_a_file_is_replaced_when_the_new_one_is_whole(
    run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    pytest.importorskip("pyarrow")
    target = tmp_path / f"rows{suffix}"
    target.write_text("old", encoding="utf-8")
    rows = Store.rows

    def broken(store: Store, where: None = None) -> Iterator[ResultRow]:
        yield from list(rows(store))[:2]
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "rows", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            export(run, target)
    assert target.read_text(encoding="utf-8") == "old"
    assert files_in(tmp_path) == {target.name}
    assert export(run, target) == 3
    assert target.stat().st_size > 100
    assert files_in(tmp_path) == {target.name}


def test_a_killed_process_leaves_the_old_file(run: Store, tmp_path: Path) -> None:
    target = tmp_path / "rows.csv"
    target.write_text("old", encoding="utf-8")
    script = (
        "import os, signal; from pathlib import Path\n"
        "from usetta.evaluate.export import export; from usetta.evaluate.store import Store\n"
        "rows = Store.rows\n"
        "def killed(store):\n"
        "    yield next(iter(rows(store)))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Store.rows = killed\n"
        f"export(Store(Path({str(run.folder)!r})), Path({str(target)!r}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert target.read_text(encoding="utf-8") == "old"


def test_rows_are_written_while_they_are_read(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the run: nobody asks for all rows before some are written."""
    ahead: list[int] = []

    def endless(store: Store) -> Iterator[ResultRow]:
        for number in range(2000):
            written = sum(path.stat().st_size for path in tmp_path.glob("*.part"))
            ahead.append(number - written // 100)  # a row takes more than 100 bytes
            yield replace(ROWS[0], image=f"{number:05}.jpg")

    monkeypatch.setattr(Store, "rows", endless)
    assert export(run, tmp_path / "rows.jsonl") == 2000
    assert max(ahead) < 200
