"""What an engine is: pieces of work go in as a stream, what became of them comes out as a stream.

Work may be done more than once, by workers that die and are replaced, but its result is given once. Results come in any
order, so whoever writes them down does so by key. How much work is under way is bounded, so the stream may be endless.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar


class EngineError(OSError):
    """Workers cannot be had, or do not stay alive; the message says why."""


class Work(Protocol):
    """A piece of work. It travels to other machines, so it is small and can be pickled."""

    @property
    def key(self) -> Hashable:
        """What it is known by; no other piece of the stream has the same."""
        ...

    def parts(self) -> Sequence[Self]:
        """Smaller pieces that make up the same work, or itself alone. What ended a worker is tried again in parts."""
        ...


@dataclass(frozen=True)
class Failed:
    """In place of a result: the work ended its worker each time it was tried."""

    reason: str


Given = TypeVar("Given", bound=Work)
Found = TypeVar("Found")
Given_contra = TypeVar("Given_contra", bound=Work, contravariant=True)
Found_co = TypeVar("Found_co", covariant=True)


class Worker(Protocol[Given_contra, Found_co]):
    """What does the work, with everything that is loaded once."""

    def run(self, works: Iterable[Given_contra]) -> Generator[Found_co, None, None]:
        """The results of pieces of work, in order. It may take pieces before it has given the results of others.

        It is called again where the work ran out for a while.
        """
        ...


class Engine(Protocol):
    """A place where work is done."""

    def run(
        self, make_worker: Callable[[], Worker[Given, Found]], works: Iterable[Given]
    ) -> Generator[tuple[Given, Found | Failed], None, None]:
        """What became of each piece of work, in any order.

        `make_worker` is called once per worker, where the worker is, so it is pickled and should hold names, not models. A
        piece that is done in parts comes back as its parts. Errors that a hand raises end the run.
        """
        ...
