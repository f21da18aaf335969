"""The contract of an engine, and the engine that is this process.

An engine takes a stream of work items and returns a stream of results. An item may be computed more than once, when a
worker dies and is replaced, but its result is returned exactly once. Results come in any order, so whoever stores them
does it by key. The number of items in progress is bounded, so the stream may be endless.
"""

import socket
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from usetta.models import Model, ModelError


class EngineError(OSError):
    """Workers cannot be started, or do not stay alive; the message says why."""


class Work(Protocol):
    """A work item. It is sent to other machines, so it is small and can be pickled."""

    @property
    def key(self) -> Hashable:
        """Identifies the item; unique within a run."""
        ...

    def parts(self) -> Sequence[Self]:
        """The same work as smaller items, or as itself. An item that killed its worker is retried in parts."""
        ...


@dataclass(frozen=True)
class Failed:
    """In place of a result: the item killed its worker every time it was tried."""

    reason: str


Item = TypeVar("Item", bound=Work)
Result = TypeVar("Result")
Item_contra = TypeVar("Item_contra", bound=Work, contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class Worker(Protocol[Item_contra, Result_co]):
    """Computes results, with everything that is loaded only once."""

    def run(self, items: Iterable[Item_contra]) -> Generator[Result_co, None, None]:
        """The results of the items, in order. A worker may read items ahead of the results it has returned.

        It is called again when `items` ended because there was no work for a while.
        """
        ...


class Engine(Protocol):
    """A place where work is done."""

    def run(
        self, make_worker: Callable[[], Worker[Item, Result]], items: Iterable[Item]
    ) -> Generator[tuple[Item, Result | Failed], None, None]:
        """Every item with its result, in any order; an item that was retried in parts comes back as its parts.

        `make_worker` is called once per worker, in the worker's process, so it is pickled and should hold names
        rather than models. An exception raised by a worker ends the run.
        """
        ...


def has_gpus(engine: Engine | None) -> bool:
    """Whether the workers of an engine have GPUs of their own."""
    return getattr(engine, "gpus", 0) > 0


class LocalEngine:
    """Works in this process, in order. No item ever fails here: whatever kills the worker kills this process."""

    def run(
        self, make_worker: Callable[[], Worker[Item, Result]], items: Iterable[Item]
    ) -> Generator[tuple[Item, Result | Failed], None, None]:
        """Every item with its result, in order."""
        in_progress: deque[Item] = deque()

        def recorded() -> Iterator[Item]:
            # The worker may be several items ahead of its results, so remember which item the next result is for.
            for item in items:
                in_progress.append(item)
                yield item

        with closing(make_worker().run(recorded())) as results:
            for result in results:
                yield in_progress.popleft(), result


@dataclass(frozen=True)
class VerifiedLoader:
    """Loads a model in a worker and checks that it is the driver's.

    The weights are not sent, only how to load them. But a name may stand for different weights on different machines
    (`auto` is whatever is available), and the answers of two models must never be mixed silently.
    """

    load: Callable[[], Model]
    """It is pickled, so it is a module-level function or a `partial` of one."""
    fingerprint: str

    def __call__(self) -> Model:
        model = self.load()
        if model.fingerprint != self.fingerprint:
            raise ModelError(
                f"the worker on {socket.gethostname()} loaded a different model ({model.name}) from the driver's; "
                "give the model by a name or a path that means the same on all machines"
            )
        return model
