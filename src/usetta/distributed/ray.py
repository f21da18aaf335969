"""The engine that is a Ray cluster. Ray places workers, carries work and results, and tells who died.

A worker is an actor with a hand of its own. It has at most `AHEAD` pieces at a time, so the stream is read as fast as
it is worked off and no faster. What a worker had when it died is suspect: it is cut into parts, and each part is tried
alone on a worker that has nothing else, so that one image cannot take others with it. A new worker takes the place of
the dead one, or waits until there is room for it.

A piece is open from when it is handed out until its result is taken. Only results of open pieces count, so no result is
given twice, and nothing needs to be remembered of those that are done.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, Generic

from usetta.distributed.base import EngineError, Failed, Found, Given, Worker
from usetta.distributed.connection import connected

AHEAD = 2
"""Pieces that a worker has at a time: one to work on, and one so that it need not wait for the next."""
TRIES = 3
"""Times that a piece may end its worker, the first time among others, then alone."""
_PATIENCE = 900
"""Seconds to wait for the first worker, or for another when all have died: machines may have to be started."""


@dataclass(frozen=True)
class RayEngine:
    """Workers on a Ray cluster."""

    address: str = "auto"
    """`auto`: the cluster that this machine belongs to; `local`: this machine alone, for this run; or host:port."""
    workers: int | None = None
    """By default as many as there is room for."""
    cpus: float = 1
    """Of a worker, and threads of its arithmetic."""
    gpus: float = 0
    """Of a worker; several may share one."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"there must be at least one worker, not {self.workers}")
        if self.cpus <= 0 or self.gpus < 0:
            raise ValueError(
                f"a worker needs more than 0 CPUs and no fewer than 0 GPUs, not {self.cpus} and {self.gpus}"
            )

    def run(
        self, make_worker: Callable[[], Worker[Given, Found]], works: Iterable[Given]
    ) -> Generator[tuple[Given, Found | Failed], None, None]:
        """What became of each piece of work, as it is known."""
        source = iter(works)
        for first in source:  # where there is nothing to do, no worker is needed
            with connected(self.address) as ray:
                crew: _ActorPool[Given, Found] = _ActorPool(ray, self, make_worker)
                try:
                    yield from crew.work(chain([first], source))
                finally:
                    crew.dismiss()


class _Actor(Generic[Given, Found]):
    """A worker, where it works. Its hand runs in a thread, so that it sees the next piece while it does this one."""

    def start(self, make_worker: Callable[[], Worker[Given, Found]], threads: int) -> None:
        """Load everything; apart from making the actor, so that an error comes back as itself."""
        import torch

        torch.set_num_threads(threads)
        hand = make_worker()
        self._queue: SimpleQueue[tuple[Given, Future[Found]]] = SimpleQueue()
        threading.Thread(target=self._serve, args=(hand,), daemon=True).start()

    def do(self, work: Given) -> Found:
        done: Future[Found] = Future()
        self._queue.put((work, done))
        return done.result()

    def _serve(self, hand: Worker[Given, Found]) -> None:
        while True:
            taken: deque[Future[Found]] = deque()
            try:
                for found in hand.run(self._waiting(taken)):
                    taken.popleft().set_result(found)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                for each in taken:
                    each.set_exception(error)

    def _waiting(self, taken: deque[Future[Found]]) -> Iterator[Given]:
        """Pieces until there is none: then the hand shall finish what it has rather than wait for more."""
        work, done = self._queue.get()
        while True:
            taken.append(done)
            yield work
            try:
                work, done = self._queue.get_nowait()
            except Empty:
                return


@dataclass(eq=False)
class _Piece(Generic[Given]):
    """Work that was handed out."""

    work: Given
    deaths: int = 0
    """Workers that died while they had it."""


@dataclass(eq=False)
class _ActorHandle(Generic[Given]):
    """A worker, as the driver sees it."""

    actor: Any
    ready: bool = False
    has: dict[Hashable, _Piece[Given]] = field(default_factory=dict)
    """Its open pieces by key."""

    @property
    def room(self) -> int:
        """Pieces that it can take; none while it is starting or tries a suspect."""
        return AHEAD - len(self.has) if self.ready and not any(each.deaths for each in self.has.values()) else 0


