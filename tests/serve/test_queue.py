"""Places, turns and time: who waits, who is sent away, who is forgotten."""

import asyncio
import copy
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
import torch

from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, png, running
from usetta import methods
from usetta.classifier import Classifier
from usetta.episode import Episode, encode
from usetta.models import Model
from usetta.models.clip import CLIP
from usetta.models.precision import prepare
from usetta.serve.prompt_cache import PromptCache, PromptKey
from usetta.serve.queue import JobQueue, ViewBudget
from usetta.serve.server import listen, make_server
from usetta.serve.settings import Limits, Settings
from usetta.serve.worker import Job, Question, RefusedError, solve

WORDING = PromptKey("tiny", tuple(CLASSES), None)


def job(views: int, method: str = "se") -> Job:
    question = Question(WORDING, (methods.get(method),), views)
    return Job(question, "image", torch.randint(0, 256, (views, 3, 32, 32), dtype=torch.uint8))


def test_a_line_gives_as_many_as_fit_and_at_least_one() -> None:
    line, jobs = JobQueue(), [job(5), job(3), job(3), job(9), job(1)]
    for each in jobs:
        line.put(each)
    assert line.take(8) == jobs[:2]
    assert line.take(8) == jobs[2:3]
    assert line.take(8) == jobs[3:4]  # more than fits, so alone
    line.close()
    assert line.take(8) == jobs[4:]
    assert line.take(8) == []


def test_a_line_forgets_who_was_given_up() -> None:
    line, jobs = JobQueue(), [job(5), job(5), job(2)]
    for each in jobs:
        line.put(each)
    assert jobs[0].answer.cancel()
    assert jobs[1].answer.cancel()
    assert line.take(5) == jobs[2:]
    assert not jobs[2].answer.cancel()  # it is being worked on


def test_a_room_is_given_in_order_and_a_large_image_is_not_overtaken() -> None:
    async def story() -> list[str]:
        room, told = ViewBudget(10), []
        leave = asyncio.Event()

        async def visit(name: str, views: int) -> None:
            async with room.take(views):
                told.append(name)
                await leave.wait()

        visits = [asyncio.create_task(visit(name, views)) for name, views in [("a", 6), ("large", 50), ("c", 1)]]
        await asyncio.sleep(0.01)
        told.append("-")
        visits[0].cancel()
        await asyncio.sleep(0.01)
        told.append("-")
        leave.set()
        await asyncio.gather(*visits, return_exceptions=True)
        return told

    assert asyncio.run(asyncio.wait_for(story(), 20)) == ["a", "-", "large", "-", "c"]


def test_a_room_is_free_again_after_a_visitor_who_gave_up_waiting() -> None:
    async def story() -> bool:
        room = ViewBudget(4)
        async with room.take(4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), room.take(1):
                    pass
        async with asyncio.timeout(1), room.take(4):
            return True

    assert asyncio.run(asyncio.wait_for(story(), 20))


def test_int8_answers_as_the_classifier_does(tiny_model: CLIP) -> None:
    model = copy.deepcopy(tiny_model)
    prepare(model, "int8")
    crop, models = torch.zeros(1, 3, 32, 32), {"tiny": model}
    jobs = [job(4), job(1, "clip"), job(6)]
    solve(jobs, models, PromptCache(models, 2**30))
    assert model.encode_crops is not None
    assert not torch.equal(model.encode_crops(crop), model.encode_images(crop))
    classifier = Classifier(CLASSES, model, "se")
    for each in jobs:
        episode = Episode(encode(model, each.pixels))
        (expected,) = classifier._answer(["image"], [episode], each.question.recipes[0])
        assert each.answer.result()[0].probs == pytest.approx(expected.probs, abs=1e-3)


def test_what_fails_in_company_is_tried_alone(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tiny_model.encode_images

    def choosy(pixels: torch.Tensor) -> torch.Tensor:
        """Fails if one of the views is black."""
        if (pixels == 0).flatten(1).all(dim=1).any():
            raise MemoryError
        return tower(pixels)

    monkeypatch.setattr(tiny_model, "encode_images", choosy)
    jobs = [job(4), job(4), job(4, "tpt:lr=1e30"), job(1)]
    jobs[1].pixels.zero_()
    models: dict[str, Model] = {"tiny": tiny_model}
    solve(jobs, models, PromptCache(models, 2**30))
    alone = Classifier(CLASSES, tiny_model, "se", views=4)
    assert jobs[0].answer.result()[0].label in alone.classes
    assert isinstance(jobs[1].answer.exception(), MemoryError)
    with pytest.raises(RefusedError, match="nothing but NaN was left"):
        jobs[2].answer.result()
    with pytest.raises(RefusedError, match="needs at least 2, not 1"):
        jobs[3].answer.result()


def limited(**limits: float) -> Settings:
    return Settings(limits=replace(Limits(), **limits))  # type: ignore[arg-type]


def test_when_all_places_are_taken_the_next_is_told_when_to_come_back(waiting: Waiting) -> None:
    with running(limited(queue=3), waiting) as server, ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(server.ask, png(i), views=2) for i in range(3)]
        eventually(lambda: server.engine.taken == 3)
        assert server.metric("usetta_queue") == 3
        refused = server.ask()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert "3 requests are waiting" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/healthz").status_code == 200  # the server itself is not stuck
        waiting.may.set()
        assert [each.result().status_code for each in asked] == [200] * 3
        assert server.ask().status_code == 200


