"""Fixtures of the data tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data import world
from data.server import Shelf, serve
from usetta.data import layouts
from usetta.data.named import DATASETS


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serve() as running:
        yield running


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between connections, which are noted instead of waited for."""
    slept: list[float] = []
    monkeypatch.setattr("usetta.data.download.time.sleep", slept.append)
    return slept


@pytest.fixture
def stocked(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    pytest.importorskip("pyarrow", reason="mirrors in Parquet need it")
    known, classes = dict(DATASETS._values), layouts.imagenet_classes
    for name, value in (world.point_to(shelf.url) | {"USETTA_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_TOKEN", world.TOKEN)
    world.register_small(shelf.url)
    world.stock(shelf)
    yield shelf
    DATASETS._values.clear()
    DATASETS._values.update(known)
    layouts.imagenet_classes = classes
