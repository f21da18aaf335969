"""Download a file so that nothing half-written is ever taken for it, and nothing is downloaded twice.

Bytes go to `NAME.part`, which becomes `NAME` when all of them are there. A cut connection is taken up again where it
ended (HTTP Range), and so is a download that was killed. What the server says to tell versions of the file apart is
kept beside the part and sent along (If-Range), so that a part is never continued with another file; a server that
cannot continue starts over. Only https is spoken, also after redirects; plain http is for servers on this machine.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from usetta import __version__
from usetta.data.dataset import DataError
from usetta.progress import track

_CHUNK = 1 << 20
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that may be different next time."""


class _CutError(Exception):
    """The connection ended before the file did."""


def download(
    url: str, target: Path, *, attempts: int = 8, pause: float = 1.0, timeout: float = 60, progress: bool | None = None
) -> None:
    """Bring `url` to `target`, with up to `attempts` connections and growing pauses (seconds) between them."""
    _permit(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    part, version = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.version")
    for attempt in range(1, attempts + 1):
        try:
            _continue(url, part, version, timeout, progress)
            break
        except _CutError as error:
            if attempt == attempts:
                raise DataError(
                    f"the download of {url} broke off {attempts} times, at last: {error}",
                    "run the command again: it continues where it stopped",
                ) from error
            time.sleep(min(pause * 2 ** (attempt - 1), 30))
    part.replace(target)
    version.unlink(missing_ok=True)


def _continue(url: str, part: Path, version: Path, timeout: float, progress: bool | None) -> None:
    """One connection: add to `part` what it lacks, or start over if the server cannot or must not continue."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": f"usetta/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if version.exists():
            headers["If-Range"] = version.read_text(encoding="utf-8")
    try:
        response = _opener(url).open(urllib.request.Request(url, headers=headers), timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        with error:
            if _is_whole(error, have):
                return
        raise _refusal(url, part, error) from error
    except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
        raise _CutError(_reason(error)) from error
    with response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            have = 0
        elif not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            part.unlink()
            raise _CutError("the server sent another part than it was asked for")
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        _remember(version, response.headers)
        chunks = track(_chunks(response), int(length or 0) // _CHUNK, f"{part.stem} (MiB)", progress)
        with part.open("ab" if have else "wb") as file:
            for chunk in chunks:
                file.write(chunk)
    size = part.stat().st_size
    if total is not None and size < total:
        raise _CutError(f"the connection ended after {size:,} of {total:,} bytes")


def _is_whole(error: urllib.error.HTTPError, have: int) -> bool:
    """Whether the server says that nothing is left to send."""
    return error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and (
        error.headers.get("Content-Range") == f"bytes */{have}"
    )


def _refusal(url: str, part: Path, error: urllib.error.HTTPError) -> Exception:
    if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        part.unlink()
        return _CutError("the part on the disk is not of the file that the server has now")
    if error.code in _PASSING:
        return _CutError(f"HTTP {error.code} {error.reason}")
    return DataError(
        f"{url} cannot be downloaded: HTTP {error.code} {error.reason}",
        "the file may have moved; put it there by hand as the documentation of datasets says",
    )


def _remember(version: Path, headers: Any) -> None:
    """Keep what tells versions of the file apart; a weak ETag does not promise equal bytes."""
    tag = headers.get("ETag")
    told = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
    if told:
        version.write_text(told, encoding="utf-8")
    else:
        version.unlink(missing_ok=True)


def _chunks(response: IO[bytes]) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _CutError(_reason(error)) from error
        if not chunk:
            return
        yield chunk


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error) or type(error).__name__


def _permit(url: str, asked: str = "") -> None:
    """Refuse what could be read or changed on the way; `asked` is the address that led to this one."""
    parts = urlsplit(url)
    local = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if parts.scheme == "https" or (local and urlsplit(asked or url).hostname in _LOOPBACK):
        return
    raise DataError(
        f"{asked} leads to {url}, which is not https" if asked else f"{url} is not https", "it is not downloaded"
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _permit(newurl, req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(url: str) -> urllib.request.OpenerDirector:
    if urlsplit(url).hostname in _LOOPBACK:  # a proxy of the network does not know this machine's servers
        return urllib.request.build_opener(_Redirects, urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(_Redirects)
