"""Get one of the paper's datasets: what can be downloaded is, and for the rest the steps are told.

Everything that is not yet a dataset is kept in `.usetta` below the folder of the datasets: downloads under way, and
for each set what was downloaded, with its hashes. A second call finds the work done and does nothing.
"""

import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from usetta import __version__
from usetta.data.benchmark import Benchmark, get_benchmark
from usetta.data.checking import Report, check_one
from usetta.data.dataset import DataError
from usetta.data.download import download
from usetta.data.locate import find_list
from usetta.data.sources import SOURCES, Archive
from usetta.data.unpack import refuse_occupied, unpack


@dataclass(frozen=True)
class Fetched:
    """What `fetch` achieved."""

    report: Report
    """The state of the set afterwards."""
    by_hand: tuple[str, ...]
    """What people have to do before it is complete, in order."""


def fetch(
    name: str,
    root: str | os.PathLike[str],
    say: Callable[[str], object],
    *,
    keep_archive: bool = False,
    progress: bool | None = None,
) -> Fetched:
    """Bring the dataset `name` below `root`, in CoOp's layout, unless it is there already in any known one.

    `say` is told what happens. A set that is there but incomplete or malformed is an error: it is not overwritten.
    """
    benchmark = get_benchmark(name)
    place = Path(root).expanduser().absolute()
    place.mkdir(parents=True, exist_ok=True)
    report = check_one(benchmark, place)
    if report.state in ("incomplete", "broken"):
        raise DataError(f"{benchmark.name} in {place}: {report.problem}", report.todo)
    archive = SOURCES[benchmark.name].archive
    if archive and report.state == "absent":
        refuse_occupied(place / archive.target)
        with _alone(place / ".usetta" / f"{benchmark.name}.lock", benchmark.name):
            _bring(benchmark.name, archive, place, say, keep_archive, progress)
        report = check_one(benchmark, place)
    return Fetched(report, _by_hand(benchmark, report, place))


def _bring(
    name: str, archive: Archive, place: Path, say: Callable[[str], object], keep_archive: bool, progress: bool | None
) -> None:
    """Download, verify, unpack, note."""
    file = place / ".usetta" / name / posixpath.basename(urlsplit(archive.url).path)
    if not file.exists():
        say(f"downloading {archive.url}")
        download(archive.url, file, progress=progress)
    hashes = _hashes(file)
    _verify(file, archive, hashes, say)
    say(f"unpacking {file.name}")
    try:
        unpack(file, archive.member, place / archive.target, within=archive.within)
    except DataError:
        file.unlink()  # else the next call would find the same bad archive
        raise
    note = {"url": archive.url, "bytes": file.stat().st_size, **hashes}
    note |= {"published_checksum": archive.checksum, "usetta": __version__}
    (place / ".usetta" / f"{name}.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    if not keep_archive:
        file.unlink()
        file.parent.rmdir()


def _hashes(file: Path) -> dict[str, str]:
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            md5.update(chunk)
            sha256.update(chunk)
    return {"md5": md5.hexdigest(), "sha256": sha256.hexdigest()}


def _verify(file: Path, archive: Archive, hashes: dict[str, str], say: Callable[[str], object]) -> None:
    if archive.checksum is None:
        say(f"no published checksum of {file.name}; its SHA-256 is {hashes['sha256']}")
        return
    kind, _, published = archive.checksum.partition(":")
    if hashes[kind] != published:
        file.unlink()
        raise DataError(
            f"{archive.url} is not the file that was published: its {kind} is {hashes[kind]}, not {published}",
            "it was removed; try again",
        )


def _by_hand(benchmark: Benchmark, report: Report, place: Path) -> tuple[str, ...]:
    source = SOURCES[benchmark.name]
    folder = place / source.folder
    steps = []
    if report.state == "absent":
        steps += [step.format(folder=folder) for step in source.by_hand]
    if source.list_url and find_list(benchmark, place, itself=False) is None:
        steps.append(f"Download {benchmark.split} from {source.list_url} and put it into {folder}/.")
    return tuple(steps)


@contextmanager
def _alone(lock: Path, name: str) -> Iterator[None]:
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
            raise DataError(f"{name} is being fetched by another process", "wait for it") from error
        yield
