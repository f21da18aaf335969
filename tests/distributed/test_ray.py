"""The Ray engine without a cluster: the actor itself, the scheduling with a fake Ray, and what is refused."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from distributed.workers import Numbers, SquareWorker
from usetta.cancellation import checkpoint
from usetta.distributed import EngineError, Failed, RayEngine
from usetta.distributed import ray as engine_module
from usetta.distributed.ray import ITEMS_PER_ACTOR, ActorPool, WorkerActor, connected, worker_count


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass(eq=False)
class Call:
    """A call that Ray has not answered yet."""

    actor: Any
    item: Numbers | None
    is_beat: bool = False


class FakeRay:
    """Answers one call at a time, when it is waited for.

    An actor that gets a deadly number dies with all its calls, and one that gets a hanging number never answers again.
    With a stalling number it still answers that it is alive, and that it has not taken a step for an hour.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(
        self,
        deadly: int | None = None,
        fails_to_start: bool = False,
        error: Exception | None = None,
        hanging: int | None = None,
        stalling: int | None = None,
    ) -> None:
        self.stalling = stalling
        self.deadly, self.fails_to_start, self.error, self.hanging = deadly, fails_to_start, error, hanging
        self.beats = 0
        self.actors: list[Any] = []
        self.assigned: list[list[tuple[int, ...]]] = []
        """The open items of an actor, each time it was given one."""

    def put(self, value: Any) -> Any:
        return value

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2}}]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self) -> Any:
        actor: Any = SimpleNamespace(dead=False, open=[])

        def start(make_worker: Any, threads: int) -> Any:
            return Call(actor, None)

        def process(item: Numbers) -> Any:
            actor.open.append(item.key)
            self.assigned.append(list(actor.open))
            return Call(actor, item)

        def beat() -> Any:
            self.beats += 1
            return Call(actor, None, is_beat=True)

        for function in (start, process, beat):
            setattr(actor, function.__name__, SimpleNamespace(remote=function))
        self.actors.append(actor)
        return actor

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert calls, "Ray refuses to wait for nothing"
        stuck = [self.hanging, self.stalling]
        answered = [
            call
            for call in calls
            if not any(number in key for key in call.actor.open for number in stuck[: 1 if call.is_beat else 2])
        ]
        return answered[:1], [call for call in calls if call not in answered[:1]]

    def get(self, call: Any) -> Any:
        actor, item = call.actor, call.item
        if item is None:
            actor.dead |= self.fails_to_start
        elif self.deadly in item.key:
            actor.dead = True
        if actor.dead:
            raise RayError
        if item is None:
            return 3600.0 * any(self.stalling in key for key in actor.open)
        actor.open.remove(item.key)
        if self.error:
            raise RayTaskError(self.error)
        return [number**2 for number in item.key]

    def kill(self, actor: Any, no_restart: bool) -> None:
        assert no_restart
        actor.dead = True


def run(ray: FakeRay, items: Iterator[Numbers], **options: Any) -> list[tuple[Numbers, Any]]:
    pool: ActorPool[Numbers, Any] = ActorPool(ray, RayEngine(**options), SquareWorker)
    return list(pool.run(items))


def fours(count: int) -> Iterator[Numbers]:
    return (Numbers(tuple(range(n, n + 4))) for n in range(0, 4 * count, 4))


def test_all_items_are_done_by_actors_that_never_have_more_than_two() -> None:
    ray = FakeRay()
    results = run(ray, fours(20))
    assert Counter(item.key for item, _ in results) == Counter(item.key for item in fours(20))
    assert all(squares == [number**2 for number in item.key] for item, squares in results)
    assert len(ray.actors) == 2, "as many as fit"
    assert max(map(len, ray.assigned)) == ITEMS_PER_ACTOR


def test_suspects_are_retried_alone_and_the_deadly_one_fails_after_three_deaths() -> None:
    ray = FakeRay(deadly=13)
    results = run(ray, fours(20))
    assert Counter(number for item, _ in results for number in item.key) == Counter(range(80))
    (failed,) = [(item.key, result) for item, result in results if isinstance(result, Failed)]
    assert failed == ((13,), Failed("killed its worker each of the 3 times it was tried (RayError)"))
    assert len(ray.actors) == 2 + 3
    for keys in ray.assigned:
        assert len(keys) == 1 or all(len(key) == 4 for key in keys), "a suspect was not alone"


