"""The pages without a browser: what is served, under which policy, and to whom."""

import re
from importlib.resources import files

import httpx
import pytest

from serve.conftest import Running, running
from usetta.models.clip import CLIP
from usetta.serve.settings import Settings
from usetta.serve.static import PATHS


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_file_is_small_and_under_the_policy(server: Running, path: str) -> None:
    answer = httpx.get(server.url + path, headers={"origin": "https://elsewhere.example"})
    assert answer.status_code == 200
    assert len(answer.content) < 100_000
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_every_file_of_the_pages_is_served_and_names_no_other_host() -> None:
    folder = files("usetta.serve") / "page"
    present = {path.name for path in folder.iterdir() if path.is_file()} - {"index.html", "docs.html"}
    present |= {f"examples/{path.name}" for path in (folder / "examples").iterdir()}
    assert {f"/page/{name}" for name in present} | {"/", "/docs"} == PATHS
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".svg":
            text = path.read_text(encoding="utf-8")
            assert re.findall(r"(?:https?:)?//[\w-]+\.[\w.]+", text) == [], path
            assert "innerHTML" not in text
            assert re.findall(r"<script(?! type=\"module\" src)|<style| style=| on\w+=\"", text) == [], path


@pytest.mark.parametrize("name", ["nothing.js", "index.html", "../app.py", "%2e%2e/app.py", "/etc/passwd", ""])
def test_no_other_file_is_served(server: Running, name: str) -> None:
    status, body = server.raw(f"GET /page/{name} HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n".encode()).answer()
    assert (status, body["error"]["code"]) == (404, "not_found")


def test_the_pages_need_no_key_but_what_they_call_does(tiny_model: CLIP) -> None:
    with running(Settings(keys=("first key",)), tiny_model) as server:
        assert {httpx.get(server.url + path).status_code for path in PATHS} == {200}
        for path in ("/v1/methods", "/v1/models", "/openapi.json", "/page/other", "/page/"):
            assert httpx.get(server.url + path).status_code == 401
        assert server.compare().status_code == 401
        assert server.compare(headers={"x-api-key": "first key"}).status_code == 200


def test_without_pages_there_are_none(tiny_model: CLIP) -> None:
    with running(Settings(page=False), tiny_model) as server:
        assert {httpx.get(server.url + path).status_code for path in PATHS} == {404}
        assert server.compare().status_code == 200
