"""A server on this machine that speaks as much of the hub's protocol as a download needs, and can misbehave."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

COMMIT = "a" * 40
REPO = "someone/tiny-clip.openai"


@dataclass
class Hub:
    """What the server holds and how it misbehaves."""

    url: str = ""
    repo: str = REPO
    files: dict[str, bytes] = field(default_factory=dict)
    tampered: dict[str, bytes] = field(default_factory=dict)
    """Sent instead of the file, while the headers still describe the file."""
    refusal: tuple[int, str] | None = None
    requests: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        repo, _, rest = self.path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if self.hub.refusal:
            self._send(*self.hub.refusal)
        elif repo != self.hub.repo:
            self._send(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._send(404, "RevisionNotFound")
        elif name not in self.hub.files:
            self._send(404, "EntryNotFound")
        else:
            content = self.hub.files[name]
            sent = self.hub.tampered.get(name, content) if body else content
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if body:
                self.wfile.write(sent)

    def _send(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        pass


def go_online(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@contextmanager
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running server that huggingface_hub takes for the hub."""
    state = Hub()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    state.url = f"http://127.0.0.1:{http.server_port}"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    go_online(monkeypatch, state.url)
    try:
        yield state
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
