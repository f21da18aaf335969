"""The page without a browser: what is served, what is refused, and that it says what the API says."""

import base64
import io
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, png, running
from usetta.models.clip import CLIP
from usetta.serve.page.calls import split_classes
from usetta.serve.page.layout import EXAMPLES
from usetta.serve.settings import Limits, Settings


def call(server: Running, name: str, *data: Any, timeout: float = 60, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/gradio_api/run/{name}", json={"data": data} | more, timeout=timeout)


def compare(server: Running, image: Any = None, classes: Any = CLASSES, methods: Any = ("clip", "use"), views: Any = 8):
    return call(server, "compare", in_base64(png()) if image is None else image, classes, list(methods), views)


LINES = "\n".join(CLASSES)


def shown(server: Running, image: Any = None, classes: Any = LINES, methods: Any = ("use",)) -> str:
    """The HTML of the answer, or of what is wrong."""
    answer = call(server, "show", in_base64(png()) if image is None else image, classes, list(methods), [], 8)
    assert answer.status_code == 200, answer.text
    (html,) = answer.json()["data"]
    return html


def sentence(html: str) -> str:
    (message,) = re.findall(r'<div class="problem" role="alert"><p><bdi>(.*)</bdi></p></div>', html)
    return message


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    page = httpx.get(server.url)
    assert page.status_code == 200
    assert re.findall(r"(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+", page.text) == []
    assert "default-src 'self'" in page.headers["content-security-policy"]
    style = httpx.get(f"{server.url}/theme.css").text
    assert re.findall(r"url\((?![\"']?data:)[^)]*\)|@import", style) == []
    assert "system-ui" in style
    assert 'analytics_enabled": true' not in page.text


def test_no_origin_is_answered_but_its_own(server: Running) -> None:
    for origin in ("http://localhost:1", "https://elsewhere.example"):
        for path in ("/", "/config", "/v1/methods", "/examples/cat.jpg"):
            answer = httpx.get(f"{server.url}{path}", headers={"origin": origin})
            assert answer.status_code == 200
            assert [name for name in answer.headers if name.startswith("access-control")] == []
    asked = {"origin": "http://localhost:1", "access-control-request-method": "POST"}
    assert httpx.options(f"{server.url}/gradio_api/run/show", headers=asked).status_code == 405


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_call_that_pages_of_other_sites_could_send_is_refused(server: Running, kind: str) -> None:
    body = json.dumps({"data": [in_base64(png()), CLASSES, ["clip"], 2]})
    answer = httpx.post(f"{server.url}/gradio_api/run/compare", content=body, headers={"content-type": kind})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "request_line",
    [
        "POST /gradio_api/upload",
        "GET /gradio_api/file=/etc/passwd",
        "GET /gradio_api/file/etc/passwd",
        "GET /gradio_api/proxy=http://127.0.0.1/",
        "GET /gradio_api/queue/status",
        "POST /gradio_api/cancel",
        "POST /gradio_api/call/compare",
        "POST /gradio_api/api/compare",
        "POST /gradio_api/component_server",
        "GET /gradio_api/heartbeat/x",
        "GET /gradio_api/startup-events",
        "POST /gradio_api/stream/x",
        "GET /gradio_api/deep_link",
        "POST /gradio_api/vibe-edit",
        "GET /monitoring",
        "POST /login",
        "GET /svelte/x.js",
        "GET /examples/nothing.jpg",
        "GET /anything/else",
    ],
)
def test_what_else_gradio_can_do_does_not_exist(server: Running, request_line: str) -> None:
    verb, path = request_line.split()
    answer = httpx.request(verb, f"{server.url}{path}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "path", ["/static/../../../../etc/passwd", "/assets/%2e%2e/%2e%2e/%2e%2e/index.html", "/assets//etc/passwd"]
)
def test_no_file_outside_gradios_own_is_served(server: Running, path: str) -> None:
    status, _ = server.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()).answer()
    assert status in (403, 404)