class _ActorPool(Generic[Given, Found]):
    """The workers of a run and what they have."""

    def __init__(self, ray: Any, wanted: RayEngine, make_worker: Callable[[], Worker[Given, Found]]) -> None:
        self._ray = ray
        self._wanted = wanted
        self._make_worker = ray.put(make_worker)
        self._make = ray.remote(_Actor).options(
            num_cpus=wanted.cpus, num_gpus=wanted.gpus, max_concurrency=AHEAD, scheduling_strategy="SPREAD"
        )
        self._workers: list[_ActorHandle[Given]] = []
        self._calls: dict[Any, tuple[_ActorHandle[Given], _Piece[Given] | None]] = {}
        """What Ray was asked for and has not answered: pieces of work, or None for the start of a worker."""
        self._suspects: deque[_Piece[Given]] = deque()
        self._failed_starts = 0
        """Workers in a row that died while they started."""
        for _ in range(wanted.workers or _room(ray.nodes(), wanted)):
            self._start()

    def work(self, source: Iterator[Given]) -> Generator[tuple[Given, Found | Failed], None, None]:
        while self._hand_out(source) or self._suspects or any(worker.has for worker in self._workers):
            for call in self._answered():
                if call not in self._calls:  # of a worker that has just been found dead
                    continue
                worker, piece = self._calls.pop(call)
                try:
                    found = self._ray.get(call)
                except self._ray.exceptions.RayTaskError as error:
                    raise _cause(error) from error
                except self._ray.exceptions.RayError as error:
                    yield from self._replace(worker, piece, error)
                    continue
                if piece is None:
                    worker.ready, self._failed_starts = True, 0
                elif worker.has.pop(piece.work.key, None):
                    yield piece.work, found

    def dismiss(self) -> None:
        """End all workers."""
        for worker in self._workers:
            self._kill(worker)

    def _start(self) -> None:
        worker: _ActorHandle[Given] = _ActorHandle(self._make.remote())
        self._workers.append(worker)
        threads = max(1, int(self._wanted.cpus))
        self._calls[worker.actor.start.remote(self._make_worker, threads)] = worker, None

    def _hand_out(self, source: Iterator[Given]) -> bool:
        """Give workers as much as they can take; False if the source has no more."""
        for worker in self._workers:
            if self._suspects and worker.room == AHEAD:
                self._give(worker, self._suspects.popleft())
        if self._suspects:  # a worker must be without work to try one alone, so nobody gets more
            return True
        for least in range(AHEAD, 0, -1):  # to everyone the first piece before to anyone the second
            for worker in self._workers:
                if worker.room >= least:
                    for work in source:
                        self._give(worker, _Piece(work))
                        break
                    else:
                        return False
        return True

    def _give(self, worker: _ActorHandle[Given], piece: _Piece[Given]) -> None:
        worker.has[piece.work.key] = piece
        self._calls[worker.actor.do.remote(piece.work)] = worker, piece

    def _answered(self) -> list[Any]:
        """Calls that are done, at least one; an error if there is nobody who could do any."""
        begin, calls = time.monotonic(), list(self._calls)
        while not (done := self._ray.wait(calls, num_returns=1, timeout=10)[0]):
            if time.monotonic() - begin > _PATIENCE and not any(worker.ready for worker in self._workers):
                asked, there = f"{self._wanted.cpus:g} CPU, {self._wanted.gpus:g} GPU", self._ray.cluster_resources()
                free = f"{there.get('CPU', 0):g} CPU, {there.get('GPU', 0):g} GPU"
                raise EngineError(
                    f"no worker has started: each asks for {asked}, and all machines together have {free}"
                )
        more: list[Any] = self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        return more or list(done)

    def _replace(
        self, worker: _ActorHandle[Given], piece: _Piece[Given] | None, error: Exception
    ) -> Iterator[tuple[Given, Failed]]:
        """Let another worker take the place of a dead one, and cut up what it had."""
        why = type(error).__name__
        if piece is None and not worker.ready:
            self._failed_starts += 1
            if self._failed_starts == TRIES:
                raise EngineError(
                    f"{TRIES} workers in a row died while they loaded the model ({why}); is there memory?"
                )
        self._workers.remove(worker)
        self._kill(worker)
        self._calls = {call: about for call, about in self._calls.items() if about[0] is not worker}
        self._start()
        for had in worker.has.values():
            for part in had.work.parts():
                if had.deaths + 1 == TRIES:
                    yield part, Failed(f"ended its worker each of {TRIES} times that it was tried ({why})")
                else:
                    self._suspects.append(_Piece(part, had.deaths + 1))

    def _kill(self, worker: _ActorHandle[Given]) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(worker.actor, no_restart=True)


def _room(nodes: Iterable[dict[str, Any]], wanted: RayEngine) -> int:
    """Workers that fit on the machines of a cluster, at least one."""
    found = 0
    for node in nodes:
        if node["Alive"]:
            there = node["Resources"]
            by_cpu, by_gpu = there.get("CPU", 0) / wanted.cpus, there.get("GPU", 0) / (wanted.gpus or 1)
            found += int(min(by_cpu, by_gpu) if wanted.gpus else by_cpu)
    return max(1, found)


def _cause(error: Any) -> Exception:
    """What a hand raised, without Ray's wrapping; or that work did not even reach it."""
    cause = error.cause
    if isinstance(cause, Exception) and not type(cause).__module__.startswith("ray."):
        return cause
    told = str(cause or error).strip().splitlines()[0]
    return EngineError(f"a worker does not understand its work ({told}); have all machines the same versions?")
