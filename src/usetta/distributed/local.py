"""The engine that is this process."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing

from usetta.distributed.base import Failed, Found, Given, Worker


class LocalEngine:
    """Does the work here, in order. Nothing is lost: what ends the worker ends this process."""

    def run(
        self, make_worker: Callable[[], Worker[Given, Found]], works: Iterable[Given]
    ) -> Generator[tuple[Given, Found | Failed], None, None]:
        """What became of each piece of work, in order."""
        taken: deque[Given] = deque()

        def remembered() -> Iterator[Given]:
            for work in works:
                taken.append(work)
                yield work

        with closing(make_worker().run(remembered())) as results:
            for found in results:
                yield taken.popleft(), found
