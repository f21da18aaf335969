"""What may go wrong under a run: images replaced, two writers, a damaged or full disk, a clock that is set back."""

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import make_image
from evaluate.runs import VIEWS, Counting, content, downgrade, make_dataset
from evaluate.test_store import ROW
from usetta.cli import app
from usetta.distributed import LocalEngine, pacing
from usetta.evaluate import writing
from usetta.evaluate.repair import repair
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import FILE, NO_ORDER, FileContent, Store, StoreError
from usetta.evaluate.writing import only_writer
from usetta.models.clip import CLIP

SETTINGS = EvalSettings(views=VIEWS)


def test_an_image_that_was_replaced_is_answered_again(tiny_model: CLIP, tmp_path: Path) -> None:
    things, out = make_dataset(tmp_path), tmp_path / "run"
    evaluate(tiny_model, [things], ["clip", "se"], out, SETTINGS)
    first, second = things[0].path, things[1].path
    os.utime(second)  # touched, but the same
    make_image(77, (40, 50)).save(first)
    lines: list[str] = []
    done = evaluate(tiny_model, [things], ["clip", "se"], out, SETTINGS, log=lines.append)
    assert (done.images, done.rows) == (1, 2)
    assert lines[0] == f"things: 1 images have changed since they were answered: {things[0].id}"
    evaluate(tiny_model, [things], ["clip", "se"], tmp_path / "fresh", SETTINGS)
    assert content(out) == content(tmp_path / "fresh")
    assert evaluate(tiny_model, [things], ["clip", "se"], out, SETTINGS).images == 0


