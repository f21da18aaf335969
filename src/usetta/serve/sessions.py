"""What streams have learned, as many as fit into a number of memories and of bytes. For one event loop.

A memory belongs to a session, a method with its settings, a model and a class list; with keys also to the key, so that
nobody guesses the session of somebody else. Images of one session are answered one after the other, in the order in
which they came. A memory counts with the most it may ever take, known before it exists, so what is kept never outgrows
its bounds: the memory that was not used for longest makes room, and one that is in use is never taken away.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from usetta.methods.recipe import Recipe
from usetta.serve.prompt_cache import PromptKey
from usetta.serve.schemas import ApiError
from usetta.stream_memory import StreamMemory


@dataclass(frozen=True)
class SessionKey:
    """What a memory belongs to."""

    name: str
    owner: str
    """The key that the session came with; empty on a server without keys, where whoever knows the name shares it."""
    prompts: PromptKey
    recipe: Recipe


@dataclass(eq=False)
class SessionTurn:
    """An image's turn with the memory of its session."""

    memory: StreamMemory
    job: Future[Any] | None = None
    """What the model thread does with it; the turn ends only when this is done, even if nobody waits for it."""


@dataclass(eq=False)
class _Session:
    memory: StreamMemory
    nbytes: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Fair: who waits longest is next."""
    users: int = 0
    """Images that are being answered or wait for their turn."""
    expiry: asyncio.TimerHandle | None = None


class SessionCache:
    """Memories of streams by their key, most recently used last."""

    def __init__(self, most: int, nbytes: int, seconds: float, observe: Callable[[int], object]) -> None:
        """`most` memories of `nbytes` in all; `observe` gets their number whenever it changes."""
        self._most = most
        self._nbytes = nbytes
        self._seconds = seconds
        self._observe = observe
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    @asynccontextmanager
    async def turn(
        self, key: SessionKey, nbytes: float, make: Callable[[], StreamMemory]
    ) -> AsyncIterator[SessionTurn]:
        """Wait until all earlier images of the session are answered; `make` makes a memory where there is none."""
        session = await self._acquire(key, nbytes, make)
        turn = SessionTurn(session.memory)
        try:
            yield turn
        finally:
            if turn.job is None or turn.job.done():
                self._release(key, session)
            else:  # the caller is gone, and the model thread has not noticed yet
                loop = asyncio.get_running_loop()

                def release(_job: Future[Any]) -> None:
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(self._release, key, session)

                turn.job.add_done_callback(release)

    def forget(self, name: str, owner: str) -> int:
        """Forget all that a session has learned; returns how many memories it had."""
        keys = [key for key in self._sessions if (key.name, key.owner) == (name, owner)]
        for key in keys:
            self._drop(key)
        return len(keys)

    async def _acquire(self, key: SessionKey, nbytes: float, make: Callable[[], StreamMemory]) -> _Session:
        while True:
            session = self._sessions.get(key) or self._add(key, nbytes, make)
            self._sessions.move_to_end(key)
            if session.expiry is not None:
                session.expiry.cancel()
            session.users += 1
            try:
                await session.lock.acquire()
            except BaseException:
                self._leave(key, session)
                raise
            if self._sessions.get(key) is session:
                return session
            self._release(key, session)  # it was forgotten meanwhile

    def _add(self, key: SessionKey, nbytes: float, make: Callable[[], StreamMemory]) -> _Session:
        in_use = [session for session in self._sessions.values() if session.users]
        if not self._has_room(in_use, nbytes):
            message = "too many sessions are in use; try again later"
            raise ApiError(503, "sessions_full", message, headers={"retry-after": "5"})
        for other in [other for other, session in self._sessions.items() if not session.users]:
            if self._has_room(self._sessions.values(), nbytes):
                break
            self._drop(other)
        session = self._sessions[key] = _Session(make(), nbytes)
        self._observe(len(self._sessions))
        return session

    def _has_room(self, beside: Collection[_Session], nbytes: float) -> bool:
        return len(beside) < self._most and sum(session.nbytes for session in beside) + nbytes <= self._nbytes

    def _release(self, key: SessionKey, session: _Session) -> None:
        session.lock.release()
        self._leave(key, session)

    def _leave(self, key: SessionKey, session: _Session) -> None:
        session.users -= 1
        if not session.users and self._sessions.get(key) is session:
            session.expiry = asyncio.get_running_loop().call_later(self._seconds, self._drop, key)

    def _drop(self, key: SessionKey) -> None:
        session = self._sessions.pop(key)
        if session.expiry is not None:
            session.expiry.cancel()
        self._observe(len(self._sessions))
