"""How work is handed out and taken back, with a Ray that is made up and does everything in this thread."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.workers import Numbers
from usetta.distributed import EngineError, Failed, RayEngine
from usetta.distributed import cluster as room
from usetta.distributed.ray import AHEAD, _ActorPool


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@dataclass(eq=False)
class Call:
    """What Ray gives for an answer that is not there yet."""

    actor: Any
    work: Numbers | None


class FakeRay:
    """Calls are answered one at a time, when somebody waits. Who is given a deadly number dies with all its calls."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, deadly: int | None = None, stillborn: bool = False, wrong: Exception | None = None) -> None:
        self.deadly, self.stillborn, self.wrong = deadly, stillborn, wrong
        self.actors: list[Any] = []
        self.together: list[list[tuple[int, ...]]] = []
        """What a worker had whenever it was given something."""

    def put(self, value: Any) -> Any:
        return value

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2}}]

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self) -> Any:
        actor: Any = SimpleNamespace(dead=False, has=[])

        def start(make_worker: Any, threads: int) -> Any:
            return Call(actor, None)

        def do(work: Numbers) -> Any:
            actor.has.append(work.key)
            self.together.append(list(actor.has))
            return Call(actor, work)

        actor.start, actor.do = SimpleNamespace(remote=start), SimpleNamespace(remote=do)
        self.actors.append(actor)
        return actor

    def wait(self, calls: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert calls, "Ray refuses to wait for nothing"
        return calls[:1], calls[1:]

    def get(self, call: Any) -> Any:
        actor, work = call.actor, call.work
        if work is None:
            actor.dead |= self.stillborn
        elif self.deadly in work.key:
            actor.dead = True
        if actor.dead:
            raise RayError
        if work is None:
            return None
        actor.has.remove(work.key)
        if self.wrong:
            raise RayTaskError(self.wrong)
        return [number**2 for number in work.key]

    def kill(self, actor: Any, no_restart: bool) -> None:
        assert no_restart
        actor.dead = True


def go(ray: FakeRay, works: Iterator[Numbers], **options: Any) -> list[tuple[Numbers, Any]]:
    crew: _ActorPool[Numbers, Any] = _ActorPool(ray, RayEngine(**options), lambda: None)  # type: ignore[arg-type,return-value]
    return list(crew.work(works))


def fours(count: int) -> Iterator[Numbers]:
    return (Numbers(tuple(range(n, n + 4))) for n in range(0, 4 * count, 4))


def test_all_work_is_done_by_workers_that_never_have_more_than_two_pieces() -> None:
    ray = FakeRay()
    results = go(ray, fours(20))
    assert Counter(work.key for work, _ in results) == Counter(work.key for work in fours(20))
    assert all(found == [number**2 for number in work.key] for work, found in results)
    assert len(ray.actors) == 2, "as many as there is room for"
    assert max(map(len, ray.together)) == AHEAD


def test_suspects_are_tried_alone_and_the_one_is_lost_after_three_deaths() -> None:
    ray = FakeRay(deadly=13)
    results = go(ray, fours(20))
    assert Counter(number for work, _ in results for number in work.key) == Counter(range(80))
    (lost,) = [(work.key, found) for work, found in results if isinstance(found, Failed)]
    assert lost == ((13,), Failed("ended its worker each of 3 times that it was tried (RayError)"))
    assert len(ray.actors) == 2 + 3
    for had in ray.together:
        assert len(had) == 1 or all(len(key) == 4 for key in had), "a suspect had company"


def test_workers_that_cannot_start_end_the_run() -> None:
    with pytest.raises(EngineError, match=r"3 workers in a row died while they loaded the model \(RayError\)"):
        go(FakeRay(stillborn=True), fours(3))


def test_an_error_of_the_hand_comes_as_itself_and_one_of_ray_with_a_hint() -> None:
    with pytest.raises(ZeroDivisionError):
        go(FakeRay(wrong=ZeroDivisionError()), fours(3))
    foreign = type("RaySystemError", (Exception,), {"__module__": "ray.exceptions"})
    with pytest.raises(EngineError, match=r"\(No module named 'usetta'\); have all machines the same versions"):
        go(FakeRay(wrong=foreign("No module named 'usetta'\ntraceback: ...")), fours(3))


def test_where_no_worker_can_be_placed_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = FakeRay()
    ray.wait = lambda calls, num_returns, timeout: ([], calls)
    ray.cluster_resources = lambda: {"CPU": 2.0}
    monkeypatch.setattr(room, "_PATIENCE", -1)
    with pytest.raises(EngineError, match="each asks for 4 CPU, 1 GPU, and all machines together have 2 CPU, 0 GPU"):
        go(ray, fours(1), workers=1, cpus=4, gpus=1)