def test_a_second_writer_is_refused_and_learns_who_the_first_is(tiny_model: CLIP, tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from filelock import FileLock\n"
        "folder = Path(sys.argv[1]); lock = FileLock(folder / '.lock'); lock.acquire()\n"
        """(folder / '.writer.json').write_text('{"pid": 12, "host": "node7"}')\n"""
        "print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        try:
            with pytest.raises(StoreError, match=r"another process writes into .*, process 12 on node7: wait"):
                evaluate(tiny_model, [make_dataset(tmp_path)], ["clip"], tmp_path, SETTINGS)
        finally:
            first.kill()
    with only_writer(tmp_path):  # whoever was killed holds nothing any more
        pass


def test_every_answer_is_saved_within_a_second(
    tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image may take long, and a kill at any time loses no more than the last of them."""
    monkeypatch.setattr(writing, "_SECONDS", 0.0)
    saved: list[int] = []
    add = Store.add
    monkeypatch.setattr(Store, "add", lambda store, rows, *more: (saved.append(len(rows)), add(store, rows, *more)))
    evaluate(tiny_model, [make_dataset(tmp_path)], ["clip", "se"], tmp_path / "run", SETTINGS)
    assert saved == [2] * 5


@pytest.mark.parametrize(
    ("slow", "batch_size", "sizes"),
    [(False, None, [1, 2, 4, 1, 3]), (True, None, [1] * 11), (False, 4, [4, 4, 3]), (True, 4, [4, 4, 3])],
)
def test_slow_images_are_saved_one_by_one_unless_they_are_computed_together(
    tiny_model: CLIP,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: bool,
    batch_size: int | None,
    sizes: list[int],
) -> None:
    """Which images are computed together decides last bits, so it does not depend on the clock."""
    monkeypatch.setattr(pacing, "_SOON", 0.0 if slow else 1000.0)
    monkeypatch.setattr(pacing, "_LONG", 0.0 if slow else 1000.0)
    monkeypatch.setattr(writing, "_SECONDS", 0.0)
    saved: list[int] = []
    add = Store.add
    monkeypatch.setattr(Store, "add", lambda store, rows, *more: (saved.append(len(rows)), add(store, rows, *more)))

    class Engine(LocalEngine):
        def run(self, make_worker: Any, items: Any) -> Any:
            for item in items:
                yield from super().run(make_worker, [item])

    things = make_dataset(tmp_path, images=11)
    run = {"engine": Engine(), "load": lambda: tiny_model, "batch_size": batch_size}
    evaluate(tiny_model, [things], ["clip"], tmp_path / "run", SETTINGS, **run)  # type: ignore[arg-type]
    assert saved == sizes


def many_rows(folder: Path) -> None:
    with Store(folder) as store:
        store.fix("run", "model", {"name": "tiny"})
        store.add([replace(ROW, image=f"{i:04}.jpg", method=m) for i in range(600) for m in ("clip", "se")])
    with closing(sqlite3.connect(folder / FILE)) as db:
        db.execute("PRAGMA journal_mode = DELETE")


def test_a_damaged_database_is_named_and_every_intact_row_saved(tmp_path: Path) -> None:
    many_rows(tmp_path)
    size = (tmp_path / FILE).stat().st_size
    with (tmp_path / FILE).open("r+b") as file:  # a page out of the middle
        file.seek(size // 2 // 4096 * 4096)
        file.write(bytes(4096))
    with pytest.raises(StoreError, match=r"is damaged .*: `usetta repair RUN` keeps what is intact"):
        Store(tmp_path)
    result = CliRunner().invoke(app, ["repair", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert f"the old database is {tmp_path / 'damaged-1.sqlite'}" in " ".join(result.output.split("\n"))
    with Store(tmp_path) as store:
        kept = list(store.rows())
        assert store.facts("run") == {"model": {"name": "tiny"}}
    assert 1100 < len(kept) < 1200  # all but those of one page
    assert all(replace(row, image=ROW.image, method=ROW.method) == ROW for row in kept)


def test_what_lies_between_two_damaged_pages_is_kept_where_the_images_are_known(tmp_path: Path) -> None:
    many_rows(tmp_path)
    images = [f"{i:04}.jpg" for i in range(600)]
    with Store(tmp_path) as store:
        store.note_contents(ROW.dataset, {image: FileContent(1, 2, "digest") for image in images})
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    content = bytearray((tmp_path / FILE).read_bytes())
    for image in (b"0150.jpg", b"0450.jpg"):
        (place,) = (match.start() for match in re.finditer(rb"clip.?" + image, content, re.DOTALL))
        page = place // 4096 * 4096
        assert content[page] == 10, "a leaf of an index"
        content[page : page + 4096] = bytes(4096)
    (tmp_path / FILE).write_bytes(content)
    done = repair(tmp_path)
    assert 1100 < done.rows < 1200  # all but those of two pages
    with Store(tmp_path) as store:
        kept = store.done(ROW.dataset, ROW.seed, "clip")
    assert {"0000.jpg", "0300.jpg", "0599.jpg"} <= kept
    assert not {"0150.jpg", "0450.jpg"} & kept


def test_a_run_that_lost_what_it_depends_on_is_not_repaired(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"there is no run in {tmp_path}"):
        repair(tmp_path)
    with Store(tmp_path) as store:
        store.add([ROW])
    with pytest.raises(StoreError, match="does not say any more what its results depend on: remove it and run it"):
        repair(tmp_path)
    with Store(tmp_path) as store:
        assert list(store.rows()) == [ROW]
    assert sorted(path.name for path in tmp_path.glob("[!.]*.sqlite")) == [FILE], "nothing was replaced"


def test_a_run_that_lost_a_table_keeps_the_others(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.fix("run", "model", {"name": "tiny"})
        store.add([ROW])
    with closing(sqlite3.connect(tmp_path / FILE)) as db, db:
        db.execute("DROP TABLE contents")
    assert repair(tmp_path).rows == 1
    with Store(tmp_path) as store:
        assert list(store.rows()) == [ROW]
        assert store.contents(ROW.dataset) == {}


def test_a_run_of_the_version_before_is_repaired(tmp_path: Path) -> None:
    many_rows(tmp_path)
    downgrade(tmp_path)
    done = repair(tmp_path)
    assert (done.rows, done.wrong) == (1200, 0)
    with Store(tmp_path) as store:
        assert len(store.done(ROW.dataset, ROW.seed, "se", NO_ORDER)) == 600


def test_rows_that_cannot_be_answers_are_left_out(tmp_path: Path) -> None:
    many_rows(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as db, db:
        db.execute("UPDATE results SET confidence = 7 WHERE image = '0003.jpg'")
        db.execute("UPDATE results SET prediction = 'cat' WHERE image = '0004.jpg' AND method = 'se'")
    done = repair(tmp_path)
    assert (done.rows, done.wrong) == (1197, 3)
    (tmp_path / FILE).write_bytes(b"\0" * 10_000)
    with pytest.raises(StoreError, match=r"nothing in .* can be read|does not say any more"):
        repair(tmp_path)


def test_a_full_disk_in_the_middle_leaves_what_was_whole(tiny_model: CLIP, tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.add([ROW])
        store._db.execute("PRAGMA max_page_count = 12")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.add([replace(ROW, image=f"{i:05}.jpg") for i in range(5000)])
        assert list(store.rows()) == [ROW]
    with Store(tmp_path) as store:
        store.add([replace(ROW, image="next.jpg")])
        assert len(list(store.rows())) == 2


def test_a_clock_that_is_set_back_loses_nothing(
    tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(1000, 0, -1))
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: float(next(times))))
    things = make_dataset(tmp_path)
    assert evaluate(Counting(tiny_model), [things], ["clip"], tmp_path / "run", SETTINGS).rows == 5  # type: ignore[arg-type]
    with Store(tmp_path / "run") as store:
        assert len(list(store.rows())) == 5
