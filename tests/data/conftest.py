"""Fixtures of the data tests."""

from collections.abc import Iterator

import pytest

from data.server import Shelf, serve


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
