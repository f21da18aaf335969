"""Every limit, every bad input: a typed error at once, and the server goes on."""

import io
import json
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_image
from serve.conftest import CLASSES, Running, in_base64, png, running, saved
from usetta.models.clip import CLIP
from usetta.serve.monitoring import configure_log
from usetta.serve.parsing import FORM, read_one
from usetta.serve.schemas import ApiError, request_schemas
from usetta.serve.settings import Limits, Settings

LIMITS = Limits(
    upload=50_000, pixels=5000, classes=20, name_length=30, templates=3, views=16, steps=4, images=2, seconds=20
)


@pytest.fixture(scope="module")
def strict(tiny_model: CLIP) -> Iterator[Running]:
    """A server with low limits."""
    with running(Settings(limits=LIMITS), tiny_model) as server:
        yield server
        assert server.service.in_flight == 0
        assert server.ask().status_code == 200  # after all that was done to it


def assert_refused(answer: httpx.Response, status: int, code: str, message: str, field: str | None = None) -> None:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), answer.text
    error = answer.json()["error"]
    assert (error["code"], error.get("field")) == (code, field), error
    assert message in error["message"]
    assert len(answer.headers["x-request-id"]) == 32
    assert "Traceback" not in answer.text


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims to be large, with hardly a byte inside."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"this is text, not an image", "not an image, or in an unsupported format"),
        (saved(make_image(0), "JPEG")[:700], "file is truncated"),
        (png()[:200], "truncated"),
        (bomb(30000, 30000), "has 30000 x 30000 pixels, more than the limit of 5,000"),
        (png(size=(101, 50)), "has 101 x 50 pixels, more than the limit"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "damaged"),
    ],
)
def test_a_bad_image_is_refused_with_the_reason(strict: Running, content: bytes, message: str) -> None:
    assert_refused(strict.ask(content), 422, "unreadable_image", message, "image")
    assert_refused(strict.send({"classes": CLASSES}, content), 422, "unreadable_image", message, "image")


def test_an_image_just_within_the_limit_of_pixels_is_answered(strict: Running) -> None:
    assert strict.ask(png(size=(100, 50))).status_code == 200


def test_an_empty_file_is_no_image(strict: Running) -> None:
    answer = strict.send({"classes": CLASSES}, b"")
    assert_refused(answer, 422, "unreadable_image", "file is empty", "image")


