"""A server on this machine that hands out files, with or without ranges, and misbehaves on request."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


@dataclass
class Shelf:
    """What the server holds and how it behaves."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    etag: str | None = '"1"'
    cuts: list[int] = field(default_factory=list)
    """After how many bytes the connection of the first, second, ... answer ends too early."""
    refusals: list[int] = field(default_factory=list)
    """Status codes of the first answers."""
    redirects: dict[str, str] = field(default_factory=dict)
    shift: int = 0
    """Ranges start so much later than they were asked for."""
    lengths: bool = True
    troubles: dict[str, list[int]] = field(default_factory=dict)
    """Of a path: what its next answers are, the status code of a refusal, or the negative length of a cut answer."""
    waits: dict[int, int] = field(default_factory=dict)
    """Seconds that refusals with this status ask to wait."""
    locked: dict[str, str] = field(default_factory=dict)
    """Tokens that paths which begin like this demand."""
    seconds: float = 0.0
    """What every answer takes."""
    tokens: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Authorization of requests that had one."""
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, Range and If-Range of each request."""


class Handler(BaseHTTPRequestHandler):
    shelf: Shelf

    def do_GET(self) -> None:
        shelf, wanted, condition = self.shelf, self.headers.get("Range"), self.headers.get("If-Range")
        shelf.requests.append((self.path, wanted, condition))
        token = self.headers.get("Authorization")
        if token:
            shelf.tokens.append((self.path, token))
        Event().wait(shelf.seconds)  # not time.sleep, which tests replace
        trouble = shelf.troubles[self.path].pop(0) if shelf.troubles.get(self.path) else 0
        key = next((key for prefix, key in shelf.locked.items() if self.path.startswith(prefix)), None)
        if key and token != f"Bearer {key}":
            self._head(401, {})
        elif trouble > 0:
            self._head(trouble, {"Retry-After": str(shelf.waits[trouble])} if trouble in shelf.waits else {})
        elif self.path in shelf.redirects:
            self._head(302, {"Location": shelf.redirects[self.path]})
        elif shelf.refusals:
            self._head(shelf.refusals.pop(0), {})
        elif self.path.lstrip("/") not in shelf.files:
            self._head(404, {})
        else:
            content = shelf.files[self.path.lstrip("/")]
            continues = wanted and shelf.ranges and condition in (None, shelf.etag)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) + shelf.shift if wanted and continues else 0
            if start >= len(content) and continues:
                self._head(416, {"Content-Range": f"bytes */{len(content)}"})
                return
            headers = {"Content-Length": str(len(content) - start)} if shelf.lengths else {}
            if shelf.etag:
                headers["ETag"] = shelf.etag
            if continues:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._head(206 if continues else 200, headers)
            cut = -trouble if trouble else shelf.cuts.pop(0) if shelf.cuts else len(content)
            self.wfile.write(content[start : start + cut])

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        pass


@contextmanager
def serve() -> Iterator[Shelf]:
    shelf = Shelf()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"shelf": shelf}))
    shelf.url = f"http://127.0.0.1:{http.server_port}"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield shelf
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
