"""Open a URL for reading, within limits: an address may come from somebody else's list.

Only http and https are spoken, also after a redirect. A server that is silent for `TIMEOUT` seconds is given up, and so
is a file that takes longer than `SECONDS` or has more bytes than the caller allows.
"""

import http.client
import time
import urllib.error
import urllib.request
from typing import IO, Any
from urllib.parse import urlsplit

from usetta import __version__

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
TIMEOUT = 10.0
"""Seconds to wait for a connection, or for the next bytes."""
SECONDS = 60.0
"""For a whole file."""
REDIRECTS = 5
_CHUNK = 1 << 16


class FetchError(OSError):
    """A URL cannot be fetched; the message says why, without repeating the URL."""


def fetch(url: str, max_bytes: int) -> bytes:
    """The content behind an http or https URL, if it has at most `max_bytes`."""
    deadline = time.monotonic() + SECONDS
    try:
        with open_url(url) as response:
            content = bytearray()
            while chunk := response.read1(_CHUNK):
                content += chunk
                if len(content) > max_bytes:
                    raise FetchError(f"file is larger than the limit of {max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise FetchError(f"the server took longer than {SECONDS:.0f} s")
    except (OSError, http.client.HTTPException) as error:
        raise error if isinstance(error, FetchError) else FetchError(reason(error)) from error
    return bytes(content)


def open_url(url: str) -> Any:
    """The response to a request for `url`, open for reading."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"usetta/{__version__}"})  # noqa: S310
        return opener(url, _Redirects).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise FetchError(reason(error)) from error


def opener(url: str, *handlers: Any) -> urllib.request.OpenerDirector:
    """What opens `url`; without a proxy if it is of this machine, whose servers a proxy does not know."""
    if urlsplit(url).hostname in LOOPBACK:
        handlers += (urllib.request.ProxyHandler({}),)
    return urllib.request.build_opener(*handlers)


def reason(error: Exception) -> str:
    """Why a connection failed, in a few words."""
    return str(getattr(error, "reason", None) or error) or type(error).__name__


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To http and https; urllib by itself would also follow to ftp."""

    max_redirections = REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise FetchError(f"redirected to {newurl}, which is neither http nor https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
