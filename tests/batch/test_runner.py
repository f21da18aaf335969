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
from usetta.batch import runner
from usetta.batch.parts import OutputError
from usetta.batch.runner import BatchSettings, ImageBatch, classify
from usetta.batch.sources import BatchImage, SourceOptions
from usetta.distributed import Failed, LocalEngine, Pace, pacing
from usetta.models.clip import CLIP

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

CLASSES = ("tabby cat", "red fox", "old stone bridge")
TOLERANCE = 1e-4
"""Of probabilities, between runs whose arithmetic rounds otherwise; docs/cluster.md states it."""


def settings(method: str = "use", **changes: Any) -> BatchSettings:
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
    table = parquet.read_table(out).to_pylist()
    assert len({(row["source"], row["key"]) for row in table}) == len(table), "nothing twice"
    return {row["key"].rpartition("/")[2]: row for row in table}


def answers(out: Path) -> dict[str, Any]:
    """Rows by name, without where they came from."""
    return {
        name: {column: value for column, value in row.items() if column not in ("source", "key")}
        for name, row in rows(out).items()
    }


@pytest.mark.parametrize("method", ["clip", "se", "use"])
def test_rows_are_what_the_classifier_says(model: CLIP, zoo: Path, tmp_path: Path, method: str) -> None:
    lines: list[str] = []
    done = classify(model, settings(method), [str(zoo)], tmp_path / "out", log=lines.append)
    assert (done.images, done.failed, done.before) == (20, 1, 0)
    (line,) = lines
    assert line.startswith(f"{zoo}: 19.png: not an image, or in an unsupported format (supported: JPEG, PNG,")
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
        assert row["views"] == len(answer.entropies) == (1 if method == "clip" else 8)
        assert (row["delta"], row["beta"]) == (pytest.approx(answer.delta), pytest.approx(answer.beta))
    assert len({row["label"] for row in found.values()}) > 2, "answers must differ, else little was tested"


