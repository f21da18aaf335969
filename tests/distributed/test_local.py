"""The engine that is this process, the check of a worker's model, and what `eval` does with an item that failed."""

from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.workers import Numbers, SquareWorker
from evaluate.runs import content, four_blocks, make_dataset
from usetta.distributed import Failed, LocalEngine, VerifiedLoader
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.models import ModelError
from usetta.models.clip import CLIP


def stream(count: int, read: list[int]) -> Iterator[Numbers]:
    for number in range(count):
        read.append(number)
        yield Numbers((number, number + 1))


def test_results_come_in_order_with_their_items() -> None:
    results = list(LocalEngine().run(SquareWorker, stream(5, [])))
    assert results == [(Numbers((n, n + 1)), [n**2, (n + 1) ** 2]) for n in range(5)]
    assert list(LocalEngine().run(SquareWorker, [])) == []


def test_the_stream_is_read_no_further_than_the_worker_reads_ahead() -> None:
    read: list[int] = []
    results = LocalEngine().run(SquareWorker, stream(10**9, read))
    for number in range(5):
        _, squares = next(results)
        assert isinstance(squares, list)
        assert squares[0] == number**2
        assert len(read) == number + 2
    results.close()


def test_an_exception_of_the_worker_ends_the_run() -> None:
    results = LocalEngine().run(lambda: SquareWorker(invalid=5), stream(9, []))
    assert [next(results)[1] for _ in range(3)] == [[0, 1], [1, 4], [4, 9]]
    with pytest.raises(ValueError, match="5 cannot be squared"):
        next(results)


def test_a_worker_with_another_model_is_refused(tiny_model: CLIP) -> None:
    assert VerifiedLoader(lambda: tiny_model, tiny_model.fingerprint)() is tiny_model
    with pytest.raises(ModelError, match=r"loaded a different model \(tiny-random\) from the driver's"):
        VerifiedLoader(lambda: tiny_model, "another")()


class UnreliableEngine:
    """Retries everything in parts, and reports one image as failed."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def run(self, make_worker: Callable[[], Any], items: Iterable[Any]) -> Generator[tuple[Any, Any], None, None]:
        parts = [part for item in items for part in item.parts()]
        for part, result in LocalEngine().run(make_worker, parts):
            yield part, Failed("killed its worker") if self._fails in str(part.key) else result


def test_an_evaluation_reports_an_image_that_failed_and_tries_it_again_next_time(tmp_path: Path) -> None:
    dataset, model = make_dataset(tmp_path / "images", 4), four_blocks()
    options: dict[str, Any] = {"settings": EvalSettings(views=6), "batch_size": 2}
    evaluate(model, [dataset], ("clip", "se"), tmp_path / "local", **options)
    engine = UnreliableEngine(dataset.ids[2])
    done = evaluate(model, [dataset], ("clip", "se"), tmp_path / "run", engine=engine, load=lambda: model, **options)
    assert (done.images, done.rows, done.failed) == (4, 3 * 2, 1)
    assert content(tmp_path / "run").bad == [("things", dataset.ids[2], "killed its worker")]
    again = evaluate(model, [dataset], ("clip", "se"), tmp_path / "run", **options)
    assert (again.images, again.rows, again.failed) == (1, 2, 0)
    answers = [
        [(row.image, row.method, row.prediction) for row in content(tmp_path / name).rows] for name in ("run", "local")
    ]
    assert answers[0] == answers[1]