@pytest.mark.parametrize(
    ("options", "code", "message", "field"),
    [
        ({"classes": []}, "invalid_request", "at least 1 item", "classes"),
        ({"classes": ["x"] * 21}, "invalid_request", "at most 20 items", "classes"),
        ({"classes": ["cat", "x" * 31]}, "invalid_request", "at most 30 characters", "classes[1]"),
        ({"classes": ["cat", ""]}, "invalid_request", "at least 1 character", "classes[1]"),
        ({"classes": ["cat", " _ "]}, "invalid_request", "class name number 2 is empty", None),
        ({"classes": ["cat", 5]}, "invalid_request", "valid string", "classes[1]"),
        ({"classes": "cat"}, "invalid_request", "valid array", "classes"),
        ({"classes": None}, "invalid_request", "valid array", "classes"),
        ({"classes": ["𠀀" * 30]}, "invalid_request", "tokens", None),
        ({"views": 17}, "invalid_request", "less than or equal to 16", "views"),
        ({"views": 0}, "invalid_request", "greater than or equal to 1", "views"),
        ({"views": "8"}, "invalid_request", "valid integer, or 'adaptive'", "views"),
        ({"views": "many"}, "invalid_request", "valid integer, or 'adaptive'", "views"),
        ({"views": None}, "invalid_request", "valid integer, or 'adaptive'", "views"),
        ({"views": 1}, "invalid_request", "method 'se' compares views, so it needs at least 2, not 1", None),
        ({"augmix": "yes"}, "invalid_request", "valid boolean", "augmix"),
        ({"seed": -1}, "invalid_request", "greater than or equal to 0", "seed"),
        ({"seed": 2**63}, "invalid_request", "less than or equal to 9223372036854775807", "seed"),
        ({"top": 0}, "invalid_request", "greater than or equal to 1", "top"),
        ({"colour": "red"}, "invalid_request", "Extra inputs are not permitted", "colour"),
        ({"image": "not base64!"}, "unreadable_image", "not valid base64", "image"),
        ({"image": in_base64(png())[:60] + "!" + in_base64(png())[60:]}, "unreadable_image", "base64", "image"),
        ({"image": "http://127.0.0.1/cat.jpg"}, "unreadable_image", "not valid base64", "image"),
        ({"image": None}, "invalid_request", "valid string", "image"),
        ({"method": "ues"}, "invalid_method", "unknown method 'ues'; did you mean 'use'?", "method"),
        ({"method": "use:step=2"}, "invalid_method", "no setting 'step'; did you mean 'steps'?", "method"),
        ({"method": "tda"}, "session_required", "'tda' remembers earlier images, and without a session", "session"),
        ({"session": "a"}, "invalid_request", "'se' answers every image by itself", "session"),
        ({"method": "tda", "session": ""}, "invalid_request", "at least 1 character", "session"),
        ({"method": "tda", "session": "x" * 31}, "invalid_request", "at most 30 characters", "session"),
        ({"method": "ecalp", "session": "a"}, "invalid_method", "grows with the stream", "method"),
        ({"method": "dmn:capacity=1001", "session": "a"}, "invalid_method", "capacity=1001 is more than", "method"),
        ({"method": "onzeta", "session": "a"}, "invalid_request", "onzeta:length=1000", None),
        ({"method": "use:steps=5"}, "invalid_method", "5 steps are more than the limit of 4", "method"),
        ({"method": "tpt:lr=1e38"}, "invalid_method", "lr=1e+38 is more than this server allows, 10", "method"),
        ({"method": "ttl:rank=1001"}, "invalid_method", "rank=1001 is more than this server allows, 1000", "method"),
        ({"method": "x" * 31}, "invalid_request", "at most 30 characters", "method"),
        ({"model": "ViT-B-32"}, "unknown_model", "does not have 'ViT-B-32'; it has tiny-random", "model"),
        ({"model": "/etc/passwd"}, "unknown_model", "does not have '/etc/passwd'", "model"),
        ({"templates": []}, "invalid_request", "at least 1 item", "templates"),
        ({"templates": ["a {}."] * 4}, "invalid_request", "at most 3 items", "templates"),
        ({"templates": ["ensemble"]}, "invalid_request", "7 are more than the limit of 3", "templates"),
        ({"templates": ["a photo"]}, "invalid_request", "must contain {} once", None),
        ({"templates": ["a {}.", "the {}."], "method": "use"}, "invalid_request", "has no single context", None),
    ],
)
def test_options_beyond_the_limits_are_refused(
    strict: Running, options: dict[str, Any], code: str, message: str, field: str | None
) -> None:
    assert_refused(strict.ask(**options), 422, code, message, field)


@pytest.mark.parametrize(
    ("fields", "message", "field"),
    [
        ({}, "Field required", "classes"),
        ({"classes": "\n"}, "at least 1 item", "classes"),
        ({"classes": "\n".join("abcdefghijklmnopqrstu")}, "at most 20 items", "classes"),
        ({"classes": CLASSES, "views": "many"}, "valid integer", "views"),
        ({"classes": CLASSES, "views": ["2", "4"]}, "given 2 times", "views"),
        ({"classes": CLASSES, "image": "text"}, "send it as a file", "image"),
        ({"classes": CLASSES, "colour": "red"}, "Extra inputs", "colour"),
    ],
)
def test_fields_of_a_form_are_checked_alike(strict: Running, fields: dict[str, Any], message: str, field: str) -> None:
    assert_refused(strict.send(fields), 422, "invalid_request", message, field)


