"""The engine that runs workers on a Ray cluster.

A worker is an actor. It has at most `ITEMS_PER_ACTOR` items at a time, so the stream of items is read only as fast as
it is worked off. The items that an actor had when it died are suspects: each is cut into its parts, and every part is
retried alone on an otherwise idle actor, so that one bad image cannot take others down with it. An actor that hangs is
no different from a dead one: its process leaves `beat` unanswered, or answers that its worker has not taken a step for
too long, and is killed and replaced. An item is open from when it is assigned until its result is taken, and only
results of open items count: so no result is returned twice, and nothing is kept about items that are done.

Why not Ray Data or `ray.util.ActorPool` (both tried, Ray 2.60): Ray Data retries an item that kills its actor for ever;
with `max_errored_blocks` it drops the block, healthy images included, without reporting which. Isolating items takes
one block for each, at many times the cost per item, and the source has to run in a read task instead of the driver. The
iterator of `ActorPool` reads its whole input first and ends at the first dead actor. Actors with `max_restarts` come
back, but fail the items sent meanwhile too, so which item killed one must be worked out here in any case.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, Generic

from usetta.cancellation import checked_by
from usetta.distributed.local import EngineError, Failed, Item, Result, Worker

ITEMS_PER_ACTOR = 2
"""One to work on, and one so that the actor does not wait for the next."""
MAX_TRIES = 3
"""Times that an item may kill its worker: the first time possibly among others, then alone."""
START_TIMEOUT = 900
"""Seconds to wait for the first worker, or for another one when all have died: machines may have to boot first."""

BEAT_SECONDS = 10.0
"""How often an actor is asked whether it is alive."""
SILENCE_TIMEOUT = 180.0
"""Seconds without an answer after which an actor counts as hanging: loading and swapping may hold a process up long."""
STALL_TIMEOUT = 1800.0
"""Seconds without a step (see `cancellation`) after which its worker does: the texts of a large class list, or files
from a slow disk, may take minutes."""


@dataclass(frozen=True)
class RayEngine:
    """Workers on a Ray cluster."""

    address: str = "auto"
    """`auto`: the cluster that this machine belongs to; `local`: this machine alone, for this run; or host:port."""
    workers: int | None = None
    """By default as many as the cluster can hold."""
    cpus: float = 1
    """Per worker; also the number of threads it computes with."""
    gpus: float = 0
    """Per worker; several workers may share one."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"there must be at least one worker, not {self.workers}")
        if self.cpus <= 0 or self.gpus < 0:
            raise ValueError(f"a worker needs more than 0 CPUs and at least 0 GPUs, not {self.cpus} and {self.gpus}")

    def run(
        self, make_worker: Callable[[], Worker[Item, Result]], items: Iterable[Item]
    ) -> Generator[tuple[Item, Result | Failed], None, None]:
        """Every item with its result, as soon as it is known."""
        source = iter(items)
        for first in source:  # with nothing to do, no cluster is needed
            with connected(self.address) as ray:
                pool: ActorPool[Item, Result] = ActorPool(ray, self, make_worker)
                try:
                    yield from pool.run(chain([first], source))
                finally:
                    pool.close()


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected for the time of the block. A connection that the caller already has is used and kept."""
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ValueError(f"the engine 'ray' needs Ray: pip install 'usetta[cluster]' ({error})") from None
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    elif address != "auto":
        _check_reachable(address)
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error.__cause__, getattr(ray.exceptions, "AuthenticationError", ())):  # unknown to older versions
            reason += "; it requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH if it is not in ~/.ray"
        raise EngineError(f"cannot connect to a Ray cluster at {address!r}: {reason}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


class WorkerActor(Generic[Item, Result]):
    """The actor. Its worker runs in a thread, so that it can read the next item while it computes this one."""

    def start(self, make_worker: Callable[[], Worker[Item, Result]], threads: int) -> None:
        """Load everything. Not in the constructor: Ray would report an exception there only as a dead actor."""
        import torch

        torch.set_num_threads(threads)
        worker = make_worker()
        self._moved: float | None = None
        self._queue: SimpleQueue[tuple[Item, Future[Result]]] = SimpleQueue()
        threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def beat(self) -> float:
        """Seconds since the worker has taken a step, 0 if it has no work. Ray calls this in a thread of its own."""
        moved = self._moved
        return 0.0 if moved is None else time.monotonic() - moved

    def process(self, item: Item) -> Result:
        """The result of an item; Ray calls this in `ITEMS_PER_ACTOR` threads."""
        future: Future[Result] = Future()
        self._queue.put((item, future))
        return future.result()

    def _step(self) -> None:
        self._moved = time.monotonic()

    def _serve(self, worker: Worker[Item, Result]) -> None:
        while True:
            in_progress: deque[Future[Result]] = deque()
            try:
                with checked_by(self._step):
                    for result in worker.run(self._queued_items(in_progress)):
                        in_progress.popleft().set_result(result)
                        self._step()
            except Exception as error:  # noqa: BLE001 - whatever it is, the driver gets it
                for future in in_progress:
                    future.set_exception(error)

    def _queued_items(self, in_progress: deque[Future[Result]]) -> Iterator[Item]:
        """Items until the queue is empty: then the worker should finish what it has rather than wait for more."""
        self._moved = None
        item, future = self._queue.get()
        while True:
            self._step()
            in_progress.append(future)
            yield item
            try:
                item, future = self._queue.get_nowait()
            except Empty:
                return


@dataclass(eq=False)
class Assignment(Generic[Item]):
    """An item that was given to an actor, or waits to be retried."""

    item: Item
    deaths: int = 0
    """Actors that died while they had it."""


@dataclass(eq=False)
class ActorHandle(Generic[Item]):
    """An actor as the driver sees it."""

    actor: Any
    ready: bool = False
    open: dict[Hashable, Assignment[Item]] = field(default_factory=dict)
    """Its items without a result, by key."""
    beat: Any = None
    """The last question whether it is alive."""
    asked: float = 0.0
    """When that was, by the monotonic clock."""

    @property
    def capacity(self) -> int:
        """Items it can take now; none while it starts or retries a suspect."""
        if not self.ready or any(assignment.deaths for assignment in self.open.values()):
            return 0
        return ITEMS_PER_ACTOR - len(self.open)


class ActorPool(Generic[Item, Result]):
    """The actors of a run and the items they have."""

    def __init__(self, ray: Any, engine: RayEngine, make_worker: Callable[[], Worker[Item, Result]]) -> None:
        self._ray = ray
        self._engine = engine
        self._make_worker = ray.put(make_worker)
        self._actor_class = ray.remote(WorkerActor).options(
            num_cpus=engine.cpus,
            num_gpus=engine.gpus,
            max_concurrency=ITEMS_PER_ACTOR + 1,  # one thread for `beat`
            scheduling_strategy="SPREAD",
        )
        self._handles: list[ActorHandle[Item]] = []
        self._calls: dict[Any, tuple[ActorHandle[Item], Assignment[Item] | None]] = {}
        """Calls to actors that Ray has not answered yet; without an assignment it is the call to `start`."""
        self._suspects: deque[Assignment[Item]] = deque()
        self._failed_starts = 0
        """Actors in a row that died while they started."""
        for _ in range(engine.workers or worker_count(ray.nodes(), engine)):
            self._start_actor()

    def run(self, source: Iterator[Item]) -> Generator[tuple[Item, Result | Failed], None, None]:
        """Every item of the source with its result, as soon as it is known."""
        while self._assign(source) or self._suspects or any(handle.open for handle in self._handles):
            for call in self._finished_calls():
                if call not in self._calls:  # of an actor that was found dead a moment ago
                    continue
                handle, assignment = self._calls.pop(call)
                try:
                    result = self._ray.get(call)
                except self._ray.exceptions.RayTaskError as error:
                    raise _original_error(error) from error
                except self._ray.exceptions.RayError as error:
                    yield from self._replace(handle, type(error).__name__)
                    continue
                if assignment is None:
                    handle.ready, self._failed_starts = True, 0
                elif handle.open.pop(assignment.item.key, None):
                    yield assignment.item, result
            for handle, cause in self._hanging():
                yield from self._replace(handle, cause)

    def close(self) -> None:
        """Stop all actors."""
        for handle in self._handles:
            self._kill(handle)

    def _start_actor(self) -> None:
        handle: ActorHandle[Item] = ActorHandle(self._actor_class.remote())
        self._handles.append(handle)
        threads = max(1, int(self._engine.cpus))
        self._calls[handle.actor.start.remote(self._make_worker, threads)] = handle, None

    def _assign(self, source: Iterator[Item]) -> bool:
        """Give the actors as many items as they can take; False when the source has no more."""
        for handle in self._handles:
            if self._suspects and handle.capacity == ITEMS_PER_ACTOR:
                self._give(handle, self._suspects.popleft())
        if self._suspects:  # assign nothing else, or no actor would ever be idle enough to retry them alone
            return True
        for capacity in range(ITEMS_PER_ACTOR, 0, -1):  # a first item for every actor before a second for any
            for handle in self._handles:
                if handle.capacity >= capacity:
                    for item in source:
                        self._give(handle, Assignment(item))
                        break
                    else:
                        return False
        return True

    def _give(self, handle: ActorHandle[Item], assignment: Assignment[Item]) -> None:
        handle.open[assignment.item.key] = assignment
        self._calls[handle.actor.process.remote(assignment.item)] = handle, assignment

    def _finished_calls(self) -> list[Any]:
        """Calls that have ended; none only if an actor hangs. It is an error if no actor starts that could end any."""
        begin, calls = time.monotonic(), list(self._calls)
        while not (finished := self._ray.wait(calls, num_returns=1, timeout=BEAT_SECONDS)[0]):
            if self._hanging():
                return []
            if time.monotonic() - begin > START_TIMEOUT and not any(handle.ready for handle in self._handles):
                total = self._ray.cluster_resources()
                raise EngineError(
                    f"no worker has started: each needs {self._engine.cpus:g} CPU, {self._engine.gpus:g} GPU, "
                    f"and the whole cluster has {total.get('CPU', 0):g} CPU, {total.get('GPU', 0):g} GPU"
                )
        # `wait` returns no more calls than it was asked for: collect the others that have ended meanwhile
        all_finished: list[Any] = self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        return all_finished or list(finished)

    def _hanging(self) -> list[tuple[ActorHandle[Item], str]]:
        """Actors that have not answered or worked for too long; the others are asked again when it is time."""
        now, hanging = time.monotonic(), []
        for handle in self._handles:
            if not handle.ready or now - handle.asked < BEAT_SECONDS:
                continue
            # The answer of a dead actor is an error, and an answer too: its other calls end with the same one.
            if handle.beat is None or self._ray.wait([handle.beat], num_returns=1, timeout=0)[0]:
                if self._has_stalled(handle):
                    hanging.append((handle, f"not a step in {STALL_TIMEOUT:g} s"))
                else:
                    handle.beat, handle.asked = handle.actor.beat.remote(), now
            elif now - handle.asked > SILENCE_TIMEOUT:
                hanging.append((handle, f"no sign of life for {SILENCE_TIMEOUT:g} s"))
        return hanging

    def _has_stalled(self, handle: ActorHandle[Item]) -> bool:
        """Whether the last answer of an actor is that its worker hangs."""
        if handle.beat is not None:
            with suppress(self._ray.exceptions.RayError):
                return bool(self._ray.get(handle.beat) > STALL_TIMEOUT)
        return False

    def _replace(self, handle: ActorHandle[Item], cause: str) -> Iterator[tuple[Item, Failed]]:
        """Start another actor in place of one that died or hangs. Its items become suspects, or have failed."""
        if not handle.ready:
            self._failed_starts += 1
            if self._failed_starts == MAX_TRIES:
                raise EngineError(
                    f"{MAX_TRIES} workers in a row died while loading the model ({cause}); is there enough memory?"
                )
        self._handles.remove(handle)
        self._kill(handle)  # Ray may have lost the connection only, and it must not compute on
        self._calls = {call: about for call, about in self._calls.items() if about[0] is not handle}
        self._start_actor()
        for suspect in handle.open.values():
            for part in suspect.item.parts():
                if suspect.deaths + 1 == MAX_TRIES:
                    yield part, Failed(f"killed its worker each of the {MAX_TRIES} times it was tried ({cause})")
                else:
                    self._suspects.append(Assignment(part, suspect.deaths + 1))

    def _kill(self, handle: ActorHandle[Item]) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(handle.actor, no_restart=True)


def worker_count(nodes: Iterable[dict[str, Any]], engine: RayEngine) -> int:
    """Workers that fit on the machines of a cluster, at least one: its machine may be on the way."""
    count = 0
    for node in nodes:
        if node["Alive"]:
            resources = node["Resources"]
            by_cpu, by_gpu = resources.get("CPU", 0) / engine.cpus, resources.get("GPU", 0) / (engine.gpus or 1)
            count += int(min(by_cpu, by_gpu) if engine.gpus else by_cpu)
    return max(1, count)


def _original_error(error: Any) -> Exception:
    """What a worker raised, without Ray's wrapping; or an explanation when the item did not reach the worker."""
    cause = error.cause
    if isinstance(cause, Exception) and not type(cause).__module__.startswith("ray."):
        return cause
    reason = (str(cause or error).strip() or type(cause or error).__name__).splitlines()[0]
    return EngineError(f"a worker cannot read its work ({reason}); do all machines have the same versions?")


def _check_reachable(address: str) -> None:
    """Fail at once if there is no cluster; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--address must be auto, local or HOST:PORT, not {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=20).close()
    except OSError as error:
        raise EngineError(f"cannot connect to {address} ({error}); is `ray start --head` running there?") from None
