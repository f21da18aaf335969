"""The engine that is this process: in order, lazily, and errors as they are."""

from collections.abc import Iterator

import pytest

from distributed.workers import Numbers, Squares
from usetta.distributed import LocalEngine


def works(count: int, taken: list[int]) -> Iterator[Numbers]:
    for number in range(count):
        taken.append(number)
        yield Numbers((number, number + 1))


def test_results_come_in_order_with_their_work() -> None:
    found = list(LocalEngine().run(Squares, works(5, [])))
    assert found == [(Numbers((n, n + 1)), [n**2, (n + 1) ** 2]) for n in range(5)]
    assert list(LocalEngine().run(Squares, [])) == []


def test_the_stream_is_read_no_further_than_the_hand_looks() -> None:
    taken: list[int] = []
    results = LocalEngine().run(Squares, works(10**9, taken))
    for number in range(5):
        assert next(results)[1][0] == number**2
        assert len(taken) == number + 2
    results.close()


def test_an_error_of_the_hand_ends_the_run() -> None:
    results = LocalEngine().run(lambda: Squares(wrong=5), works(9, []))
    assert [next(results)[1] for _ in range(3)] == [[0, 1], [1, 4], [4, 9]]
    with pytest.raises(ValueError, match="5 cannot be squared"):
        next(results)
