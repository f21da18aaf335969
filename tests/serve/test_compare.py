"""Several methods on one image: what they answer, what is refused, and how progress is sent."""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from PIL import Image

from serve.conftest import CLASSES, Running, Waiting, eventually, in_base64, png, running
from usetta.models.clip import CLIP
from usetta.serve.monitoring import configure_log
from usetta.serve.settings import Limits, Settings

EVENTS = {"accept": "text/event-stream"}


def events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    parts = [part.split("\n") for part in answer.text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def test_methods_answer_as_each_does_alone_and_views_are_encoded_once(waiting: Waiting) -> None:
    waiting.may.set()
    methods = ["clip", "se", "use:skip=false", "mta"]
    with running(Settings(), waiting) as server:
        comparison = server.compare(png(3), methods=[*methods, "se"]).json()
        assert waiting.calls == [1, 7]
        assert server.compare(methods=["clip"]).status_code == 200
        assert waiting.calls == [1, 7, 1]
        alone = [server.ask(png(3), method=method).json() for method in methods]
    assert [answer["method"] for answer in comparison["answers"]] == methods
    for answer, own in zip(comparison["answers"], alone, strict=True):
        assert (answer["label"], answer["model"], answer["source"]) == (own["label"], "tiny-random", "image")
        assert answer["probability"] == pytest.approx(own["probability"], abs=1e-5)
        if answer["method"] != "clip":  # which uses one view when it is alone
            assert answer["why"]["chosen_views"] == own["why"]["chosen_views"]
            assert answer["why"]["entropies"] == pytest.approx([view["entropy"] for view in comparison["views"]])
    clip, se, use, mta = comparison["answers"]
    assert [answer["beta_range"] for answer in (clip, se, use, mta)] == [None, [0.3, 0.7], [0.3, 0.7], None]
    assert clip["before_tuning"] is se["before_tuning"] is None
    assert use["before_tuning"][0] == use["why"]["before"]
    assert sum(row["probability"] for row in use["before_tuning"]) == pytest.approx(1, abs=1e-5)
    assert comparison["views"][0]["label"] == clip["label"]


def test_views_come_as_small_images_on_request_and_a_form_says_the_same_as_json(server: Running) -> None:
    fields = {"classes": "\n".join(CLASSES), "methods": ["clip", "se"], "views": "4", "show_views": "true", "top": "1"}
    by_form = httpx.post(f"{server.url}/v1/compare", data=fields, files={"image": ("image", png())}).json()
    assert by_form == server.compare(methods=["clip", "se"], views=4, show_views=True, top=1).json()
    assert [len(answer["ranked"]) for answer in by_form["answers"]] == [1, 1]
    head, _, content = by_form["views"][3]["image"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(content))).size == (32, 32)  # the views of the tiny model
    assert {view["image"] for view in server.compare(views=4).json()["views"]} == {None}


@pytest.mark.parametrize("views", [12, "adaptive"])
def test_progress_comes_as_events_and_then_the_answer(server: Running, views: Any) -> None:
    *progress, (last, answer) = events(server.compare(png(36), views=views, headers=EVENTS))
    assert (last, answer) == ("answer", server.compare(png(36), views=views).json())
    assert {name for name, _ in progress} == {"progress"}
    steps = [step for _, step in progress]
    assert list(dict.fromkeys(step["stage"] for step in steps)) == ["waiting", "text", "views", "methods"]
    counts = [step["views"] for step in steps]
    assert all(before <= after for before, after in pairwise(counts))
    assert {1, 5, 12} <= {*counts}  # the image, then four crops at a time, also within a stage
    used = len(answer["views"])
    assert steps[-1] == {"stage": "methods", "views": used, "total": used}
    assert steps[0]["total"] == (64 if views == "adaptive" else 12)


@pytest.mark.parametrize(
    ("options", "code", "message", "field"),
    [
        ({"methods": []}, "invalid_request", "at least 1 item", "methods"),
        ({"methods": ["se", "clip", "use"]}, "invalid_request", "at most 2 items", "methods"),
        ({"methods": "se"}, "invalid_request", "valid array", "methods"),
        ({"methods": ["ues"]}, "invalid_method", "unknown method 'ues'; did you mean 'use'?", "methods"),
        ({"methods": ["se", "use:steps=5"]}, "invalid_method", "5 steps are more than the limit of 4", "methods"),
        ({"methods": ["se", "x" * 201]}, "invalid_request", "at most 200 characters", "methods[1]"),
        ({"method": "se"}, "invalid_request", "Extra inputs are not permitted", "method"),
        ({"views": 17}, "invalid_request", "less than or equal to 16", "views"),
        ({"classes": []}, "invalid_request", "at least 1 item", "classes"),
        ({"model": "other"}, "unknown_model", "does not have 'other'", "model"),
    ],
)
def test_what_is_wrong_with_a_request_is_refused_with_its_status(
    small: Running, options: dict[str, Any], code: str, message: str, field: str
) -> None:
    asked = {"methods": ["clip", "se"]} | options
    for headers in ({}, EVENTS):
        answer = small.compare(headers=headers, **asked)
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/json")
        error = answer.json()["error"]
        assert (error["code"], error["field"]) == (code, field)
        assert message in error["message"]


