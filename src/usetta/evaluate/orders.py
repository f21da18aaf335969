"""Tasks as they travel to where work is done: names and numbers, a few hundred bytes.

An order becomes a task where prompts and their graphs are, in the hand of an engine. It brings the ids and labels of
its own images, so that nobody but the driver needs the list of a dataset.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from usetta.evaluate.worker import EvalWorker, Outcome, Subject, Task


class Asked(NamedTuple):
    """An image and the methods whose answers are wanted."""

    id: str
    label: int
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """A task as it travels."""

    dataset: str
    seed: int
    images: tuple[Asked, ...]

    @property
    def key(self) -> tuple[str, int, tuple[str, ...]]:
        """No two orders of a run have an image under the same seed in common."""
        return self.dataset, self.seed, tuple(each.id for each in self.images)

    def parts(self) -> list[Self]:
        """Its images, one by one."""
        return [replace(self, images=(each,)) for each in self.images]


class OrderHand:
    """Does orders by a worker. It keeps the subject of one dataset, which is a gigabyte if its prompts are tuned."""

    def __init__(self, worker: EvalWorker, find: Callable[[str], Subject]) -> None:
        self._worker = worker
        self._find = find
        self._subject: Subject | None = None

    def run(self, orders: Iterable[Order]) -> Generator[Outcome, None, None]:
        """The outcomes of orders, in order."""
        return self._worker.run(map(self._task, orders))

    def _task(self, order: Order) -> Task:
        if self._subject is None or self._subject.dataset.name != order.dataset:
            self._subject = None  # before the next one is made
            self._subject = self._find(order.dataset)
        ids, labels, methods = zip(*order.images, strict=True)
        dataset = replace(self._subject.dataset, ids=ids, labels=labels)
        return Task(replace(self._subject, dataset=dataset), order.seed, dict(enumerate(methods)))
