"""What a stranger may try: too much work, silent connections, JSON that never ends, names of other servers."""

import io
import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Any

import httpx
import pytest
import torch

from serve.conftest import CLASSES, Running, Waiting, Wire, eventually, in_base64, png, running
from serve.test_service import asking, limited
from usetta.methods import get
from usetta.methods.tune.shift import ShiftTuner
from usetta.models.clip import CLIP
from usetta.serve.costs import cost
from usetta.serve.monitoring import RepetitionFilter, configure_log
from usetta.serve.schemas import ApiError
from usetta.serve.settings import Settings


def batch(server: Running, method: str, images: int, views: int, **options: Any) -> httpx.Response:
    asked = {"images": [in_base64(png(i)) for i in range(images)], "classes": CLASSES, "method": method, "views": views}
    return httpx.post(f"{server.url}/v1/classify/batch", json=asked, timeout=60, **options)


def test_work_that_would_take_too_long_is_refused_with_its_cost(server: Running) -> None:
    refused = batch(server, "ttl:steps=10", images=2, views=64)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "too_costly")
    assert "encoding 1408 views, more than the limit of 1280" in refused.json()["error"]["message"]
    assert batch(server, "clip", images=16, views=128).status_code == 200  # which encodes one view of each


def test_costs_count_images_views_towers_classes_and_steps() -> None:
    assert cost([get("clip")], 64, 1000, 3) == 3
    assert cost([get("clip"), get("se")], 64, 1000, 3) == 3 * 64
    assert cost([get("ttl:steps=2")], 64, 1000, 1) == 64 + 2 * 64
    assert cost([get("use:steps=2"), get("tpt")], 64, 1000, 1) == 64 + 3 * 77
    assert cost([get("tda")], 64, 1000, 3, dim=512) == 3
    assert cost([get("dota")], 64, 1000, 2, dim=512) == 2 * (64 + 15)  # a gigabyte is read and written
    assert cost([get("use:active=13")], 64, 1000, 1) == 64 + 1
    assert cost([get("rlcf:steps=1")], 64, 13, 1, reward_model=True) == 2 * 64 + 1


class Steps(list[float]):
    """The times at which TPS has taken a step, each of which takes a while."""

    seconds = 0.1


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    times = Steps()
    step = ShiftTuner.step

    def slow(*args: Any, **options: Any) -> torch.Tensor:
        time.sleep(times.seconds)
        times.append(time.monotonic())
        return step(*args, **options)

    monkeypatch.setattr(ShiftTuner, "step", slow)
    return times


def test_what_nobody_waits_for_ends_after_its_step_and_does_not_delay_the_end(
    tiny_model: CLIP, slow_steps: Steps
) -> None:
    slow_steps.seconds = 1.0
    with running(limited(seconds=3), tiny_model) as server:
        assert server.ask(method="tps:steps=10", views=2).status_code == 504
        left = time.monotonic()
    assert time.monotonic() - left < 5
    assert 1 <= len(slow_steps) < 10
    assert slow_steps[-1] - left < 2


def test_between_two_steps_other_callers_are_answered(tiny_model: CLIP, slow_steps: Steps) -> None:
    slow_steps.seconds = 0.4
    with running(Settings(keys=("a", "b")), tiny_model) as server, ThreadPoolExecutor(1) as clients:
        long = clients.submit(batch, server, "tps:steps=10", 2, 2, headers={"x-api-key": "a"})
        eventually(lambda: slow_steps)
        assert server.ask(views=2, headers={"x-api-key": "b"}).status_code == 200
        assert len(slow_steps) < 10
        assert long.result().status_code == 200
        assert len(slow_steps) == 20