def test_neither_an_address_nor_a_file_that_a_caller_names_is_opened(server: Running, tmp_path: Path) -> None:
    (tmp_path / "private.png").write_bytes(png())
    asked: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        address = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/private.png"

        def listen() -> None:
            while not done.is_set():
                try:
                    asked.append(elsewhere.accept())
                except TimeoutError:
                    continue

        done = threading.Event()
        watch = threading.Thread(target=listen)
        watch.start()
        for named in (address, str(tmp_path / "private.png"), f"file://{tmp_path}/private.png"):
            for meta in ({}, {"meta": {"_type": "gradio.FileData"}}):
                as_object = {"path": named, "url": named, "orig_name": "private.png"} | meta
                for data in (as_object, [as_object], {"image": as_object}):
                    assert compare(server, data).status_code == 422
                    assert compare(server, classes=data).status_code == 422
            answer = compare(server, named)
            assert (answer.status_code, answer.json()) == (422, {"error": "image: not valid base64"})
            assert sentence(shown(server, named)) == "Image: not valid base64."
        done.set()
        watch.join()
    assert asked == []


def test_the_page_says_what_the_api_says(server: Running) -> None:
    content, methods = png(3), ["clip", "se", "use", "mta"]
    comparison = compare(server, in_base64(content), methods=methods).json()["data"][0]
    assert (comparison["model"], comparison["classes"], comparison["source"]) == ("tiny-random", CLASSES, "image")
    assert [answer["method"] for answer in comparison["answers"]] == methods
    for answer in comparison["answers"]:
        by_api = server.ask(content, method=answer["method"]).json()
        assert answer["label"] == by_api["label"]
        assert answer["probability"] == pytest.approx(by_api["probability"], abs=1e-5)
        assert answer["why"]["views"] == 8
        if answer["method"] != "clip":  # which uses one view when it is alone
            assert answer["why"]["chosen_views"] == by_api["why"]["chosen_views"]
            assert answer["why"]["entropies"] == pytest.approx(by_api["why"]["entropies"], abs=1e-5)


def test_views_are_encoded_once_for_all_methods(waiting: Waiting) -> None:
    waiting.may.set()
    with running(Settings(), waiting) as server:
        assert compare(server, methods=("clip", "se", "use", "tpt")).status_code == 200
        assert compare(server, methods=("clip",)).status_code == 200
    assert waiting.calls == [1, 7, 1]


def test_the_answer_shows_bars_marks_and_the_weight_on_its_scale(server: Running) -> None:
    html = shown(server, methods=("clip", "se", "use"))
    answers = compare(server, methods=("clip", "se", "use")).json()["data"][0]["answers"]
    for answer, title in zip(answers, ("Zero-shot", "SE", "USE"), strict=True):
        assert f"<h3>{title}</h3>" in html
        assert html.count(f'<span class="who">{title}</span>') == len(CLASSES)
        assert f"<bdi>{escape(answer['why']['reason'])}</bdi>" in html
    widths = re.findall(r'<i style="width: ([\d.]+)%">', html)
    assert len(widths) == 9
    assert sum(map(float, widths)) == pytest.approx(300, abs=1)
    assert html.count('<li class="weak">') == 1
    assert html.count('<li class="marked">') == len(answers[1]["why"]["chosen_views"]) == 1
    assert html.count('<li class="other">') == 6
    entropies = [float(value) for value in re.findall(r"entropy ([\d.]+)", html)]
    assert entropies[1:] == sorted(entropies[1:])
    assert entropies[0] == pytest.approx(answers[0]["why"]["entropies"][0], abs=0.006)
    beta = answers[1]["why"]["beta"]
    assert f"β is {beta:.2f} on a scale from 0.3 to 0.7" in html
    (place,) = re.findall(r'<i style="left: ([\d.]+)%">', html)
    assert float(place) == pytest.approx(100 * (beta - 0.3) / 0.4, abs=0.1)


def test_the_files_to_download_are_whole(server: Running) -> None:
    html = shown(server, f"data:image/png;name=my%20cat.png;base64,{in_base64(png())}", methods=("clip", "se"))
    (content,) = re.findall(r'download="usetta.json" href="data:application/json;base64,([^"]+)"', html)
    numbers = json.loads(base64.b64decode(content))
    assert numbers["source"] == "my cat.png"
    assert [len(answer["ranked"]) for answer in numbers["answers"]] == [3, 3]
    (content,) = re.findall(r'download="usetta.jpg" href="data:image/jpeg;base64,([^"]+)"', html)
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert image.format == "JPEG"
    assert image.width == 1540


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": ""}, "There is no image yet: drop one on the field, or take an example."),
        ({"image": in_base64(b"no image")}, "Image: "),
        ({"image": "data:image/png;base64,"}, "Image: "),
        ({"classes": "tabby cat"}, "Type at least two classes, so that there is something to choose from."),
        ({"classes": "tabby cat\ntabby cat"}, "Type at least two classes, so that there is something to choose from."),
        ({"classes": ""}, "Type at least two classes, so that there is something to choose from."),
        ({"classes": f"tabby cat\n{'x' * 201}"}, "Classes[1]: String should have at most 200 characters."),
        ({"classes": "\n".join(map(str, range(1001)))}, "Classes: List should have at most 1000 items"),
        ({"methods": []}, "Choose at least one method."),
    ],
)
def test_what_is_wrong_is_a_sentence(server: Running, change: dict[str, Any], message: str) -> None:
    assert sentence(shown(server, **change)).startswith(message)


