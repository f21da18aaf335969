"""Bring a file from the web to the disk, whole and verified, however often the connection ends.

A download goes to `NAME.part`, which becomes `NAME` when all bytes are there. A cut connection is resumed where it
ended (HTTP Range), and so is a download that was killed. The version of the file that the server reports is kept
beside the part and sent along (If-Range), so that a part is never continued with another file; a server that cannot
continue starts over. A server that asks to wait (Retry-After) is waited for. Only https is spoken, also after
redirects; plain http is for servers on this machine. A token for the Hugging Face hub, from where huggingface_hub
takes it, is sent to the hub and nowhere else.
"""

import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from usetta import __version__
from usetta.data.dataset import DataError
from usetta.progress import track
from usetta.web import LOOPBACK, TIMEOUT, opener, reason

HUB = "HF_ENDPOINT"
"""Environment variable: the address of the Hugging Face hub, or of a mirror of it."""
GITHUB = "USETTA_GITHUB_RAW"
"""Environment variable: the address of raw files on GitHub, or of a mirror of it."""
HUB_PAGE = "https://huggingface.co"
_CHUNK = 1 << 20
_LONGEST_WAIT = 300.0
"""Seconds, however long a server asks to wait."""
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes of answers that may be different next time."""


def hub_address() -> str:
    """Where the Hugging Face hub is."""
    return (os.environ.get(HUB) or HUB_PAGE).rstrip("/")


def github_address() -> str:
    """Where raw files of GitHub repositories are."""
    return (os.environ.get(GITHUB) or "https://raw.githubusercontent.com").rstrip("/")


class NotFoundError(DataError):
    """The server has no such file."""


class NoAccessError(DataError):
    """The server wants to know who asks, or refuses whoever asked."""


def checksums(file: Path, *kinds: str) -> dict[str, str]:
    """Hashes of a file by kind: `md5`, `sha256`, or `blob`, the id that git gives it."""
    hashes = {kind: hashlib.new("sha1" if kind == "blob" else kind, usedforsecurity=False) for kind in kinds}
    if "blob" in hashes:
        hashes["blob"].update(f"blob {file.stat().st_size}\0".encode())
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            for running in hashes.values():
                running.update(chunk)
    return {kind: running.hexdigest() for kind, running in hashes.items()}


def verify(file: Path, url: str, published: str, known: Mapping[str, str] | None = None) -> None:
    """Compare a download with its published checksum, such as `md5:...`; a file that differs is deleted.

    `known`: checksums of the file that were computed already.
    """
    kind, _, expected = published.partition(":")
    found = (known or checksums(file, kind))[kind]
    if found != expected:
        file.unlink()
        raise DataError(
            f"{url}: the {kind} of the download is {found}, the published one is {expected}",
            "the file was deleted; try again",
        )


class _CutError(Exception):
    """The connection ended before the file did; `wait` is how many seconds the server asks to wait."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


class _NoConnectionError(_CutError):
    """There was no connection at all."""


def download(
    url: str,
    target: Path,
    *,
    attempts: int = 8,
    pause: float = 1.0,
    timeout: float = TIMEOUT,
    progress: bool | None = None,
) -> None:
    """Bring `url` to `target`, with up to `attempts` connections and growing pauses (seconds) between them.

    If there is no first connection, the machine is probably offline, and waiting would not help.
    """
    require_https(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    part, version = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.version")
    for attempt in range(1, attempts + 1):
        try:
            _continue(url, part, version, timeout, progress)
            break
        except _CutError as error:
            if attempt == 1 and isinstance(error, _NoConnectionError):
                raise DataError(
                    f"cannot connect to {urlsplit(url).hostname}: {error}",
                    "check the network connection and rerun the same command",
                ) from error
            if attempt == attempts:
                raise DataError(
                    f"the download of {url} failed {attempts} times, most recently: {error}",
                    "rerun the same command to resume",
                ) from error
            time.sleep(max(min(pause * 2 ** (attempt - 1), 30), error.wait))
    part.replace(target)
    version.unlink(missing_ok=True)


def _continue(url: str, part: Path, version: Path, timeout: float, progress: bool | None) -> None:
    """One connection: add to `part` what it lacks, or start over if the server cannot or must not continue."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": f"usetta/{__version__}", "Accept-Encoding": "identity"} | _authorization(url)
    if have:
        headers["Range"] = f"bytes={have}-"
        if version.exists():
            headers["If-Range"] = version.read_text(encoding="utf-8")
    try:
        response = opener(url, _Redirects).open(urllib.request.Request(url, headers=headers), timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        with error:
            if _is_whole(error, have):
                return
        raise _refusal(url, part, error) from error
    except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
        raise _NoConnectionError(reason(error)) from error
    with response:
        if response.status != HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file, so the part is overwritten
        elif not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            part.unlink()
            raise _CutError("the server sent a different range than requested")
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        require_space(part.parent, int(length or 0), url)
        _keep_version(version, response.headers)
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
        return _CutError("the file on the server has changed since the download began")
    if error.code in _TEMPORARY:
        return _CutError(f"HTTP {error.code} {error.reason}", _retry_after(error.headers))
    problem = f"{url} cannot be downloaded: HTTP {error.code} {error.reason}"
    if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return NoAccessError(problem, "it needs an account; set HF_TOKEN for files on the Hugging Face hub")
    moved = "the file may have moved; download it yourself and unpack it as docs/data.md describes"
    return (NotFoundError if error.code == HTTPStatus.NOT_FOUND else DataError)(problem, moved)


def _retry_after(headers: Any) -> float:
    """Seconds that the server asks to wait, where it gives a number of them."""
    text = (headers.get("Retry-After") or "").strip()
    return min(float(text), _LONGEST_WAIT) if text.isdecimal() else 0.0


def _authorization(url: str) -> dict[str, str]:
    """The header that shows the hub who asks; nothing for other servers, or without a token."""
    if not url.startswith(f"{hub_address()}/"):
        return {}
    from huggingface_hub import get_token

    token = get_token()
    return {"Authorization": f"Bearer {token}"} if token else {}


def require_space(folder: Path, needed: int, what: str) -> None:
    """An error if the disk of `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            f"{what} needs {needed / 1e9:,.1f} GB, and {folder} has {free / 1e9:,.1f} GB left",
            "free some space, or choose another folder",
        )


def _keep_version(version: Path, headers: Any) -> None:
    """Keep what distinguishes versions of the file; a weak ETag does not promise equal bytes."""
    tag = headers.get("ETag")
    validator = tag if tag and not tag.startswith("W/") else headers.get("Last-Modified")
    if validator:
        version.write_text(validator, encoding="utf-8")
    else:
        version.unlink(missing_ok=True)


def _chunks(response: IO[bytes]) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise _CutError(reason(error)) from error
        if not chunk:
            return
        yield chunk


def require_https(url: str, asked: str = "") -> None:
    """Refuse an address whose content others could read or change; `asked` is the address that led to it."""
    parts = urlsplit(url)
    local = parts.scheme == "http" and parts.hostname in LOOPBACK
    if parts.scheme == "https" or (local and urlsplit(asked or url).hostname in LOOPBACK):
        return
    raise DataError(f"{asked} redirects to {url}, which is not https" if asked else f"{url} is not https", "refused")


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        require_https(newurl, req.full_url)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")  # the hub redirects to storage of others, whom it is not for
        return request
