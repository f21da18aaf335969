"""Clocks that take the shortest run, processes of their own, and made-up names that cost what real ones do."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from usetta import timing
from usetta.models.clip import CLIP


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], None]]:
    """Makes work that takes the given seconds, one after the other, on a clock that stands still otherwise."""
    now = 0.0
    monkeypatch.setattr(timing, "perf_counter", lambda: now)

    def taking(*seconds: float) -> Callable[[], None]:
        durations: Iterator[float] = iter(seconds)

        def run() -> None:
            nonlocal now
            now += next(durations)

        return run

    return taking


def test_the_shortest_run_counts_without_the_one_that_warms_up(work: Callable[..., Callable[[], None]]) -> None:
    assert timing.shortest(work(1, 5, 3, 4), 3) == 3
    assert timing.shortest(work(2, 5), 2, warm_up=False) == 2


def test_ways_take_turns(work: Callable[..., Callable[[], None]]) -> None:
    assert timing.shortest_in_turns([work(1, 6, 8), work(1, 4, 3)], 2) == [6, 3]
    assert timing.speedup(work(1, 6, 8), work(1, 4, 3), 2) == 2
    turns = count()
    order: dict[str, list[int]] = {"a": [], "b": []}
    timing.shortest_in_turns([lambda: order["a"].append(next(turns)), lambda: order["b"].append(next(turns))], 2)
    assert order == {"a": [0, 2, 4], "b": [1, 3, 5]}


def test_a_process_of_its_own_returns_its_last_line_or_the_cause_of_its_failure() -> None:
    assert timing.run_alone("timeit", "-n", "1", "-r", "1", "-u", "sec", "pass")[:2] == ["1", "loop,"]
    with pytest.raises(RuntimeError, match="python -m usetta.nothing 1 failed: .*No module named usetta.nothing"):
        timing.run_alone("usetta.nothing", "1")


def test_made_up_names_have_as_many_tokens_as_those_of_imagenet(tiny_model: CLIP) -> None:
    names = timing.class_names(1000)
    assert len(set(names)) == 1000
    assert names[:100] == timing.class_names(100)
    tokens = (tiny_model.text.tokenize(names[:100]) != 0).sum(dim=1) - 2  # without start and end
    # 30, 54, 11, … in ImageNet: three one-word names were taken already, and got a second word.
    assert Counter(tokens.tolist()) == {1: 27, 2: 57, 3: 11, 4: 3, 5: 1, 7: 1}


def test_a_generated_image_has_detail_at_every_scale() -> None:
    image = timing.generated_image(0, (50, 40))
    assert image.size == (50, 40)
    assert timing.generated_image(0, (50, 40)).tobytes() == image.tobytes()
    assert timing.generated_image(1, (50, 40)).tobytes() != image.tobytes()
    assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) > 1000
    assert len(timing.generated_jpeg(0)) > 20_000