def test_one_caller_cannot_take_all_slots(tiny_model: CLIP, slow_steps: Steps) -> None:
    slow_steps.seconds = 0.5
    settings = Settings(keys=("a", "b"), limits=limited(queue_per_caller=1).limits)
    with running(settings, tiny_model) as server, ThreadPoolExecutor(1) as clients:
        first = clients.submit(server.ask, method="tps:steps=10", views=2, headers={"x-api-key": "a"})
        eventually(lambda: slow_steps)
        refused = server.ask(headers={"x-api-key": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.ask(views=2, headers={"x-api-key": "b"}).status_code == 200
        assert first.result().status_code == 200


def test_connections_that_send_half_a_head_keep_nobody_out(tiny_model: CLIP) -> None:
    settings = limited(connections_per_address=20, connections=30, pause=0.5)
    with running(settings, tiny_model) as server, ExitStack() as stack:
        wires = [stack.enter_context(server.raw(b"GET /healthz HTTP/1.1\r\nHost: loc").socket) for _ in range(60)]
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert server.ask(views=2).status_code == 200
        assert sum(map(is_closed, wires)) >= 40  # the oldest made way for the newer
        eventually(lambda: all(map(is_closed, wires)), 5)  # and these took too long


def test_when_all_connections_are_at_work_one_more_is_refused(waiting: Waiting) -> None:
    with running(limited(connections=2, connections_per_address=9), waiting) as server, ExitStack() as stack:
        held = [stack.enter_context(server.raw(asking()).socket) for _ in range(2)]
        eventually(lambda: server.service.in_flight == 2)
        third = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
        refused = b"".join(iter(lambda: third.recv(1000), b""))
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n")
        assert not any(map(is_closed, held))
        waiting.may.set()
        for wire in held:
            wire.settimeout(30)
            assert Wire(wire).answer()[0] == 200
        # They wait for another request now, and the first makes way.
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def is_closed(wire: socket.socket) -> bool:
    wire.settimeout(0.005)
    try:
        return wire.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_body_that_stops_halfway_is_given_up_soon(tiny_model: CLIP) -> None:
    with running(limited(pause=0.3), tiny_model) as server:
        status, body = server.raw(asking()[:-10]).answer()
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert body["error"]["message"] == "no part of the body arrived for 0.3 s"


def test_a_body_that_takes_long_to_read_holds_nobody_up(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = Event(), Event()

    def slow(*_: object, **__: object) -> None:
        begun.set()
        assert may_end.wait(30)
        raise ApiError(422, "invalid_request", "slow")

    monkeypatch.setattr("usetta.serve.parsing.read_one", slow)
    with running(Settings(), tiny_model) as server, ThreadPoolExecutor(1) as clients:
        asking = clients.submit(server.ask)
        assert begun.wait(30)
        assert httpx.get(f"{server.url}/healthz", timeout=10).status_code == 200
        assert not asking.done()
        may_end.set()
        assert asking.result().status_code == 422


def post_json(server: Running, body: bytes) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/classify", content=body, headers={"content-type": "application/json"})


def test_json_is_read_no_further_than_needed(server: Running) -> None:
    keys = ", ".join(f'"{i}": {i}' for i in range(60_000))
    many = post_json(server, f"{{{keys}}}".encode()).json()["error"]
    assert many == {"code": "invalid_request", "message": "the JSON has more than 100,000 values"}
    unknown = post_json(server, b'{"classes" : ["a"], "views":1, "more": [this is not JSON').json()["error"]
    assert (unknown["field"], unknown["message"]) == ("more", "more: Extra inputs are not permitted")
    assert "Invalid JSON" in post_json(server, b'{"classes": ["a"], "views" 1}').json()["error"]["message"]
    assert "Invalid JSON" in post_json(server, b"[" * 50_000).json()["error"]["message"]
    large = post_json(server, b'{"image": "' + b"A" * 8_400_000 + b'"}')
    assert large.status_code == 413
    assert "8,388,608 bytes for JSON; a form may have 16,777,216" in large.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(
            ("localhost", 200),
            ("127.0.0.1:8000", 200),
            ("[::1]:80", 200),
            ("LOCALHOST.", 200),
            ("localhost.:80", 200),
            ("usetta.example:1", 200),
        ),
        *(
            ("evil.example", 421),
            ("127.0.0.1.evil.example", 421),
            ("10.0.0.1", 421),
            ("localhost:80@evil.example", 421),
            ("usetta.example.evil", 421),
        ),
    ],
)
def test_only_names_of_the_server_are_answered(named: Running, host: str, status: int) -> None:
    answer = httpx.get(f"{named.url}/v1/methods", headers={"host": host})
    assert answer.status_code == status
    if status == 421:
        assert answer.json()["error"]["code"] == "unknown_host"


@pytest.fixture(scope="module")
def named(tiny_model: CLIP) -> Iterator[Running]:
    with running(Settings(hosts=("usetta.example",)), tiny_model) as server:
        yield server


def test_a_server_on_all_addresses_answers_to_each_of_them(tiny_model: CLIP) -> None:
    with running(Settings(hosts=("0.0.0.0",)), tiny_model) as server:
        assert httpx.get(f"{server.url}/healthz", headers={"host": "10.0.0.1:80"}).status_code == 200
        assert httpx.get(f"{server.url}/healthz", headers={"host": "evil.example"}).status_code == 421


def test_the_log_of_an_attack_is_short(tiny_model: CLIP) -> None:
    lines = io.StringIO()
    configure_log(lines)
    with running(Settings(), tiny_model) as server, httpx.Client() as client:
        for _ in range(80):
            assert client.post(f"{server.url}/v1/classify", content=b"x").status_code == 415
        for _ in range(80):
            server.raw(b"no HTTP at all\r\n\r\n").socket.close()
        assert client.get(f"{server.url}/healthz").status_code == 200
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert 1 <= len([line for line in logged if line.get("status") == 415]) <= 2 * 50
    others = [line for line in logged if "status" not in line]
    assert len(others) <= 60


def test_the_log_does_not_repeat_itself_for_ever() -> None:
    repetition = RepetitionFilter(most=3, seconds=10)

    def logged(created: float, **fields: Any) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"msg": "request", "levelno": logging.INFO, "fields": fields})
        record.created = created
        return record if repetition.filter(record) else None

    assert [bool(logged(i, status=400)) for i in range(5)] == [True] * 3 + [False] * 2
    assert all(logged(i, status=200) for i in range(5))
    assert logged(5, status=404)
    next_one = logged(11, status=400)
    assert next_one is not None
    assert next_one.fields == {"status": 400, "left_out": 2}  # type: ignore[attr-defined]
    assert logged(-1000, status=400)  # the clock was set back
