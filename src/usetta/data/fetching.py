"""Get a named dataset: download its archive, verify and unpack it; what only people can do is returned as steps.

A download goes to `NAME.part`, which becomes `NAME` when all bytes are there. A cut connection is resumed where it
ended (HTTP Range), and so is a download that was killed. The version of the file that the server reports is kept
beside the part and sent along (If-Range), so that a part is never continued with another file; a server that cannot
continue starts over. Only https is spoken, also after redirects; plain http is for servers on this machine.

Of an archive one folder is taken. Every name in it is checked, also of members that are not wanted: one that would lead
out of the folder it is unpacked into condemns the archive. The folder is unpacked beside its target and moved there
when it is whole, so a folder that exists is complete.

Everything that is not yet a dataset is kept in `.usetta` below the folder of the datasets: unfinished downloads, and
for each dataset what was downloaded, with its hashes. A second call finds the work done and does nothing.
"""

import hashlib
import http.client
import json
import lzma
import os
import posixpath
import shutil
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from usetta import __version__
from usetta.data.dataset import DataError, NoListError
from usetta.data.load import Report, check_one
from usetta.data.named import DATASETS, Archive, NamedDataset
from usetta.files import write_atomically
from usetta.progress import track
from usetta.web import LOOPBACK, TIMEOUT, opener, reason

_CHUNK = 1 << 20
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes of answers that may be different next time."""
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Fetched:
    """What `fetch` achieved."""

    report: Report
    """The state of the dataset afterwards."""
    by_hand: tuple[str, ...]
    """What people have to do before it is complete, step by step."""


def fetch(
    name: str,
    root: str | os.PathLike[str],
    log: Callable[[str], object],
    *,
    keep_archive: bool = False,
    progress: bool | None = None,
) -> Fetched:
    """Bring the dataset `name` below `root`, in CoOp's layout, unless it is there already in any known one.

    `log` is called with a line about each step. A dataset that is there but incomplete or malformed is an error: it is
    not overwritten.
    """
    named = DATASETS.get(name)
    place = Path(root).expanduser().absolute()
    place.mkdir(parents=True, exist_ok=True)
    report = check_one(named, place)
    if report.state in ("incomplete", "broken"):
        raise DataError(f"{named.name} in {place}: {report.problem}", report.todo)
    if named.source is None and report.state != "complete":
        raise DataError(f"{named.name} cannot be fetched: it has no known source", report.todo)
    archive = named.source.archive if named.source else None
    if archive and report.state == "absent":
        _refuse_occupied(place / archive.target)
        with exclusive(place / ".usetta" / f"{named.name}.lock", named.name):
            _fetch_archive(named.name, archive, place, log, keep_archive, progress)
        report = check_one(named, place)
    return Fetched(report, _by_hand(named, report, place))


def _fetch_archive(
    name: str, archive: Archive, place: Path, log: Callable[[str], object], keep_archive: bool, progress: bool | None
) -> None:
    """Download, verify and unpack an archive, and note what it was."""
    file = place / ".usetta" / name / posixpath.basename(urlsplit(archive.url).path)
    if not file.exists():
        log(f"downloading {archive.url}")
        download(archive.url, file, progress=progress)
    hashes = _hashes(file)
    _verify(file, archive, hashes, log)
    log(f"unpacking {file.name}")
    try:
        unpack(file, archive.member, place / archive.target, within=archive.within)
    except DataError:
        file.unlink()  # else the next call would find the same bad archive
        raise
    note = {"url": archive.url, "bytes": file.stat().st_size, **hashes}
    note |= {"published_checksum": archive.checksum, "usetta": __version__}
    write_atomically(place / ".usetta" / f"{name}.json", f"{json.dumps(note, indent=2)}\n".encode())
    if not keep_archive:
        file.unlink()
        file.parent.rmdir()


def _hashes(file: Path) -> dict[str, str]:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            md5.update(chunk)
            sha256.update(chunk)
    return {"md5": md5.hexdigest(), "sha256": sha256.hexdigest()}


def _verify(file: Path, archive: Archive, hashes: dict[str, str], log: Callable[[str], object]) -> None:
    if archive.checksum is None:
        log(f"{file.name} has no published checksum; its SHA-256 is {hashes['sha256']}")
        return
    kind, _, published = archive.checksum.partition(":")
    if hashes[kind] != published:
        file.unlink()
        raise DataError(
            f"{archive.url}: the {kind} of the download is {hashes[kind]}, the published one is {published}",
            "the file was deleted; try again",
        )


def _by_hand(named: NamedDataset, report: Report, place: Path) -> tuple[str, ...]:
    source = named.source
    if source is None:
        return ()
    folder = place / source.folder
    steps = []
    if report.state == "absent":
        steps += [step.format(folder=folder) for step in source.by_hand]
    if source.list_url and _lacks_list(named, place):
        steps.append(f"Download {source.list_file} from {source.list_url} and put it into {folder}/.")
    return tuple(steps)


def _lacks_list(named: NamedDataset, place: Path) -> bool:
    """Whether the list is missing, with or without the images."""
    try:
        named.read(place)
    except NoListError:
        return True
    except DataError:  # of another kind, which the report is about
        pass
    return False


@contextmanager
def exclusive(lock: Path, name: str) -> Iterator[None]:
    """Hold `lock` as long as this process lives, so that two fetches do not write to the same files."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{name} is being fetched by another process", "wait for it to finish") from error
        yield


