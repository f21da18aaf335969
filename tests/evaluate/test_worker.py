"""The work of a run: images of all kinds, bad ones among them, and outcomes in the order of the items."""

import io
import struct
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
from evaluate.runs import CLASSES, VIEWS, Content, Counting, content, make_dataset
from usetta import methods
from usetta.data import Dataset
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import ShownViews, Store
from usetta.evaluate.worker import DatasetJob, EvalWorker, WorkImage, WorkItem
from usetta.models.clip import CLIP
from usetta.pipeline import Pipeline
from usetta.views import ViewRecipe

SETTINGS = EvalSettings(views=VIEWS)


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
    "text": (lambda path: path.write_text("I am an image"), "not an image, or in an unsupported format"),
    "bomb": (lambda path: path.write_bytes(bomb()), "has 50000 x 50000 pixels, more than the limit of 100,000,000"),
    "vanished": (Path.unlink, "no such file"),
    "folder": (folder, "is a folder, not an image"),
}


def repair(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    path.write_bytes(jpeg())


@pytest.mark.parametrize("cached", [False, True])
def test_bad_images_are_reported_and_the_others_answered_until_they_are_repaired(
    model: CLIP, tmp_path: Path, cached: bool
) -> None:
    dataset, out = make_dataset(tmp_path / "images", 2 + len(BAD)), tmp_path / "run"
    good = {dataset.ids[0], dataset.ids[4]}
    broken = dict(zip([image for image in dataset if image.id not in good], BAD.values(), strict=True))
    for image, (spoil, _) in broken.items():
        spoil(image.path)

    def go() -> Content:
        cache = tmp_path / "cache" if cached else None
        done = evaluate(model, [dataset], ["clip", "se"], out, SETTINGS, seeds=(0, 1), batch_size=3, cache=cache)
        assert done.failed == len(content(out).bad)
        return content(out)

    first = go()
    assert [image for _, image, _ in first.bad] == sorted(image.id for image in broken)
    for name, image, reason in first.bad:
        assert name == "things"
        assert next(expected for item, (_, expected) in broken.items() if item.id == image) in reason
    assert {row.image for row in first.rows} == good
    assert len(first.rows) == 2 * 2 * 2
    repaired, *others = broken
    for images in ([repaired], others):
        for image in images:
            repair(image.path)
        now = go()
        assert [row for row in now.rows if row.image in good] == first.rows
        assert {row.image for row in now.rows} == set(dataset.ids) - {image for _, image, _ in now.bad}
        assert len(now.bad) == (len(others) if images == [repaired] else 0)
    assert len(now.rows) == len(dataset) * 2 * 2


def test_an_image_that_may_not_be_read_is_reported(
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
        assert evaluate(model, [dataset], ["clip"], tmp_path / f"run{suffix}").failed == 0
        return {row.image.removesuffix(suffix): row.true_probability for row in content(tmp_path / f"run{suffix}").rows}

    found, expected = confidences(tmp_path / "odd", ""), confidences(tmp_path / "plain", ".png")
    assert len(found) == 8
    assert found == expected
    assert len(set(found.values())) == 8


class Jobs:
    """A worker on datasets, by what is asked of their images."""

    def __init__(self, model: Any, *sets: Dataset, threads: int = 2, batch_size: int | None = None) -> None:
        names = ("clip", "se", "se:beta=1.0", "tpt", "ttl", "rlcf")
        recipes = {name: methods.get(name) for name in names}
        jobs = {one.name: DatasetJob(one, recipes, ViewRecipe(VIEWS, 32), ["a photo of a {}."]) for one in sets}
        self._sets = {one.name: one for one in sets}
        self.worker = EvalWorker(Pipeline(model, threads=threads), jobs, batch_size)

    def item(self, names: dict[int, tuple[str, ...]], seed: int = 0, dataset: str = "things") -> WorkItem:
        images = [WorkImage(self._sets[dataset].ids[i], i, wanted) for i, wanted in names.items()]
        return WorkItem(dataset, seed, tuple(images))


@pytest.mark.parametrize(
    ("names", "encoded", "hidden", "rewarded"),
    [
        (("clip",), 1, 0, 0),
        (("clip", "se:beta=1.0"), 1, 0, 0),
        (("clip", "se"), VIEWS, 0, 0),
        (("ttl", "se"), 0, VIEWS, 0),
        (("rlcf", "clip"), VIEWS, 0, VIEWS),
    ],
)
def test_no_more_is_encoded_than_the_methods_need(
    model: CLIP, things: Dataset, names: tuple[str, ...], encoded: int, hidden: int, rewarded: int
) -> None:
    own, reward_model = Counting(model), Counting(model)
    job = DatasetJob(things, {name: methods.get(name) for name in names}, ViewRecipe(VIEWS, 32), ["a {}."])
    worker = EvalWorker(Pipeline(own, reward_model=reward_model), {"things": job})
    (outcome,) = worker.run([WorkItem("things", 7, (WorkImage(things.ids[0], 0, names),))])
    assert (own.encoded, own.hidden, reward_model.encoded) == (encoded, hidden, rewarded)
    assert [row.seed for row in outcome.rows] == [7] * len(names)


def test_every_image_of_an_item_is_answered_by_the_methods_that_it_lacks(model: CLIP, things: Dataset) -> None:
    names = {0: ("clip", "se"), 2: ("se",), 3: ("tpt", "clip"), 4: ("ttl",)}
    jobs = Jobs(model, things)
    (outcome,) = jobs.worker.run([jobs.item(names)])
    answered = [(things.ids.index(row.image), row.method) for row in outcome.rows]
    assert sorted(answered) == sorted((image, name) for image, wanted in names.items() for name in wanted)
    assert sorted(things.ids.index(views.image) for views in outcome.shown) == [0, 2, 3, 4]
    assert all(len(views.views) == 4 for views in outcome.shown)
    assert (outcome.encoded, outcome.failed) == (4, [])


def test_outcomes_come_in_the_order_of_items_of_several_datasets(model: CLIP, tmp_path: Path) -> None:
    sets = [make_dataset(tmp_path / name, 3, name) for name in "ab"]
    sets[1][1].path.write_bytes(b"")
    jobs = Jobs(model, *sets, threads=3)
    items = [jobs.item({n: ("se",), (n + 1) % 3: ("clip",)}, s, d) for n in range(3) for d in "ab" for s in (0, 1)]
    outcomes = list(jobs.worker.run(iter(items)))
    assert len(outcomes) == len(items)
    for item, outcome in zip(items, outcomes, strict=True):
        ids = [image.image for image in outcome.failed] + [row.image for row in outcome.rows]
        assert sorted(ids) == sorted(image.id for image in item.images)
        assert {(row.dataset, row.seed) for row in outcome.rows} <= {(item.dataset, item.seed)}
        assert [image.reason for image in outcome.failed] == ["file is empty"] * len(outcome.failed)
    assert sum(len(outcome.failed) for outcome in outcomes) == 4
    assert list(jobs.worker.run([])) == []


def test_the_time_of_an_image_is_its_own_and_its_share_of_the_method(model: CLIP, things: Dataset) -> None:
    class Slow(Counting):
        def encode_images(self, pixels: Any) -> Any:
            if len(pixels) > 1:
                time.sleep(0.5)
            return super().encode_images(pixels)

    jobs = Jobs(Slow(model), things)
    (outcome,) = jobs.worker.run([jobs.item({0: ("clip", "se"), 1: ("clip",)})])
    seconds = {(row.image, row.method): row.seconds for row in outcome.rows}
    assert 0.5 < seconds[things.ids[0], "se"] < 10
    assert 0 < seconds[things.ids[0], "clip"] < seconds[things.ids[0], "se"], "one view of many is all that it looks at"


def test_the_views_that_are_recorded_are_the_weak_and_the_most_confident(
    model: CLIP, things: Dataset, tmp_path: Path
) -> None:
    """With one view there are no others to record; they come with a method that looks at them."""

    def shown(out: str) -> list[ShownViews]:
        with Store(tmp_path / out, create=False) as store:
            return [views for image in things if (views := store.shown_views("things", image.id, 0))]

    evaluate(model, [things], ["clip"], tmp_path / "run", replace(SETTINGS, views=1))
    alone, rows = shown("run"), {row.image: row for row in content(tmp_path / "run").rows}
    assert [[view.label for view in views.views] for views in alone] == [[rows[v.image].prediction] for v in alone]
    for method in ("clip", "use"):
        evaluate(model, [things], [method], tmp_path / "more", SETTINGS)
    for few, many in zip(alone, shown("more"), strict=True):
        assert len(many.views) == 4
        assert many.views[0].label == few.views[0].label
        assert many.views[0].entropy == pytest.approx(few.views[0].entropy, abs=1e-5)
        assert [view.entropy for view in many.views[1:]] == sorted(view.entropy for view in many.views[1:])