def test_limits_hold_for_programs_as_well(server: Running) -> None:
    for change, message in (
        ({"views": 129}, "views: Input should be less than or equal to 128"),
        ({"views": "many"}, "views: Input should be a valid integer, or 'adaptive'"),
        ({"methods": ["clip"] * 33}, "These are more than 32 methods."),
        ({"methods": ["ues"]}, "unknown method 'ues'; did you mean 'use'?"),
        ({"methods": ["use:steps=11"]}, "method: 11 steps are more than the limit of 10"),
        ({"classes": "cat"}, "classes: Input should be a valid list"),
    ):
        answer = compare(server, **change)
        assert (answer.status_code, answer.json()) == (422, {"error": message})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b'{"data": 1}', b'{"data": [[[1]]]}', b'{"data": [], "fn_index": {}}', b"[" * 100_000],
)
def test_a_malformed_call_is_refused(server: Running, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/gradio_api/run/compare", content=body, headers=headers)
    assert (answer.status_code, answer.json()) == (422, {"error": "the body is not a call with plain values"})


def test_an_unknown_function_and_missing_values_are_refused(server: Running) -> None:
    for answer, status, message in (
        (call(server, "nothing", 1), 404, "there is no such function"),
        (call(server, "predict", fn_index=999), 404, "there is no such function"),
        (call(server, "compare"), 422, "image: Field required"),
        (call(server, "compare", *[""] * 5), 422, "there are more values than the function takes"),
    ):
        assert (answer.status_code, answer.json()) == (status, {"error": message})


def test_what_people_type_stays_text(server: Running) -> None:
    nasty = ["<script>alert(1)</script>", "${1+1} {{value}} `x`", "שלום", "a & b"]
    html = shown(server, classes="\n".join(nasty))
    assert "<script" not in html
    assert "${" not in html
    assert "{{" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<bdi>שלום</bdi>" in html
    assert "a &amp; b" in html


def test_classes_come_in_lines_or_with_commas() -> None:
    assert split_classes(" tabby cat, red fox \n") == ["tabby cat", " red fox"]
    assert split_classes("crane, bird\r\ncrane, machine") == ["crane, bird", "crane, machine"]


def test_a_full_queue_is_events(waiting: Waiting) -> None:
    with running(Settings(limits=Limits(queue=1)), waiting) as server, ThreadPoolExecutor(1) as other:
        first = other.submit(compare, server)
        eventually(lambda: server.service.in_flight == 1)
        assert sentence(shown(server)).startswith("1 requests are in progress, as many as the server takes")
        answer = compare(server)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        waiting.may.set()
        assert first.result().status_code == 200


def test_a_late_answer_is_reported_and_frees_its_slot(waiting: Waiting) -> None:
    with running(Settings(limits=Limits(seconds=1.0)), waiting) as server:
        assert sentence(shown(server)) == "There was no answer within 1 s."
        eventually(lambda: server.service.in_flight == 0)
        assert compare(server).json() == {"error": "there was no answer within 1 s"}
        waiting.may.set()


def test_a_caller_who_hangs_up_frees_the_slot_and_nothing_is_printed(
    waiting: Waiting, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(Settings(), waiting) as server:
        with pytest.raises(httpx.ReadTimeout):
            call(server, "show", in_base64(png()), LINES, ["use"], [], 8, timeout=0.5)
        eventually(lambda: server.service.in_flight == 0)
        waiting.may.set()
    assert "Traceback" not in capfd.readouterr().err


def test_what_has_begun_is_finished_when_the_server_stops(waiting: Waiting) -> None:
    with running(Settings(), waiting) as server, ThreadPoolExecutor(1) as other:
        begun = other.submit(shown, server)
        eventually(lambda: server.service.in_flight == 1)
        server.signal(signal.SIGTERM)
        assert httpx.get(server.url).status_code == 503
        waiting.may.set()
        assert "<h3>USE</h3>" in begun.result()


def join(server: Running, session: str | None, *data: Any) -> httpx.Response:
    """What Gradio's Python client sends first."""
    config = httpx.get(f"{server.url}/config").json()
    (number,) = (row["id"] for row in config["dependencies"] if row["api_name"] == "compare")
    asked = {"data": data, "fn_index": number, "session_hash": session}
    return httpx.post(f"{server.url}/gradio_api/queue/join", json=asked, timeout=60)


def events(server: Running, session: str) -> list[dict[str, Any]]:
    """And what it reads then."""
    answer = httpx.get(f"{server.url}/gradio_api/queue/data", params={"session_hash": session}, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def test_a_call_that_is_left_is_answered_when_it_is_asked_for(server: Running) -> None:
    good = [in_base64(png()), CLASSES, ["clip", "use"], 8]
    ids = [join(server, "mine", *data).json()["event_id"] for data in (good, ["no image", *good[1:]])]
    assert events(server, "other") == [{"msg": "close_stream"}]
    first, second, last = events(server, "mine")
    assert [first["event_id"], second["event_id"], last["msg"]] == [*ids, "close_stream"]
    assert first["output"]["data"] == compare(server).json()["data"]
    assert (second["success"], second["output"]) == (False, {"error": "image: not valid base64"})
    assert events(server, "mine") == [{"msg": "close_stream"}]
    assert join(server, None, *good).json()["error"]["message"] == "the call names no session"


def test_calls_that_nobody_asks_for_are_forgotten(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    call_of = ["", ["a", "b"], ["clip"], 1]
    with running(Settings(limits=Limits(queue=2)), tiny_model) as server:
        for session in ("first", "second", "third"):
            assert join(server, session, *call_of).status_code == 200
        assert [len(events(server, session)) for session in ("first", "second", "third")] == [1, 2, 2]
        join(server, "first", *call_of)
        later = time.monotonic() + Limits().seconds + 1
        monkeypatch.setattr("usetta.serve.page.routes.time", SimpleNamespace(monotonic=lambda: later))
        join(server, "second", *call_of)
        assert [len(events(server, session)) for session in ("first", "second")] == [1, 2]


def test_with_keys_the_page_asks_for_one(tiny_model: CLIP) -> None:
    with running(Settings(keys=("first key",)), tiny_model) as server:
        refused = httpx.get(server.url)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic ")
        assert compare(server).status_code == 401
        for path in ("/config", "/examples/cat.jpg", "/assets/x.js", "/gradio_api/info"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
        assert httpx.get(server.url, auth=("anybody", "first key")).status_code == 200
        assert httpx.get(f"{server.url}/v1/models", auth=("", "first key")).status_code == 200
        for wrong in (("first key", ""), ("anybody", "first"), ("", "")):
            assert httpx.get(server.url, auth=wrong).status_code == 401
        for broken in ("Basic", "Basic ???", "Basic Zmlyc3Qga2V5"):
            assert httpx.get(server.url, headers={"authorization": broken}).status_code == 401


def test_the_body_of_a_call_has_the_limit_of_all(tiny_model: CLIP) -> None:
    with running(Settings(limits=Limits(upload=20_000, pixels=1000)), tiny_model) as server:
        assert compare(server, "A" * 20_000).status_code == 413
        assert "limit" in sentence(shown(server, in_base64(png())))  # 2400 pixels


def test_the_metrics_know_the_page_by_few_routes(server: Running) -> None:
    assert httpx.get(server.url).status_code == 200
    shown(server)
    compare(server)
    lines = httpx.get(f"{server.url}/metrics").text
    routes = set(re.findall(r'usetta_requests_total{route="([^"]+)"', lines))
    assert {"/", "/gradio_api/run/{name}"} <= routes
    assert not any("assets/" in route and "{path" not in route for route in routes)


def test_without_a_page_there_is_none(tiny_model: CLIP) -> None:
    with running(Settings(page=False), tiny_model) as server:
        assert httpx.get(server.url).status_code == 404
        assert compare(server).status_code == 404
        assert server.ask().status_code == 200


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_small_images_with_classes(server: Running, name: str) -> None:
    answer = httpx.get(f"{server.url}/examples/{name}.jpg")
    assert answer.headers["content-type"] == "image/jpeg"
    assert len(answer.content) < 100_000
    classes = split_classes(EXAMPLES[name])
    comparison = compare(server, in_base64(answer.content), classes, ["clip"])
    assert comparison.json()["data"][0]["classes"] == classes
    assert len(classes) >= 4