def test_an_actor_that_hangs_is_replaced_like_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BEAT_SECONDS", 0)
    monkeypatch.setattr(engine_module, "SILENCE_TIMEOUT", 0.01)
    ray = FakeRay(hanging=13)
    results = run(ray, fours(20))
    assert Counter(number for item, _ in results for number in item.key) == Counter(range(80))
    (failed,) = [(item.key, result) for item, result in results if isinstance(result, Failed)]
    reason = "killed its worker each of the 3 times it was tried (no sign of life for 0.01 s)"
    assert failed == ((13,), Failed(reason))
    assert len(ray.actors) == 2 + 3
    assert sum(actor.dead for actor in ray.actors) == 3, "those that hang are killed, and no others"


def test_actors_are_asked_whether_they_are_alive_but_not_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    run(ray, fours(20))
    assert ray.beats <= 2
    monkeypatch.setattr(engine_module, "BEAT_SECONDS", 0)
    run(ray, fours(20))
    assert ray.beats >= 20


def test_workers_that_cannot_start_end_the_run() -> None:
    with pytest.raises(EngineError, match=r"3 workers in a row died while loading the model \(RayError\)"):
        run(FakeRay(fails_to_start=True), fours(3))


def test_an_exception_of_the_worker_is_raised_as_itself_and_one_of_ray_with_a_hint() -> None:
    with pytest.raises(ZeroDivisionError):
        run(FakeRay(error=ZeroDivisionError()), fours(3))
    foreign = type("RaySystemError", (Exception,), {"__module__": "ray.exceptions"})
    with pytest.raises(EngineError, match=r"\(No module named 'usetta'\); do all machines have the same versions"):
        run(FakeRay(error=foreign("No module named 'usetta'\ntraceback: ...")), fours(3))


def test_workers_that_fit_nowhere_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = FakeRay()
    ray.wait = lambda calls, num_returns, timeout: ([], calls)
    ray.cluster_resources = lambda: {"CPU": 2.0}
    monkeypatch.setattr(engine_module, "START_TIMEOUT", -1)
    with pytest.raises(EngineError, match="each needs 4 CPU, 1 GPU, and the whole cluster has 2 CPU, 0 GPU"):
        run(ray, fours(1), workers=1, cpus=4, gpus=1)


def test_an_actor_whose_worker_takes_no_step_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BEAT_SECONDS", 0)
    ray = FakeRay(stalling=13)
    results = run(ray, fours(20))
    assert Counter(number for item, _ in results for number in item.key) == Counter(range(80))
    (failed,) = [(item.key, result) for item, result in results if isinstance(result, Failed)]
    assert failed == ((13,), Failed("killed its worker each of the 3 times it was tried (not a step in 1800 s)"))
    assert sum(actor.dead for actor in ray.actors) == 3


@pytest.mark.usefixtures("_keep_threads")
def test_an_actor_knows_when_its_worker_took_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now, may_step, stepped, may_end = 0.0, Event(), Event(), Event()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow:
        def run(self, items: Iterator[Numbers]) -> Iterator[list[int]]:
            for item in items:
                assert may_step.wait(30)
                checkpoint()
                stepped.set()
                assert may_end.wait(30)
                yield list(item.key)

    actor: WorkerActor[Numbers, list[int]] = WorkerActor()
    actor.start(Slow, 1)  # type: ignore[arg-type]
    now = 100.0
    assert actor.beat() == 0  # nothing to do
    with ThreadPoolExecutor(1) as caller:
        result = caller.submit(actor.process, Numbers((3,)))
        while actor._moved is None:
            pass
        now = 170.0
        assert actor.beat() == 70
        may_step.set()
        assert stepped.wait(30)
        assert actor.beat() == 0
        now = 175.0
        assert actor.beat() == 5
        may_end.set()
        assert result.result() == [3]


@pytest.fixture
def _keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_keep_threads")
def test_an_actor_finishes_what_it_has_when_there_is_no_more() -> None:
    """The worker reads one item ahead, and would wait for it for ever."""
    actor: WorkerActor[Numbers, list[int]] = WorkerActor()
    actor.start(SquareWorker, 1)
    assert torch.get_num_threads() == 1
    assert actor.process(Numbers((3,))) == [9]
    with ThreadPoolExecutor(2) as callers:
        items = [Numbers((n, n + 7)) for n in range(200)]
        assert list(callers.map(actor.process, items)) == [[n**2, (n + 7) ** 2] for n in range(200)]