def test_a_form_has_one_image_of_the_right_name(strict: Running) -> None:
    def send(*names: str) -> httpx.Response:
        files = [(name, ("cat.png", png())) for name in names]
        return httpx.post(f"{strict.url}/v1/classify", data={"classes": CLASSES}, files=files)

    assert_refused(send("photo"), 422, "invalid_request", "there is a file named 'photo'; send the image as 'image'")
    assert_refused(send("image", "image"), 422, "invalid_request", "2 were sent, more than the limit of 1", "image")
    none = httpx.post(f"{strict.url}/v1/classify", files={"classes": (None, "cat")})
    assert_refused(none, 422, "invalid_request", "no image was sent", "image")


def test_a_batch_has_its_limit_too(strict: Running) -> None:
    asked = {"images": [in_base64(png())] * 3, "classes": CLASSES}
    answer = httpx.post(f"{strict.url}/v1/classify/batch", json=asked)
    assert_refused(answer, 422, "invalid_request", "at most 2 items", "images")
    files = [("images", ("cat.png", png()))] * 3
    answer = httpx.post(f"{strict.url}/v1/classify/batch", data={"classes": CLASSES}, files=files)
    assert_refused(answer, 422, "invalid_request", "3 were sent, more than the limit of 2", "images")
    answer = httpx.post(f"{strict.url}/v1/classify/batch", json=asked | {"images": [in_base64(png())], "views": 1})
    assert_refused(answer, 422, "invalid_request", "it needs at least 2, not 1")  # of all of them, so for all


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Invalid JSON"),
        (b"{", "Invalid JSON"),
        (b"[" * 40_000, "Invalid JSON"),
        (b'{"classes": ["\\ud800"], "image": ""}', "Invalid JSON"),
        (b'{"classes": ["\xff\xfe"], "image": ""}', "Invalid JSON"),
        (b"[1, 2]", "an object"),
        (b'{"classes": NaN}', "valid array"),
        (b'{"seed": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_malformed_json_is_refused(strict: Running, body: bytes, message: str) -> None:
    answer = httpx.post(f"{strict.url}/v1/classify", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["code"] == "invalid_request"
    assert message in answer.json()["error"]["message"]


def form(*parts: bytes) -> bytes:
    return b"".join(b"--B\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--B--\r\n"


FORM_IMAGE = b'name="image"; filename="cat.png"\r\n\r\n' + png()
FORM_CLASS = b'name="classes"\r\n\r\ncat'


@pytest.mark.parametrize(
    ("content_type", "body", "message"),
    [
        ("multipart/form-data", form(FORM_IMAGE, FORM_CLASS), "malformed"),
        ("multipart/form-data; boundary=B", form(FORM_IMAGE, FORM_CLASS)[:-5], "ends before its last boundary"),
        ("multipart/form-data; boundary=C", form(FORM_IMAGE, FORM_CLASS), "malformed"),
        ("multipart/form-data; boundary=B", form(FORM_IMAGE, b'name="classes"\r\n\r\n\xff'), "malformed"),
        ("multipart/form-data; boundary=B", form(FORM_IMAGE, b'title="classes"\r\n\r\ncat'), "malformed"),
        ("multipart/form-data; boundary=B", b"", "ends before its last boundary"),
    ],
)
def test_a_malformed_form_is_refused(strict: Running, content_type: str, body: bytes, message: str) -> None:
    answer = httpx.post(f"{strict.url}/v1/classify", content=body, headers={"content-type": content_type})
    assert_refused(answer, 422, "malformed_body", message)


SCHEMAS = request_schemas(LIMITS)
WHOLE = form(FORM_IMAGE[:60], FORM_CLASS, b'name="views"\r\n\r\n4')


@given(st.lists(st.tuples(st.integers(0, len(WHOLE)), st.binary(max_size=6)), max_size=4))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_whatever_a_form_is_made_of_it_is_read_or_refused(changes: list[tuple[int, bytes]]) -> None:
    body = WHOLE
    for place, inserted in changes:
        body = body[:place] + inserted + body[place + len(inserted) // 2 :]
    with suppress(ApiError):
        assert read_one(f"{FORM}; boundary=B", body, SCHEMAS.options, SCHEMAS.one).options.classes


def test_other_types_of_body_are_refused_unread(strict: Running) -> None:
    def send(kind: str | None, encoding: str | None = None) -> httpx.Response:
        headers = {"content-type": kind, "content-encoding": encoding}
        sent = {name: value for name, value in headers.items() if value}
        return httpx.post(f"{strict.url}/v1/classify", content=b"{}", headers=sent)

    for kind in ("text/plain", "image/png", "application/x-www-form-urlencoded"):
        assert_refused(send(kind), 415, "unsupported_media_type", f"not {kind}")
    assert_refused(send(None), 415, "unsupported_media_type", "not a body without a type")
    assert_refused(send("application/json", "gzip"), 415, "unsupported_media_type", "without a content encoding")


def test_unknown_paths_and_verbs_have_typed_errors(strict: Running) -> None:
    assert_refused(httpx.get(f"{strict.url}/nowhere"), 404, "not_found", "Not Found")
    answer = httpx.get(f"{strict.url}/v1/classify")
    assert_refused(answer, 405, "method_not_allowed", "Method Not Allowed")
    assert answer.headers["allow"] == "POST"


def test_a_long_list_of_classes_is_refused_by_its_number(server: Running) -> None:
    start = time.monotonic()
    answer = server.ask(classes=[f"class {i}" for i in range(50_000)])
    assert_refused(answer, 422, "invalid_request", "at most 1000 items", "classes")
    by_form = server.send({"classes": "\n".join(f"class {i}" for i in range(50_000))})
    assert_refused(by_form, 422, "invalid_request", "at most 1000 items", "classes")
    by_parts = server.send({"classes": [f"class {i}" for i in range(10_001)]})
    assert_refused(by_parts, 422, "malformed_body", "more than 10,000 parts; send class names one per line")
    assert time.monotonic() - start < 30


def test_a_content_length_of_two_gigabytes_is_refused_before_a_byte_is_read(strict: Running) -> None:
    for expect in (b"", b"Expect: 100-continue\r\n"):
        start = time.monotonic()
        wire = strict.raw(
            b"POST /v1/classify HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            + expect
            + b"Content-Length: 2147483648\r\n\r\n"
        )
        status, body = wire.answer()
        assert time.monotonic() - start < 5
        assert (status, body["error"]["code"]) == (413, "too_large")
        assert "larger than the limit of 50,000 bytes" in body["error"]["message"]


def test_a_body_without_a_length_is_cut_off_at_the_limit(strict: Running) -> None:
    wire = strict.raw(
        b"POST /v1/classify HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    sent = 0
    try:
        for _ in range(5000):
            wire.socket.sendall(b"1000\r\n" + b" " * 4096 + b"\r\n")
            sent += 4096
    except OSError:
        pass  # the server has closed
    status, body = wire.answer()
    assert (status, body["error"]["code"]) == (413, "too_large")
    assert strict.service.in_flight == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_still_sees_the_answer(strict: Running, chunked: bool) -> None:
    body = json.dumps({"image": in_base64(bytes(2_000_000)), "classes": CLASSES}).encode()
    content: Any = iter([body[:1000], body[1000:]]) if chunked else body
    answer = httpx.post(f"{strict.url}/v1/classify", content=content, headers={"content-type": "application/json"})
    assert_refused(answer, 413, "too_large", "larger than the limit of 50,000 bytes")
    answer = strict.send({"classes": CLASSES}, bytes(100_000))
    assert_refused(answer, 413, "too_large", "larger than the limit of 50,000 bytes")


def test_a_body_of_just_the_limit_is_read(strict: Running) -> None:
    body = json.dumps({"image": in_base64(png()), "classes": CLASSES, "views": 2}).encode()
    headers = {"content-type": "application/json"}
    padded = body + b" " * (LIMITS.upload - len(body))
    assert httpx.post(f"{strict.url}/v1/classify", content=padded, headers=headers).status_code == 200
    assert httpx.post(f"{strict.url}/v1/classify", content=padded + b" ", headers=headers).status_code == 413


def test_something_that_is_not_http_does_no_harm(strict: Running) -> None:
    wire = strict.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n")
    assert b"400" in wire.socket.recv(100)


def test_keys_are_required_everywhere_but_for_health_checks(tiny_model: CLIP) -> None:
    with running(Settings(keys=("first-key", "zweiter-schlüssel")), tiny_model) as server:
        for path in ("/healthz", "/readyz"):
            assert httpx.get(server.url + path).status_code == 200
        for path in ("/v1/models", "/v1/methods", "/metrics", "/openapi.json", "/nowhere"):
            answer = httpx.get(server.url + path)
            assert_refused(answer, 401, "unauthorized", "send a key")
            assert answer.headers["www-authenticate"] == "Bearer"
        wrong = [
            {"authorization": "Bearer first-ke"},
            {"authorization": "Bearer first-keyy"},
            {"authorization": "Basic first-key"},
            {"authorization": "first-key"},
            {"authorization": "Bearer"},
            {"x-api-key": ""},
            {"x-api-key": "Bearer first-key"},
            {"cookie": "key=first-key"},
        ]
        for headers in wrong:
            assert_refused(server.ask(headers=headers), 401, "unauthorized", "send a key")
        right = [
            {"authorization": "Bearer first-key"},
            {"authorization": "bearer first-key"},
            {"x-api-key": "first-key"},
            {"x-api-key": "zweiter-schlüssel".encode()},
        ]
        for sent in right:
            assert server.ask(headers=sent).status_code == 200  # type: ignore[arg-type]
        document = httpx.get(f"{server.url}/openapi.json", headers={"x-api-key": "first-key"}).json()
        assert document["security"] == [{"bearer": []}, {"key": []}]
        assert document["paths"]["/healthz"]["get"]["security"] == []
    assert "first-key" not in repr(Settings(keys=("first-key",)))


def test_other_origins_get_no_permission(strict: Running) -> None:
    answer = httpx.options(
        f"{strict.url}/v1/classify", headers={"origin": "http://evil.example", "access-control-request-method": "POST"}
    )
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.fixture
def logged() -> io.StringIO:
    """What the server writes to its log."""
    lines = io.StringIO()
    configure_log(lines)
    return lines


def test_an_error_of_the_server_has_a_number_that_is_in_its_log_and_no_more(
    tiny_model: CLIP, logged: io.StringIO
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_model, name)

        def encode_images(self, pixels: object) -> object:
            raise RuntimeError("secret class 'tabby cat'")

    with running(Settings(), Broken()) as server:
        answer = server.ask()
        assert_refused(answer, 500, "internal_error", "the server failed; its log says why")
        assert server.ask(method="zorglub").status_code == 422
        assert server.ask(b"no image").status_code == 422
    number = answer.json()["error"]["id"]
    assert number == answer.headers["x-request-id"]
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    failed = next(line for line in lines if line["event"] == "failed")
    assert (failed["id"], failed["error"]) == (number, "RuntimeError")
    assert any("encode_images" in frame for frame in failed["where"])
    request = next(line for line in lines if line["event"] == "request" and line["id"] == number)
    assert (request["status"], request["method"], request["views"]) == (500, "se", 8)
    assert request["ms"] > 0
    for secret in ("tabby", "fox", in_base64(png())[:20], "RuntimeError(", "zorglub"):
        assert secret not in logged.getvalue()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda: Limits(views=0), "the limit views must be above 0, not 0"),
        (lambda: Limits(seconds=float("nan")), "the limit seconds must be above 0"),
        (lambda: Settings(keys=("fine", " ")), "an API key must not be empty"),
        (lambda: Settings(threads=0), "threads must be at least 1, not 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings()
    assert replace(Limits(), views=1).views == 1