# ------------------------------------------------------------------------------------------------------------- download


class _CutError(Exception):
    """The connection ended before the file did."""


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
        return _CutError(f"HTTP {error.code} {error.reason}")
    return DataError(
        f"{url} cannot be downloaded: HTTP {error.code} {error.reason}",
        "the file may have moved; download it yourself and unpack it as docs/data.md describes",
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
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# --------------------------------------------------------------------------------------------------------------- unpack


def unpack(archive: Path, member: str, target: Path, *, within: str = "") -> None:
    """Put the folder `member` of `archive`, or of the archive `within` it, at `target`, which must be free."""
    _refuse_occupied(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.unpacking"
    shutil.rmtree(beside, ignore_errors=True)
    try:
        if within:
            _extract(archive, within, beside)
            archive = beside / within
            if not archive.is_file():
                raise DataError(f"the archive does not contain {within}", "the source may have changed")
        _extract(archive, member, beside)
        if not (beside / member).is_dir():
            raise DataError(f"{archive.name} does not contain the folder {member}", "the source may have changed")
        if target.is_dir():
            target.rmdir()
        (beside / member).rename(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _refuse_occupied(target: Path) -> None:
    """An error unless `target` does not exist or is an empty folder."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"{target} already exists", "move it away")


def _extract(archive: Path, wanted: str, into: Path) -> None:
    with archive.open("rb") as file:
        is_zip = file.read(4) == _ZIP  # by content: an archive named .tar.gz may be a plain tar
    into.mkdir(parents=True, exist_ok=True)
    try:
        (_extract_zip if is_zip else _extract_tar)(archive, wanted, into)
    except tarfile.FilterError as error:
        raise DataError(f"{archive.name} is not safe to unpack: {error}", "nothing was unpacked") from error
    except (tarfile.ReadError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's fault; gzip and bz2 give no number
            raise
        raise DataError(f"{archive.name} is damaged: {str(error).splitlines()[0]}", "download it again") from error


def _extract_tar(archive: Path, wanted: str, into: Path) -> None:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if _is_wanted(member.name, wanted):
                tar.extract(member, into, filter="data")  # refuses what leads out of `into`, links and devices included
            else:
                tarfile.data_filter(member, str(into))  # raises on names that would lead out


def _extract_zip(archive: Path, wanted: str, into: Path) -> None:
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            name = member.orig_filename.replace("\\", "/")
            leaves = name.startswith("/") or ":" in name.split("/")[0] or ".." in name.split("/")
            if leaves or stat.S_ISLNK(member.external_attr >> 16):
                raise DataError(f"{archive.name} is not safe to unpack: it contains {name}", "nothing was unpacked")
            if _is_wanted(name, wanted):
                members.extract(member, into)


def _is_wanted(name: str, wanted: str) -> bool:
    path = posixpath.normpath(name)
    return path == wanted or path.startswith(f"{wanted}/")
