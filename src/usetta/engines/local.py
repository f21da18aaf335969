"""The engine that is this process."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing

from usetta.engines.base import Found, Given, Hand, Lost


class ThisProcess:
    """Does the work here, in order. Nothing is lost: what ends the worker ends this process."""

    def run(
        self, hire: Callable[[], Hand[Given, Found]], works: Iterable[Given]
    ) -> Generator[tuple[Given, Found | Lost], None, None]:
        """What became of each piece of work, in order."""
        taken: deque[Given] = deque()

        def remembered() -> Iterator[Given]:
            for work in works:
                taken.append(work)
                yield work

        with closing(hire().run(remembered())) as results:
            for found in results:
                yield taken.popleft(), found