def test_the_place_is_taken_before_the_body_is_read(waiting: Waiting) -> None:
    with running(limited(queue=1), waiting) as server:
        start = (
            b"POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        )
        slow = server.raw(start + b"{")
        eventually(lambda: server.engine.taken == 1)
        assert server.raw(start).answer()[1]["error"]["code"] == "queue_full"
        slow.socket.close()
        eventually(lambda: server.engine.taken == 0)


def asking(views: int = 2) -> bytes:
    """A request as bytes."""
    body = json.dumps({"image": in_base64(png()), "classes": CLASSES, "views": views}).encode()
    head = "POST /v1/classify HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body)).encode() + body


def test_who_hangs_up_before_their_turn_frees_their_place_and_is_not_worked_for(waiting: Waiting) -> None:
    with running(limited(queue=3), waiting) as server, ThreadPoolExecutor(2) as clients:
        first = clients.submit(server.ask, views=2)
        eventually(lambda: waiting.calls == [2])
        gone = [server.raw(asking(views=5)) for _ in range(2)]
        eventually(lambda: len(server.engine._line._jobs) == 2)
        assert server.engine.taken == 3
        for wire in gone:
            wire.socket.close()
        eventually(lambda: server.engine.taken == 1)
        last = clients.submit(server.ask, views=3)
        eventually(lambda: len(server.engine._line._jobs) == 3)
        waiting.may.set()
        assert first.result().status_code == last.result().status_code == 200
        assert waiting.calls == [2, 3]
        assert 'status="499"' in httpx.get(f"{server.url}/metrics").text


def test_who_hangs_up_while_being_answered_harms_nobody(waiting: Waiting) -> None:
    with running(limited(queue=3), waiting) as server:
        wire = server.raw(asking())
        eventually(lambda: waiting.calls == [2])
        wire.socket.close()
        eventually(lambda: server.engine.taken == 0)
        waiting.may.set()
        assert server.ask().status_code == 200


def test_an_answer_that_takes_too_long_is_given_up(waiting: Waiting) -> None:
    with running(limited(seconds=1.5), waiting) as server, ThreadPoolExecutor(2) as clients:
        start = time.monotonic()
        late = [clients.submit(server.ask, png(0), views=2)]
        eventually(lambda: waiting.calls == [2])
        late += [clients.submit(server.ask, png(1), views=2)]
        for each in late:
            assert each.result().status_code == 504
            assert each.result().json()["error"]["code"] == "timeout"
            assert "no answer within 1.5 s" in each.result().json()["error"]["message"]
        assert 1.5 <= time.monotonic() - start < 15
        assert server.engine.taken == 0
        waiting.may.set()
        eventually(lambda: server.ask(views=3).status_code == 200)
        assert waiting.calls[:2] == [2, 3]  # the second of the two was dropped from the line


def test_a_body_that_does_not_arrive_is_given_up(tiny_model: CLIP) -> None:
    with running(limited(seconds=0.4), tiny_model) as server:
        wire = server.raw(asking()[:-10])
        status, body = wire.answer()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert wire.socket.recv(10) == b""  # and the connection is closed
        assert server.engine.taken == 0


def test_before_the_model_is_loaded_the_server_is_alive_but_not_ready(
    tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = threading.Event()

    def load(_name: str, **_settings: object) -> CLIP:
        assert loaded.wait(30)
        return tiny_model

    monkeypatch.setattr("usetta.serve.service.load_model", load)
    listener, server = listen("127.0.0.1", 0), make_server(Settings())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    found = Running(listener.getsockname()[1], server.engine, lambda _number: None)
    thread.start()
    eventually(lambda: server.started)
    gets = ("/healthz", "/readyz", "/v1/models", "/v1/methods")
    seen = {path: httpx.get(found.url + path).status_code for path in gets}
    seen["/v1/classify"] = found.ask().status_code
    loaded.set()
    eventually(lambda: httpx.get(f"{found.url}/readyz").status_code == 200)
    server.engine.leaving = True
    thread.join(30)
    assert seen == {"/healthz": 200, "/readyz": 503, "/v1/models": 503, "/v1/methods": 200, "/v1/classify": 503}


def test_a_server_that_stops_finishes_what_it_has_and_takes_nothing_new(waiting: Waiting) -> None:
    with running(Settings(), waiting) as server, ThreadPoolExecutor(2) as clients:
        begun = [clients.submit(server.ask, png(i), views=2) for i in range(2)]
        eventually(lambda: server.engine.taken == 2)
        with httpx.Client() as client:
            assert client.get(f"{server.url}/v1/methods").status_code == 200
            server.signal(signal.SIGTERM)
            for path in ("/v1/methods", "/readyz"):
                answer = client.get(server.url + path)
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "shutting_down"
            assert client.get(f"{server.url}/healthz").status_code == 200
        refused = server.ask()
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert not any(each.done() for each in begun)
        waiting.may.set()
        assert [each.result().status_code for each in begun] == [200, 200]

        def closed() -> bool:
            try:
                return httpx.get(f"{server.url}/healthz").status_code != 200
            except httpx.TransportError:
                return True

        eventually(closed)


def test_a_server_whose_model_thread_has_ended_stops(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_texts: PromptCache) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(PromptCache, "trim", fail)
    listener, server = listen("127.0.0.1", 0), make_server(Settings(), tiny_model)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    eventually(lambda: server.started and server.engine.ready)
    found = Running(listener.getsockname()[1], server.engine, lambda _number: None)
    assert found.ask().status_code == 200  # the answer was there before
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(server.engine.failure, RuntimeError)