@pytest.fixture(scope="module")
def small(tiny_model: CLIP) -> Any:
    with running(Settings(limits=Limits(methods=2, steps=4, views=16, upload=20_000)), tiny_model) as server:
        yield server
        assert server.service.in_flight == 0


def test_what_is_found_wrong_later_is_an_error_or_an_event(small: Running) -> None:
    for content, options, code, field in (
        (b"no image", {}, "unreadable_image", "image"),
        (png(), {"templates": ["a photo"]}, "invalid_request", None),
        (png(), {"methods": ["se"], "views": 1}, "invalid_request", None),
    ):
        asked = {"methods": ["clip"]} | options
        plain = small.compare(content, **asked)
        assert (plain.status_code, plain.json()["error"]["code"]) == (422, code)
        *_, last = events(small.compare(content, headers=EVENTS, **asked))
        assert last == ("error", plain.json()["error"])
        assert last[1].get("field") == field
    for headers in ({}, EVENTS):
        assert small.compare(bytes(20_000), headers=headers).status_code == 413
        assert httpx.post(f"{small.url}/v1/compare", content=b"x", headers=headers).status_code == 415


def test_a_full_queue_and_a_late_answer(waiting: Waiting) -> None:
    with running(Settings(limits=Limits(queue=1, seconds=1.0)), waiting) as server, ThreadPoolExecutor(1) as other:
        first = other.submit(server.compare, headers=EVENTS)
        eventually(lambda: server.service.in_flight == 1)
        refused = server.compare(headers=EVENTS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        *progress, last = events(first.result())
        assert progress[-1][1]["stage"] == "views"
        assert last == ("error", {"code": "timeout", "message": "there was no answer within 1 s"})
        assert server.compare().json()["error"]["code"] == "timeout"
        assert server.service.in_flight == 0
        waiting.may.set()


def test_who_hangs_up_frees_the_slot_and_nothing_is_encoded_for_them(waiting: Waiting) -> None:
    with running(Settings(), waiting) as server, ThreadPoolExecutor(1) as other:
        first = other.submit(server.compare, views=2)
        eventually(lambda: waiting.calls == [1])
        body = json.dumps({"image": in_base64(png()), "classes": CLASSES, "views": 5}).encode()
        head = "POST /v1/compare HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}\r\n"
        for number, accept in enumerate(("", "Accept: text/event-stream\r\n"), 1):
            wire = server.raw(head.format(len(body), accept).encode() + body)
            eventually(lambda number=number: server.service.waiting == number)
            wire.socket.close()
            eventually(lambda: server.service.in_flight == 1)
            assert server.service.waiting == number  # it is dropped when its turn comes
        waiting.may.set()
        assert first.result().status_code == 200
        eventually(lambda: server.service.waiting == 0)
    assert waiting.calls == [1, 1]


def test_an_error_of_the_server_is_an_event_with_its_number_in_the_log(tiny_model: CLIP) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_model, name)

        def encode_images(self, pixels: object) -> object:
            raise RuntimeError("secret class 'tabby cat'")

    log = io.StringIO()
    configure_log(log)
    with running(Settings(), Broken()) as server, httpx.Client() as client:
        asked = {"image": in_base64(png()), "classes": CLASSES}
        received = ""
        with client.stream("POST", f"{server.url}/v1/compare", json=asked, headers=EVENTS) as answer:
            try:
                for text in answer.iter_text():
                    received += text
            except httpx.RemoteProtocolError:
                pass  # the server cuts the connection after an error of its own
        number = answer.headers["x-request-id"]
    error = json.loads(received.strip().rpartition("data: ")[2])
    assert error == {"code": "internal_error", "message": "the server failed; its log says why", "id": number}
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert ("failed", number) in {(line["event"], line.get("id")) for line in lines}
    assert "tabby" not in log.getvalue()
