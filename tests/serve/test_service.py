"""Slots, turns and time: who waits, who is refused, whose work is dropped."""

import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest

from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, png, running
from usetta.models.clip import CLIP
from usetta.serve.app import listen, make_server
from usetta.serve.prompt_cache import PromptCache
from usetta.serve.settings import Limits, Settings


def limited(**limits: float) -> Settings:
    return Settings(limits=replace(Limits(), **limits))  # type: ignore[arg-type]


def test_when_all_slots_are_taken_the_next_request_is_refused_and_may_try_again(waiting: Waiting) -> None:
    with running(limited(queue=3), waiting) as server, ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(server.ask, png(i), views=2) for i in range(3)]
        eventually(lambda: server.service.in_flight == 3)
        assert server.metric("usetta_queue") == 3
        refused = server.ask()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert "3 requests are in progress" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/healthz").status_code == 200  # the server itself is not stuck
        waiting.may.set()
        assert [answer.result().status_code for answer in asked] == [200] * 3
        assert server.ask().status_code == 200


def test_the_slot_is_taken_before_the_body_is_read(waiting: Waiting) -> None:
    with running(limited(queue=1), waiting) as server:
        start = b"POST /v1/classify HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        slow = server.raw(start + b"{")
        eventually(lambda: server.service.in_flight == 1)
        assert server.raw(start).answer()[1]["error"]["code"] == "queue_full"
        slow.socket.close()
        eventually(lambda: server.service.in_flight == 0)


def asking(views: int = 2) -> bytes:
    """A request as bytes."""
    body = json.dumps({"image": in_base64(png()), "classes": CLASSES, "views": views}).encode()
    head = "POST /v1/classify HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body)).encode() + body


def test_who_hangs_up_before_their_turn_frees_their_slot_and_nothing_is_encoded_for_them(waiting: Waiting) -> None:
    with running(limited(queue=3), waiting) as server, ThreadPoolExecutor(2) as clients:
        first = clients.submit(server.ask, views=2)
        eventually(lambda: waiting.calls == [1])
        gone = [server.raw(asking(views=5)) for _ in range(2)]
        eventually(lambda: server.service.waiting == 2)
        assert server.service.in_flight == 3
        for wire in gone:
            wire.socket.close()
        eventually(lambda: server.service.in_flight == 1)
        last = clients.submit(server.ask, views=3)
        eventually(lambda: server.service.waiting == 3)
        waiting.may.set()
        assert first.result().status_code == last.result().status_code == 200
        assert waiting.calls == [1, 1, 1, 2]
        assert 'status="499"' in httpx.get(f"{server.url}/metrics").text


def test_who_hangs_up_while_being_answered_harms_nobody(waiting: Waiting) -> None:
    with running(limited(queue=3), waiting) as server:
        wire = server.raw(asking())
        eventually(lambda: waiting.calls == [1])
        wire.socket.close()
        eventually(lambda: server.service.in_flight == 0)
        waiting.may.set()
        assert server.ask().status_code == 200


def test_an_answer_that_takes_too_long_is_given_up(waiting: Waiting) -> None:
    with running(limited(seconds=1.5), waiting) as server, ThreadPoolExecutor(2) as clients:
        start = time.monotonic()
        late = [clients.submit(server.ask, png(0), views=2)]
        eventually(lambda: waiting.calls == [1])
        late += [clients.submit(server.ask, png(1), views=2)]
        for answer in late:
            assert answer.result().status_code == 504
            assert answer.result().json()["error"]["code"] == "timeout"
            assert "no answer within 1.5 s" in answer.result().json()["error"]["message"]
        assert 1.5 <= time.monotonic() - start < 15
        assert server.service.in_flight == 0
        waiting.may.set()
        eventually(lambda: server.ask(views=3).status_code == 200)
        # The first ended after its weak view, and the second was dropped from the queue.
        assert waiting.calls[:3] == [1, 1, 2]


def test_a_body_that_does_not_arrive_is_given_up(tiny_model: CLIP) -> None:
    with running(limited(seconds=0.4), tiny_model) as server:
        wire = server.raw(asking()[:-10])
        status, body = wire.answer()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert wire.socket.recv(10) == b""  # and the connection is closed
        assert server.service.in_flight == 0


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
    reached = Running(listener.getsockname()[1], server.service, lambda _number: None)
    thread.start()
    eventually(lambda: server.started)
    gets = ("/healthz", "/readyz", "/v1/models", "/v1/methods")
    seen = {path: httpx.get(reached.url + path).status_code for path in gets}
    seen["/v1/classify"] = reached.ask().status_code
    loaded.set()
    eventually(lambda: httpx.get(f"{reached.url}/readyz").status_code == 200)
    server.service.is_shutting_down = True
    thread.join(30)
    assert seen == {"/healthz": 200, "/readyz": 503, "/v1/models": 503, "/v1/methods": 200, "/v1/classify": 503}


def test_a_server_that_stops_finishes_what_it_has_and_takes_nothing_new(waiting: Waiting) -> None:
    with running(Settings(), waiting) as server, ThreadPoolExecutor(2) as clients:
        begun = [clients.submit(server.ask, png(i), views=2) for i in range(2)]
        eventually(lambda: server.service.in_flight == 2)
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
        assert not any(answer.done() for answer in begun)
        waiting.may.set()
        assert [answer.result().status_code for answer in begun] == [200, 200]

        def closed() -> bool:
            try:
                return httpx.get(f"{server.url}/healthz").status_code != 200
            except httpx.TransportError:
                return True

        eventually(closed)


def test_a_server_whose_model_thread_has_ended_stops(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_prompts: PromptCache) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(PromptCache, "trim", fail)
    listener, server = listen("127.0.0.1", 0), make_server(Settings(), tiny_model)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    eventually(lambda: server.started and server.service.is_ready)
    reached = Running(listener.getsockname()[1], server.service, lambda _number: None)
    assert reached.ask().status_code == 200  # the answer was there before
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(server.service.failure, RuntimeError)
