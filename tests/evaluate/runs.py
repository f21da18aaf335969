"""Small runs: a model of four blocks, generated images, and what a store holds, ready to be compared."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conftest import make_image
from usetta.data.dataset import Dataset, Family
from usetta.evaluate.store import ResultRow, ShownViews, Store
from usetta.models.clip import CLIP, random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig

TWELVE = ("clip", "mta", "zero", "se", "use", "tpt", "c-tpt", "r-tpt", "rlcf", "ttl", "tps", "sts")
"""The methods of the paper."""
CLASSES = ("cat", "red fox", "old stone bridge", "tabby", "lemon")
VIEWS = 12


def four_blocks(seed: int = 0) -> CLIP:
    """A random CLIP whose image tower has one block more than TTL adapts.

    Features of a random tower share one direction, which would decide every answer: it is taken out. By one thread, so
    that processes with any number of them have the same model to the bit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    vision = ViTConfig(image_size=32, patch_size=8, width=64, layers=4, heads=1)
    text = TextConfig(width=64, layers=2, heads=1)
    model = random_model(CLIPConfig(embed_dim=32, vision=vision, text=text), name="four-blocks", seed=seed)
    pixels = torch.stack([torch.from_numpy(np.array(make_image(i, (32, 32)))) for i in range(16)]).permute(0, 3, 1, 2)
    shared = model.encode_images(pixels).mean(dim=0)
    projection = model.image_tower.projection
    assert isinstance(projection, torch.Tensor)
    projection -= torch.outer(projection @ shared, shared) / shared.dot(shared)
    torch.set_num_threads(threads)
    model.logit_scale = 60.0
    return model


def make_dataset(root: Path, images: int = 5, name: str = "things", family: Family = "other") -> Dataset:
    """Images of several sizes in a folder, with labels that go round."""
    ids = tuple(f"{i % len(CLASSES)}/image-{i}.png" for i in range(images))
    for i, image_id in enumerate(ids):
        path = root / image_id
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make_image(i, size=(40 + 3 * i % 20, 36 + 5 * i % 17)).save(path)
    labels = tuple(i % len(CLASSES) for i in range(images))
    return Dataset(name, name.title(), family, CLASSES, ids, labels, root, "generated")


def listed(dataset: Dataset, order: Iterable[int]) -> Dataset:
    """Some images of a dataset, in that order."""
    assert dataset.labels is not None
    order = list(order)
    ids, labels = (tuple(values[i] for i in order) for values in (dataset.ids, dataset.labels))
    return replace(dataset, ids=ids, labels=labels)


class Counting:
    """A model that counts views which go through its image tower."""

    def __init__(self, model: CLIP) -> None:
        self._model = model
        self.encoded = 0
        self.hidden = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_images(self, pixels: Tensor) -> Tensor:
        self.encoded += len(pixels)
        return self._model.encode_images(pixels)

    def hidden_states(self, pixels: Tensor) -> Tensor:
        self.hidden += len(pixels)
        return self._model.hidden_states(pixels)


@dataclass(frozen=True)
class Content:
    """What a run has computed, but for times, and who computed what when."""

    rows: list[ResultRow]
    seen: list[ShownViews]
    bad: list[tuple[str, str, str]]
    facts: dict[str, dict[str, Any]]


def content(out: Path) -> Content:
    with Store(out, create=False) as store:
        rows = [replace(row, seconds=0.0) for row in store.rows()]
        places = sorted({(row.dataset, row.image, row.seed) for row in rows})
        seen = [store.shown_views(*place) for place in places]
        facts = {kind: store.facts(kind) for kind in ("run", "dataset", "recipe", "classes")}
        return Content(
            rows, [views for views in seen if views], [tuple(image) for image in store.failed_images()], facts
        )


def assert_close(actual: Content, expected: Content, rounding: float = 1e-5) -> None:
    """The same answers to the same questions, up to rounding."""
    assert len(actual.rows) == len(expected.rows)
    for ours, theirs in zip(actual.rows, expected.rows, strict=True):
        numbers = {name: value for name, value in asdict(theirs).items() if isinstance(value, float)}
        assert ours.energy == pytest.approx(numbers["energy"], abs=1e-3)  # of logits, which are larger
        ours = replace(ours, energy=theirs.energy)
        assert asdict(ours) == {**asdict(theirs), **{name: getattr(ours, name) for name in numbers}}
        assert {name: getattr(ours, name) for name in numbers} == pytest.approx(numbers, abs=rounding), ours
    assert len(actual.seen) == len(expected.seen)
    for our_views, their_views in zip(actual.seen, expected.seen, strict=True):
        assert replace(our_views, views=()) == replace(their_views, views=())
        assert [view[:2] for view in our_views.views] == [view[:2] for view in their_views.views]
        entropies = [view.entropy for view in their_views.views]
        assert [view.entropy for view in our_views.views] == pytest.approx(entropies, abs=1e-4)
    assert actual.bad == expected.bad
    assert actual.facts == expected.facts


def downgrade(folder: Path) -> None:
    """Make the database of a run one of the version before, which had no streams."""
    with Store(folder) as store:
        db = store._db
        for column in ("position", "entropy", "energy"):
            db.execute(f"ALTER TABLE results DROP COLUMN {column}")
        db.execute(
            "CREATE TABLE old ("
            + db.execute("SELECT sql FROM sqlite_master WHERE name = 'results'")
            .fetchone()[0]
            .partition("(")[2]
            .replace(", order_seed INTEGER", "")
            .replace("order_seed, ", "")
        )
        names = [row[1] for row in db.execute("PRAGMA table_info(old)")]
        db.execute(f"INSERT INTO old SELECT {', '.join(names)} FROM results")
        db.execute("DROP TABLE results")
        db.execute("ALTER TABLE old RENAME TO results")
        db.execute("PRAGMA user_version = 2")
        db.commit()