def test_the_source_and_the_parts_change_nothing(
    model: CLIP, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classify(model, settings(), [str(zoo)], tmp_path / "folder")
    expected = answers(tmp_path / "folder")
    with tarfile.open(tmp_path / "zoo.tar", "w") as tar:
        for path in sorted(zoo.iterdir(), reverse=True):
            tar.add(path, path.name)
    names = [path.name for path in sorted(zoo.iterdir())]
    (zoo / "list.txt").write_text("\n".join([*names, names[3]]))  # one of them twice
    table = pyarrow.table({"path": [str(zoo / name) for name in names]})
    parquet.write_table(table, tmp_path / "zoo.parquet")
    monkeypatch.setattr(runner, "_BATCH_IMAGES", 3)
    for source in (str(tmp_path / "zoo.tar"), f"@{zoo / 'list.txt'}", str(tmp_path / "zoo.parquet"), f"file://{zoo}"):
        out = tmp_path / "out" / source.replace("/", "-")
        assert classify(model, settings(), [source], out, options=SourceOptions(allow_urls=True)).images == 20
        assert answers(out) == expected, source


class Failing(Counting):
    """A model that fails after so many views."""

    after = 10**9

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        if self.encoded >= self.after:
            raise KeyboardInterrupt
        return super().encode_images(pixels)


def test_a_run_that_was_stopped_goes_on_and_computes_nothing_twice(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    classify(model, settings(), [str(zoo)], tmp_path / "whole")
    counting: Any = Failing(model)
    counting.after = 9 * 8  # views of nine images
    with pytest.raises(KeyboardInterrupt):
        classify(counting, settings(), [str(zoo)], tmp_path / "out")
    assert len(rows(tmp_path / "out")) == 9  # in this process each is saved by itself
    again: Any = Failing(model)
    done = classify(again, settings(), [str(zoo)], tmp_path / "out")
    assert (done.images, done.before, done.failed) == (11, 9, 1)
    assert again.encoded == 10 * 8
    assert rows(tmp_path / "out") == rows(tmp_path / "whole")
    make_image(19).save(zoo / "19.png")  # what was bad is tried again
    make_image(20).save(zoo / "20.png")  # and what is new is added
    last: Any = Failing(model)
    done = classify(last, settings(), [str(zoo)], tmp_path / "out")
    assert (done.images, done.before, done.failed, last.encoded) == (2, 19, 0, 16)
    assert len(rows(tmp_path / "out")) == 21


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (settings("se"), "method"),
        (settings(views=9), "views"),
        (settings(seed=1), "seed"),
        (settings(augmix=True), "augmix"),
        (settings(top=1), "top"),
        (BatchSettings(("cat",), methods.get("use"), ("a photo of a {}.",), views=8, top=2), "classes"),
        (BatchSettings(CLASSES, methods.get("use"), ("a {}.",), views=8, top=2), "templates"),
        (settings(context=torch.zeros(4, 64)), "context"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_settings_are_refused(model: CLIP, zoo: Path, tmp_path: Path, other: BatchSettings, named: str) -> None:
    classify(model, settings(), [str(zoo / "00.png")], tmp_path / "out")
    with pytest.raises(OutputError, match=rf"were made with other settings \({named} was"):
        classify(model, other, [str(zoo)], tmp_path / "out")
    with pytest.raises(OutputError, match=r"other settings \(model was"):
        classify(four_blocks(seed=1), settings(), [str(zoo)], tmp_path / "out")
    assert list(rows(tmp_path / "out")) == ["00.png"]


class Backwards:
    """An engine that does the last first, each image by itself, and loses some."""

    def __init__(self, lost: str = "") -> None:
        self._lost = lost

    def run(
        self, make_worker: Callable[[], Any], works: Iterable[ImageBatch]
    ) -> Generator[tuple[ImageBatch, Any], None, None]:
        singles = [part for work in works for part in work.parts()][::-1]
        for work, result in LocalEngine().run(make_worker, singles):
            yield work, Failed("ended its worker") if work.images[0].key == self._lost else result


def test_the_engine_the_order_and_the_batches_change_nothing(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    classify(model, settings(), [str(zoo)], tmp_path / "local")
    done = classify(
        model, settings(), [str(zoo)], tmp_path / "engine", engine=Backwards(lost="04.png"), load=lambda: model
    )
    assert (done.images, done.failed) == (20, 2)
    local, engine = answers(tmp_path / "local"), answers(tmp_path / "engine")
    assert engine.pop("04.png") == {**dict.fromkeys(local.pop("04.png")), "error": "ended its worker"}
    assert local == engine, "to the bit"
    assert classify(model, settings(), [str(zoo)], tmp_path / "engine").images == 2, "what was lost is tried again"
    with pytest.raises(ValueError, match="pass load"):
        classify(model, settings(), [str(zoo)], tmp_path / "engine", engine=Backwards())


def test_other_roundings_change_no_answer_and_probabilities_within_the_tolerance(
    model: CLIP, zoo: Path, tmp_path: Path
) -> None:
    """Threads of the arithmetic are what differs between workers of other sizes."""
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            classify(model, settings(), [str(zoo)], tmp_path / str(threads))
    finally:
        torch.set_num_threads(before)
    one, two = answers(tmp_path / "1"), answers(tmp_path / "2")
    assert {name: (row["label"], row["skipped"]) for name, row in one.items()} == {
        name: (row["label"], row["skipped"]) for name, row in two.items()
    }
    for name in one.keys() - {"19.png"}:
        assert one[name]["top_probabilities"] == pytest.approx(two[name]["top_probabilities"], abs=TOLERANCE)


@pytest.mark.parametrize("method", ["clip", "use"])
def test_a_cache_changes_no_answer_and_spares_the_tower(model: CLIP, zoo: Path, tmp_path: Path, method: str) -> None:
    kept = settings(method, views="adaptive", cache=tmp_path / "cache")
    classify(model, settings(method, views="adaptive"), [str(zoo)], tmp_path / "plain")
    for out in ("first", "again"):
        counting: Any = Counting(model)
        classify(counting, kept, [str(zoo)], tmp_path / out)
        assert answers(tmp_path / out) == answers(tmp_path / "plain")
    assert counting.encoded == 0


def test_progress_is_reported(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    classify(model, settings("clip"), [str(zoo)], tmp_path / "out", log=lines.append, period=0)
    assert [line.split(",")[0] for line in lines[:2]] == ["1 image", "2 images"]
    assert lines[0].endswith(f"/s, 0 failed, 0 in {tmp_path / 'out'}")
    assert lines[-1].startswith("20 images, ")


def test_batches_are_of_few_images_and_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_BATCH_BYTES", 100)
    sizes, pace = [10] * 9 + [60, 50, 10, 200, 10], Pace(8)
    pace.images = 8
    batches = list(runner._batches((BatchImage("s", str(i), bytes(size)) for i, size in enumerate(sizes)), pace))
    assert [[len(image.place) for image in batch.images] for batch in batches] == [
        [10] * 8,
        [10, 60, 50],
        [10, 200],
        [10],
    ]
    assert len({batch.key for batch in batches}) == 4
    keys = [part.key for batch in batches for part in batch.parts()]
    assert len({*keys}) == len(sizes)


@pytest.mark.parametrize(("slow", "sizes"), [(False, [1, 2, 4, 8, 4]), (True, [1] * 19)])
def test_images_that_take_long_travel_alone(
    model: CLIP, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool, sizes: list[int]
) -> None:
    """An engine returns whole batches, so a kill loses those that are on their way."""
    (zoo / "19.png").unlink()
    monkeypatch.setattr(pacing, "_SOON", 0.0 if slow else 1000.0)
    seen: list[int] = []

    class Engine(LocalEngine):
        def run(self, make_worker: Any, items: Any) -> Any:
            for item in items:  # one at a time, so that their number follows from nothing but the pace
                seen.append(len(item.images))
                yield from super().run(make_worker, [item])

    classify(model, settings("clip"), [str(zoo)], tmp_path / "out", engine=Engine(), load=lambda: model)
    assert seen == sizes
    assert len(rows(tmp_path / "out")) == 19


def test_answers_depend_on_the_weak_view_and_on_the_model_that_rewards(model: CLIP) -> None:
    plain = settings().facts(model)
    assert not {"weak_view", "reward_model"} & set(plain)
    other = four_blocks(seed=1)
    other.resize_mode = "squash"
    facts = settings("rlcf").facts(other, model)
    assert facts["weak_view"] == ["squash", "bicubic"]
    assert facts["reward_model"] == {"name": "four-blocks", "fingerprint": model.fingerprint}
    assert facts["model"]["fingerprint"] == other.fingerprint != model.fingerprint


def test_workers_of_an_engine_load_the_model_that_rewards(model: CLIP, zoo: Path, tmp_path: Path) -> None:
    reward_model, made = four_blocks(seed=1), list[str]()

    def load_reward_model() -> CLIP:
        made.append("reward")
        return reward_model

    options: dict[str, Any] = {"engine": LocalEngine(), "load": lambda: model, "reward_model": reward_model}
    sources = [str(zoo / "00.png"), str(zoo / "01.png")]
    with pytest.raises(ValueError, match="pass load and load_reward_model"):
        classify(model, settings("rlcf"), sources, tmp_path / "out", **options)
    classify(model, settings("rlcf"), sources, tmp_path / "out", **options, load_reward_model=load_reward_model)
    assert made == ["reward"]
    classifier = Classifier(CLASSES, model, "rlcf", views=8, reward_model=reward_model)
    for name, row in rows(tmp_path / "out").items():
        prediction = classifier(zoo / name)
        assert row["label"] == prediction.label
        assert row["confidence"] == pytest.approx(prediction.confidence, abs=TOLERANCE)
    own = Classifier(CLASSES, model, "rlcf", views=8)(zoo / "00.png")
    assert own.confidence != pytest.approx(rows(tmp_path / "out")["00.png"]["confidence"], abs=1e-6)
    with pytest.raises(OutputError, match="reward model was"):
        classify(model, settings("rlcf"), sources, tmp_path / "out")
