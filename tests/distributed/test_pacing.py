"""Work items hold as many images as come back within seconds."""

from types import SimpleNamespace

import pytest

from usetta.distributed import Pace, pacing


def test_the_number_of_images_follows_the_time_that_items_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: now))
    pace, sizes = Pace(8), []
    for seconds in (0.1, 0.1, 3.0, 0.1, 0.1, 5.1, 2.0, 60.0, 60.0, 60.0, 60.0, 0.1):
        pace.sent("item")
        now += seconds
        pace.returned("item")
        sizes.append(pace.images)
    assert sizes == [2, 4, 4, 8, 8, 4, 4, 2, 1, 1, 1, 2]
    pace.returned("a part of an item")
    assert pace.images == 2


def test_a_fixed_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=lambda: now))
    pace = Pace(8, fixed=True)
    for seconds in (0.0, 100.0):
        pace.sent("item")
        now += seconds
        pace.returned("item")
        assert pace.images == 8


def test_pieces_are_as_large_as_is_right_when_they_are_taken() -> None:
    pace, pieces = Pace(4), []
    for piece in pace.pieces(range(12)):
        pieces.append([*piece])
        pace.images = min(4, 2 * pace.images)
    assert pieces == [[0], [1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11]]