@pytest.mark.usefixtures("_keep_threads")
def test_an_exception_of_the_worker_reaches_the_caller_and_the_actor_goes_on() -> None:
    actor: WorkerActor[Numbers, list[int]] = WorkerActor()
    actor.start(lambda: SquareWorker(invalid=5), 1)
    with pytest.raises(ValueError, match="5 cannot be squared"):
        actor.process(Numbers((5,)))
    assert actor.process(Numbers((6,))) == [36]


def test_workers_that_fit_on_a_cluster() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    assert worker_count(nodes, RayEngine()) == 20
    assert worker_count(nodes, RayEngine(cpus=3)) == 1 + 5
    assert worker_count(nodes, RayEngine(cpus=0.5)) == 40
    assert worker_count(nodes, RayEngine(gpus=1)) == 2
    assert worker_count(nodes, RayEngine(gpus=0.25)) == 8
    assert worker_count(nodes, RayEngine(cpus=4, gpus=0.25)) == 4
    assert worker_count(nodes, RayEngine(gpus=4)) == 1  # its machine may be on the way


@pytest.mark.parametrize("options", [{"workers": 0}, {"cpus": 0}, {"gpus": -1}])
def test_impossible_workers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="worker"):
        RayEngine(**options)


def test_without_ray_the_extra_is_named_unless_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'usetta\[cluster\]'"):
        list(RayEngine().run(SquareWorker, [Numbers((1,))]))
    assert list(RayEngine().run(SquareWorker, [])) == []


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("127.0.0.1:1", EngineError, "cannot connect to 127.0.0.1:1 .*ray start --head"),
        ("somewhere", ValueError, "--address must be auto, local or HOST:PORT, not 'somewhere'"),
    ],
)
def test_an_address_without_a_cluster(address: str, error: type[Exception], message: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.raises(error, match=message):
        list(RayEngine(address).run(SquareWorker, [Numbers((1,))]))


class Library(ModuleType):
    """Ray as far as connecting to a cluster needs it; `error` is what it raises then."""

    def __init__(self, error: Exception | None = None, is_connected: bool = False, has_tokens: bool = True) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(**({"AuthenticationError": PermissionError} if has_tokens else {}))
        self.calls: list[object] = []
        self.is_connected, self.error = is_connected, error

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, address: str, **options: object) -> None:
        self.calls.append((address, options))
        if self.error:
            raise self.error

    def shutdown(self) -> None:
        self.calls.append("shutdown")


QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@pytest.mark.parametrize(("address", "options"), [("auto", QUIET), ("local", {**QUIET, "include_dashboard": False})])
def test_a_connection_ends_with_its_block(
    monkeypatch: pytest.MonkeyPatch, address: str, options: dict[str, object]
) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    library = Library()
    monkeypatch.setitem(sys.modules, "ray", library)
    with suppress(KeyError), connected(address) as ray:
        assert ray is library
        assert library.calls == [(address, options)]
        raise KeyError
    assert library.calls[1:] == ["shutdown"]
    assert os.environ.get("RAY_USAGE_STATS_ENABLED") == ("0" if address == "local" else None)


def test_a_connection_of_the_caller_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(is_connected=True)
    monkeypatch.setitem(sys.modules, "ray", library)
    with connected("auto") as ray:
        assert ray is library
    assert library.calls == []


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no cluster is running\nTraceback: ..."), "no cluster is running"),
        (RuntimeError(), "RuntimeError"),
        (
            caused_by(RuntimeError("refused"), PermissionError()),
            "refused; it requires a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH if it is not in ~/.ray",
        ),
    ],
)
def test_a_cluster_that_cannot_be_used_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    library = Library(error)
    monkeypatch.setitem(sys.modules, "ray", library)
    with pytest.raises(EngineError) as caught, connected("auto"):
        pass
    assert str(caught.value) == f"cannot connect to a Ray cluster at 'auto': {reason}"
    assert "shutdown" not in library.calls


def test_a_ray_without_tokens_reports_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Library(ConnectionError("no cluster is running"), has_tokens=False))
    with pytest.raises(EngineError, match="at 'auto': no cluster is running$"), connected("auto"):
        pass
