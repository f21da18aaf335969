"""The work of a run: images of all kinds, bad ones among them, and threads that are never far ahead."""

import io
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conftest import make_image
from evaluate.runs import CLASSES, VIEWS, Content, content, make_dataset
from usetta import methods
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import Store
from usetta.evaluate.worker import EvalWorker, Subject, Task, _ahead
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe

SETTING = EvalSettings(views=VIEWS)


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    make_image(3, (120, 90)).save(file, "JPEG", **options)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG whose header says that it is 50 000 pixels wide and as high."""
    file = io.BytesIO()
    make_image().save(file, "PNG")
    header = b"IHDR" + struct.pack(">II", 50_000, 50_000) + file.getvalue()[24:29]
    return file.getvalue()[:12] + header + struct.pack(">I", zlib.crc32(header)) + file.getvalue()[33:]


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(jpeg()[:1500]), "file is truncated"),
    "empty": (lambda path: path.write_bytes(b""), "file is empty"),
    "text": (lambda path: path.write_text("I am an image"), "not an image in a format that is read here"),
    "bomb": (lambda path: path.write_bytes(bomb()), "has 50000 x 50000 pixels, more than the limit of 100,000,000"),
    "vanished": (Path.unlink, "no such file"),
    "folder": (folder, "is a folder, not an image"),
}


def repair(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    path.write_bytes(jpeg())


@pytest.mark.parametrize("cached", [False, True])
def test_bad_images_are_told_and_the_others_answered_until_they_are_repaired(
    model: CLIP, tmp_path: Path, cached: bool
) -> None:
    dataset, out = make_dataset(tmp_path / "images", 2 + len(BAD)), tmp_path / "run"
    good = {dataset.ids[0], dataset.ids[4]}
    broken = dict(zip([each for each in dataset if each.id not in good], BAD.values(), strict=True))
    for image, (spoil, _) in broken.items():
        spoil(image.path)

    def go() -> Content:
        cache = tmp_path / "cache" if cached else None
        found = evaluate(model, [dataset], ["clip", "se"], out, SETTING, seeds=(0, 1), batch_size=3, cache=cache)
        assert found.bad == len(content(out).bad)
        return content(out)

    first = go()
    assert [image for _, image, _ in first.bad] == sorted(image.id for image in broken)
    for name, image, reason in first.bad:
        assert name == "things"
        assert next(expected for each, (_, expected) in broken.items() if each.id == image) in reason
    assert {row.image for row in first.rows} == good
    assert len(first.rows) == 2 * 2 * 2
    for place, image in enumerate(broken):  # one after the other
        repair(image.path)
        found = go()
        assert len(found.bad) == len(broken) - place - 1
        assert {row.image for row in found.rows} == good | {each.id for each in list(broken)[: place + 1]}
        assert [row for row in found.rows if row.image in good] == first.rows
    assert len(found.rows) == len(dataset) * 2 * 2


def test_a_image_that_may_not_be_read_is_told(
    model: CLIP, things: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read anything, so the refusal is made up."""
    secret, allowed = things[1].path, Path.open

    def guarded(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == secret:
            raise PermissionError(13, "Permission denied", str(path))
        return allowed(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", guarded)
        evaluate(model, [things], ["clip"], tmp_path / "run")
    assert content(tmp_path / "run").bad == [("things", things.ids[1], "no permission to read it")]
    assert evaluate(model, [things], ["clip"], tmp_path / "run").rows == 1
    assert content(tmp_path / "run").bad == []


def odd_kinds(folder: Path) -> list[Path]:
    """Images that are fine, though not every program opens them alike."""
    folder.mkdir()
    image = make_image(5, (70, 50))
    image.convert("CMYK").save(folder / "cmyk.jpg")
    grey = (np.asarray(image.convert("L")).astype(np.uint16) * 3).clip(0, 65535)
    Image.fromarray(grey).save(folder / "grey16.png")
    palette = image.quantize(16)
    palette.save(folder / "palette.png", transparency=3)
    frames = [make_image(seed, (70, 50)).quantize(64) for seed in (6, 7, 8)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    turned = Image.Exif()
    turned[0x0112] = 6
    image.save(folder / "turned.jpg", exif=turned)
    image.convert("LA").save(folder / "grey-alpha.png")
    image.convert("1").save(folder / "black-and-white.tiff")
    image.crop((0, 0, 70, 1)).save(folder / "line.bmp")
    return sorted(folder.iterdir())


def test_odd_kinds_of_images_are_answered_as_published_loaders_read_them(model: CLIP, tmp_path: Path) -> None:
    odd = odd_kinds(tmp_path / "odd")
    (tmp_path / "plain").mkdir()
    for path in odd:
        with Image.open(path) as image:
            image.seek(0)
            image.convert("RGB").save(tmp_path / "plain" / f"{path.name}.png")

    def confidences(root: Path, suffix: str) -> dict[str, float]:
        ids = tuple(path.name + suffix for path in odd)
        dataset = Dataset("odd", "Odd", "other", CLASSES, ids, (0,) * len(ids), root, "generated")
        assert evaluate(model, [dataset], ["clip"], tmp_path / f"run{suffix}").bad == 0
        return {row.image.removesuffix(suffix): row.true_probability for row in content(tmp_path / f"run{suffix}").rows}

    found, expected = confidences(tmp_path / "odd", ""), confidences(tmp_path / "plain", ".png")
    assert len(found) == 8
    assert found == expected
    assert len(set(found.values())) == 8


def task_of(model: CLIP, dataset: Dataset, names: dict[int, tuple[str, ...]], seed: int = 0) -> Task:
    recipes = {name: methods.get(name) for each in names.values() for name in each}
    prompts = ClassPrompts(model.text, dataset.classes)
    return Task(Subject(dataset, ViewRecipe(views=VIEWS, size=32), recipes, prompts, prompts), seed, names)


def test_a_task_asks_for_no_more_than_its_methods_need(model: CLIP, things: Dataset) -> None:
    def needs(*names: str) -> tuple[int, bool, bool]:
        task = task_of(model, things, {0: names}, seed=7)
        assert task.views.seed == 7
        return task.views.views, task.needs_hidden, task.needs_judge

    assert needs("clip") == (1, False, False)
    assert needs("clip", "se:beta=1.0") == (1, False, False)
    assert needs("clip", "se") == (VIEWS, False, False)
    assert needs("ttl") == (VIEWS, True, False)
    assert needs("rlcf", "clip") == (VIEWS, False, True)


def test_every_image_of_a_task_is_answered_by_the_methods_that_it_lacks(model: CLIP, things: Dataset) -> None:
    names = {0: ("clip", "se"), 2: ("se",), 3: ("tpt", "clip"), 4: ("ttl",)}
    (outcome,) = EvalWorker(model).run([task_of(model, things, names)])
    found = {(things.ids.index(row.image), row.method) for row in outcome.rows}
    assert found == {(image, name) for image, wanted in names.items() for name in wanted}
    assert len(outcome.rows) == 6
    assert sorted(things.ids.index(each.image) for each in outcome.seen) == [0, 2, 3, 4]
    assert all(len(each.views) == 4 for each in outcome.seen)
    assert (outcome.encoded, outcome.bad) == (4, [])


@pytest.mark.parametrize("names", [("clip",), ("clip", "se"), ("se", "ttl", "rlcf")])
def test_images_that_go_through_the_tower_together_get_the_same_answers(
    model: CLIP, things: Dataset, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which a task's images share."""
    wanted = dict.fromkeys(range(4), names)
    (one_by_one,) = EvalWorker(model).run([task_of(model, things, wanted)])
    monkeypatch.setattr(EvalWorker, "_groups", lambda self, members: iter([list(members)]))
    (together,) = EvalWorker(model).run([task_of(model, things, wanted)])
    assert together.encoded == 4
    for one, other in zip(one_by_one.rows, together.rows, strict=True):
        assert (one.image, one.method, one.prediction) == (other.image, other.method, other.prediction)
        assert other.confidence == pytest.approx(one.confidence, abs=1e-5)


def test_a_worker_does_tasks_of_several_data_sets_in_order(model: CLIP, tmp_path: Path) -> None:
    sets = [make_dataset(tmp_path / name, 3, name) for name in "ab"]
    tasks = [task_of(model, dataset, {n: ("se",)}, seed) for n in range(3) for dataset in sets for seed in (0, 1)]
    outcomes = list(EvalWorker(model, threads=3).run(tasks))
    assert len(outcomes) == len(tasks)
    assert [(row.dataset, row.seed) for outcome in outcomes for row in outcome.rows] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ] * 3
    assert list(EvalWorker(model).run([])) == []


def test_the_time_of_a_image_is_its_own_and_its_share_of_the_method(model: CLIP, things: Dataset) -> None:
    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def encode_images(self, pixels: Any) -> Any:
            if len(pixels) > 1:
                time.sleep(0.05)
            return model.encode_images(pixels)

    (outcome,) = EvalWorker(Slow()).run([task_of(model, things, {0: ("clip", "se"), 1: ("clip",), 2: ("clip",)})])
    seconds = {(row.image, row.method): row.seconds for row in outcome.rows}
    assert 0.05 < seconds[things.ids[0], "se"] < 5
    assert 0 < seconds[things.ids[0], "clip"] < seconds[things.ids[0], "se"], "one view of many is all that it looks at"


def test_threads_are_at_most_two_items_each_ahead_and_keep_the_order() -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def work(i: int) -> int:
        with lock:
            begun.append(i)
        time.sleep(0.001 * (i % 3))
        return i * i

    taken = 0
    for i, found in enumerate(_ahead(work, range(40), threads=3)):
        assert found == i * i
        taken += 1
        time.sleep(0.002)
        assert len(begun) <= taken + 2 * 3
    assert taken == 40
    assert sorted(begun) == list(range(40))


def test_an_error_of_a_thread_reaches_the_caller_in_its_place() -> None:
    found: list[int] = []
    with pytest.raises(ZeroDivisionError):
        found.extend(_ahead(lambda i: 6 // (3 - i), range(10), threads=2))
    assert found == [2, 3, 6]
    assert not [each for each in threading.enumerate() if each.name.startswith("usetta-views")]


def test_views_that_were_written_down_say_what_the_view_alone_says(
    model: CLIP, things: Dataset, tmp_path: Path
) -> None:
    """With one view there are no others to be written down; they come with a method that looks at them."""
    evaluate(model, [things], ["clip"], tmp_path / "run", replace(SETTING, views=1))
    with Store(tmp_path / "run", create=False) as store:
        alone = [store.shown_views("things", each.id, 0) for each in things]
        rows = {row.image: row for row in store.rows()}
    assert all(each is not None and len(each.views) == 1 for each in alone)
    for each in alone:
        assert each is not None
        assert each.views[0].label == rows[each.image].prediction
    evaluate(model, [things], ["clip"], tmp_path / "more", SETTING)
    evaluate(model, [things], ["use"], tmp_path / "more", SETTING)
    with Store(tmp_path / "more", create=False) as store:
        more = [store.shown_views("things", each.id, 0) for each in things]
    for few, many in zip(alone, more, strict=True):
        assert few is not None
        assert many is not None
        assert len(many.views) == 4
        assert many.views[0].label == few.views[0].label
        assert many.views[0].entropy == pytest.approx(few.views[0].entropy, abs=1e-5)
        assert [view.entropy for view in many.views[1:]] == sorted(view.entropy for view in many.views[1:])
