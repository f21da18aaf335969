"""Many images to Parquet: the answers of `Classifier`, whatever the source, engine, company or interruption."""

import tarfile
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import make_image
from evaluate.runs import Counting, four_blocks
from usetta import Classifier, methods
from usetta.batch import run
from usetta.batch.parts import OutputError
from usetta.batch.runner import Batch, BatchSettings, classify
from usetta.distributed import Failed, LocalEngine
from usetta.models.clip import CLIP

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

CLASSES = ("tabby cat", "red fox", "old stone bridge")
TOLERANCE = 1e-4
"""Of probabilities, between runs whose arithmetic rounds otherwise; docs/cluster.md states it."""


def setting(method: str = "use", **changes: Any) -> BatchSettings:
    return BatchSettings(CLASSES, methods.get(method), ("a photo of a {}.",), **{"views": 8, "top": 2, **changes})


@pytest.fixture(scope="module")
def model() -> CLIP:
    return four_blocks()


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Nineteen images, and one that is none."""
    root = tmp_path / "zoo"
    root.mkdir()
    for seed in range(19):
        make_image(seed, (48 + seed, 40)).save(root / f"{seed:02}.png")
    (root / "19.png").write_bytes(b"no image")
    return root


def rows(out: Path) -> dict[str, dict[str, Any]]:
    found = parquet.read_table(out).to_pylist()
    assert len({(row["source"], row["key"]) for row in found}) == len(found), "nothing twice"
    return {row["key"].rpartition("/")[2]: row for row in found}


def answers(out: Path) -> dict[str, Any]:
    """Rows by name, without where they came from."""
    return {
        name: {column: value for column, value in row.items() if column not in ("source", "key")}
        for name, row in rows(out).items()
    }


@pytest.mark.parametrize("method", ["clip", "se", "use"])
def test_rows_are_what_the_classifier_says(model: CLIP, zoo: Path, tmp_path: Path, method: str) -> None:
    said: list[str] = []
    done = classify(model, setting(method), [str(zoo)], tmp_path / "out", say=said.append)
    assert (done.images, done.bad, done.before) == (20, 1, 0)
    assert said == [f"{zoo}: 19.png: not an image in a format that is read here (JPEG, PNG, WEBP, GIF, BMP, TIFF)"]
    classifier = Classifier(CLASSES, model, method, views=8)
    found = rows(tmp_path / "out")
    assert len(found) == 20
    for name, row in found.items():
        if name == "19.png":
            assert row["label"] is None
            assert "not an image" in row["error"]
            continue
        answer = classifier(zoo / name)
        assert (row["source"], row["key"], row["error"]) == (str(zoo), name, None)
        assert (row["label"], row["skipped"]) == (answer.label, answer.skipped)
        assert row["zero_shot"] == CLASSES[int(answer.zero_shot.argmax())]
        assert row["top_labels"] == [label for label, _ in answer.ranked(2)]
        assert row["top_probabilities"] == [p for _, p in answer.ranked(2)]
        assert row["confidence"] == answer.confidence
        assert (row["delta"], row["beta"]) == (pytest.approx(answer.delta), pytest.approx(answer.beta))
    assert len({row["label"] for row in found.values()}) > 2, "answers must differ, else little was tested"


def test_the_source_and_the_parts_change_nothing(
    model: CLIP, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify(model, setting(), [str(zoo)], tmp_path / "folder")
    expected = answers(tmp_path / "folder")
    with tarfile.open(tmp_path / "zoo.tar", "w") as tar:
        for path in sorted(zoo.iterdir(), reverse=True):
            tar.add(path, path.name)
    names = [path.name for path in sorted(zoo.iterdir())]
    (zoo / "list.txt").write_text("\n".join([*names, names[3]]))  # one of them twice
    table = pyarrow.table({"path": [str(zoo / name) for name in names]})
    parquet.write_table(table, tmp_path / "zoo.parquet")
    monkeypatch.setattr(run, "_AT_ONCE", 3)
    for source in (str(tmp_path / "zoo.tar"), f"@{zoo / 'list.txt'}", str(tmp_path / "zoo.parquet"), f"file://{zoo}"):
        out = tmp_path / "out" / source.replace("/", "-")
        assert classify(model, setting(), [source], out).images == 20
        assert answers(out) == expected, source


class Failing(Counting):
    """A model that fails after so many views."""

    after = 10**9

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.encoded >= self.after:
            raise KeyboardInterrupt
        return super().encode_images(pixels)


def test_a_run_that_was_stopped_goes_on_and_computes_nothing_twice(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    classify(model, setting(), [str(zoo)], tmp_path / "whole")
    counting: Any = Failing(model)
    counting.after = 9 * 8  # views of nine images: one batch and a bit
    with pytest.raises(KeyboardInterrupt):
        classify(counting, setting(), [str(zoo)], tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 8
    again: Any = Failing(model)
    done = classify(again, setting(), [str(zoo)], tmp_path / "out")
    assert (done.images, done.before, done.bad) == (12, 8, 1)
    assert again.encoded == 11 * 8
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    make_image(19).save(zoo / "19.png")  # what was bad is tried again
    make_image(20).save(zoo / "20.png")  # and what is new is added
    last: Any = Failing(model)
    done = classify(last, setting(), [str(zoo)], tmp_path / "out")
    assert (done.images, done.before, done.bad, last.encoded) == (2, 19, 0, 16)
    assert len(rows(tmp_path / "out")) == 21


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (setting("se"), "method"),
        (setting(views=9), "views"),
        (setting(seed=1), "seed"),
        (setting(augmix=True), "augmix"),
        (setting(top=1), "top"),
        (BatchSettings(("cat",), methods.get("use"), ("a photo of a {}.",), views=8, top=2), "classes"),
        (BatchSettings(CLASSES, methods.get("use"), ("a {}.",), views=8, top=2), "templates"),
        (setting(context=torch.zeros(4, 64)), "context"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_settings_are_refused(model: CLIP, zoo: Path, tmp_path: Path, other: BatchSettings, named: str) -> None:
    classify(model, setting(), [str(zoo / "00.png")], tmp_path / "out")
    with pytest.raises(OutputError, match=f"were made with another {named}"):
        classify(model, other, [str(zoo)], tmp_path / "out")
    with pytest.raises(OutputError, match="were made with another model"):
        classify(four_blocks(seed=1), setting(), [str(zoo)], tmp_path / "out")
    assert list(rows(tmp_path / "out")) == ["00.png"]


class Backwards:
    """An engine that does the last first, each image by itself, and loses some."""

    def __init__(self, lost: str = "") -> None:
        self._lost = lost

    def run(self, make_worker: Callable[[], Any], works: Iterable[Batch]) -> Generator[tuple[Batch, Any], None, None]:
        singles = [part for work in works for part in work.parts()][::-1]
        for work, found in LocalEngine().run(make_worker, singles):
            yield work, Failed("ended its worker") if work.images[0].key == self._lost else found


def test_the_engine_the_order_and_the_batches_change_nothing(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    classify(model, setting(), [str(zoo)], tmp_path / "here")
    done = classify(
        model, setting(), [str(zoo)], tmp_path / "there", engine=Backwards(lost="04.png"), load=lambda: model
    )
    assert (done.images, done.bad) == (20, 2)
    here, there = answers(tmp_path / "here"), answers(tmp_path / "there")
    assert there.pop("04.png") == {**dict.fromkeys(here.pop("04.png")), "error": "ended its worker"}
    assert here == there, "to the bit"
    assert classify(model, setting(), [str(zoo)], tmp_path / "there").images == 2, "what was lost is tried again"
    with pytest.raises(ValueError, match="say how by load"):
        classify(model, setting(), [str(zoo)], tmp_path / "there", engine=Backwards())


def test_other_roundings_change_no_answer_and_probabilities_within_the_tolerance(
    model: CLIP, zoo: Path, tmp_path: Path
) -> None:
    """Threads of the arithmetic are what differs between workers of other sizes."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            classify(model, setting(), [str(zoo)], tmp_path / str(threads))
    finally:
        torch.set_num_threads(before)
    one, two = answers(tmp_path / "1"), answers(tmp_path / "2")
    assert {name: (row["label"], row["skipped"]) for name, row in one.items()} == {
        name: (row["label"], row["skipped"]) for name, row in two.items()
    }
    for name in one.keys() - {"19.png"}:
        assert one[name]["top_probabilities"] == pytest.approx(two[name]["top_probabilities"], abs=TOLERANCE)


def test_how_far_it_is_is_told(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    said: list[str] = []
    classify(model, setting("clip"), [str(zoo)], tmp_path / "out", say=said.append, period=0)
    assert said[0].startswith("8 images, ")
    assert said[0].endswith(f"/s, 0 bad, 0 in {tmp_path / 'out'}")
    assert said[-1].startswith("20 images, ")


def test_batches_are_of_few_images_and_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_BYTES", 100)
    sizes = [10] * 9 + [60, 50, 10, 200, 10]
    batches = list(run._batches(run.Image("s", str(i), bytes(size)) for i, size in enumerate(sizes)))
    assert [[len(each.place) for each in batch.images] for batch in batches] == [
        [10] * 8,
        [10, 60, 50],
        [10, 200],
        [10],
    ]
    assert len({batch.key for batch in batches}) == 4
    keys = [part.key for batch in batches for part in batch.parts()]
    assert len({*keys}) == len(sizes)
