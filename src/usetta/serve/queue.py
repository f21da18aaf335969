"""Where images wait: for room to be cut into views, and then for the model."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Condition

from usetta.serve.worker import Job


class ViewBudget:
    """Space for a number of views, given in the order it was asked for. For one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, views: int) -> AsyncIterator[None]:
        """Wait until there is space; an image with more views than there is space at all comes alone."""
        async with self._turn:  # whoever holds it is first in line, so that small images do not overtake for ever
            while self._used and self._used + views > self._size:
                self._freed.clear()
                await self._freed.wait()
            self._used += views
        try:
            yield
        finally:
            self._used -= views
            self._freed.set()


class JobQueue:
    """Jobs that are ready for the model, first come first served. Any thread may put, one takes."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Let `take` return nothing once all jobs are taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, views: int) -> list[Job]:
        """Wait for a job and return it with those behind it, up to so many `views`; without those given up.

        Nothing is returned when the line is closed and empty.
        """
        taken: list[Job] = []
        with self._changed:
            while not taken:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return []
                room = views
                while self._jobs and (not taken or len(self._jobs[0].pixels) <= room):
                    job = self._jobs.popleft()
                    if job.answer.set_running_or_notify_cancel():  # false if the caller has gone
                        taken.append(job)
                        room -= len(job.pixels)
        return taken
