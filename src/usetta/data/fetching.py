"""Get named datasets: lists, archives, and copies on the hub; what only people can do is returned as steps.

A dataset has several sources, which are tried in order: the archive of its authors, compared with its published
checksum, then mirrors on the Hugging Face hub, whose content is compared with the list of the dataset. A source that
fails is reported, and the next one is tried.

Everything that is not yet a dataset is kept in `.usetta` below the folder of the datasets: unfinished downloads, and
for each dataset what was downloaded, with its hashes. A second call finds the work done and does nothing; one that was
killed is continued by the next.
"""

import os
import posixpath
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from usetta import __version__
from usetta.data.dataset import DataError, NoListError
from usetta.data.download import HUB_PAGE, checksums, download, hub_address, require_space, verify
from usetta.data.lists import put_list
from usetta.data.load import Report, check_one
from usetta.data.mirrors import Log, fetch_mirror, import_files, packed_files, save_note, unpack_packed
from usetta.data.named import DATASETS, Archive, Mirror, NamedDataset
from usetta.data.unpacking import refuse_occupied, unpack
from usetta.progress import bar

JOBS = 4
"""Downloads at the same time."""


@dataclass(frozen=True)
class Fetched:
    """What `fetch` achieved."""

    report: Report
    """The state of the dataset afterwards."""
    by_hand: tuple[str, ...]
    """What people have to do before it is complete, step by step."""
    problems: tuple[str, ...] = ()
    """Why sources could not be used."""


@dataclass(frozen=True)
class PlannedFetch:
    """What `fetch` would do for a dataset."""

    name: str
    state: str
    """On the disk now."""
    sources: tuple[str, ...]
    """Of the images, in the order they are tried; empty if none are to be downloaded."""
    list_file: str
    """The list that is to be downloaded, if any."""
    bytes: int
    """About how many are downloaded from the first source."""
    space: int
    """About how many the disk needs while it works."""
    licence: str


def plan_fetch(names: Sequence[str], root: str | os.PathLike[str], *, unpacked: bool = False) -> list[PlannedFetch]:
    """What `fetch` would do for datasets below `root`; all that have a source, if no names are given."""
    chosen = [DATASETS.get(name) for name in names] if names else fetchable()
    place = _place(root)
    return [_plan(named, place, unpacked) for named in chosen]


def fetchable() -> list[NamedDataset]:
    """The datasets that have a source."""
    return [named for named in map(DATASETS.get, DATASETS) if named.source]


def _plan(named: NamedDataset, place: Path, unpacked: bool) -> PlannedFetch:
    report, source = check_one(named, place), named.source
    sources = _sources(named) if report.state == "absent" else []
    texts = [urlsplit(part.url).netloc if isinstance(part, Archive) else _described(part) for part in sources]
    lacking = source.split.file if source and source.split and _lacks_list(named, place) else ""
    size = sources[0].bytes if sources else 0
    # Beside an archive stand its images while it is unpacked; a mirror is read where it is.
    space = size * (2 if sources and (isinstance(sources[0], Archive) or unpacked) else 1)
    staged = place / ".usetta" / named.name
    done = sum(file.stat().st_size for file in staged.rglob("*") if file.is_file()) if staged.is_dir() else 0
    licence = source.licence if source else ""
    return PlannedFetch(named.name, report.state, tuple(texts), lacking, size, max(space - done, 0), licence)


def _described(mirror: Mirror) -> str:
    return f"hub: {mirror.repo}{' (gated)' if mirror.gated else ''}"


def _sources(named: NamedDataset) -> list[Archive | Mirror]:
    source = named.source
    return [*([source.archive] if source and source.archive else []), *(source.mirrors if source else ())]


def fetch_all(
    plan: Sequence[PlannedFetch],
    root: str | os.PathLike[str],
    log: Log,
    *,
    keep_archive: bool = False,
    unpacked: bool = False,
    jobs: int = JOBS,
    progress: bool | None = None,
) -> dict[str, Fetched | DataError]:
    """Fetch what is planned, several at a time; a dataset that fails does not stop the others."""
    place = _place(root)
    place.mkdir(parents=True, exist_ok=True)
    require_space(place, sum(step.space for step in plan), "this")

    def one(step: PlannedFetch) -> Fetched | DataError:
        try:
            own_log: Log = (lambda text: log(f"{step.name}: {text}")) if len(plan) > 1 else log
            return fetch(
                step.name,
                place,
                own_log,
                keep_archive=keep_archive,
                unpacked=unpacked,
                jobs=max(1, jobs // len(plan)),
                progress=progress,
            )
        except DataError as error:
            return error

    pool = ThreadPoolExecutor(jobs)
    try:
        with bar(len(plan), "Fetching", progress) as tick:
            steps = {pool.submit(one, step): step for step in plan}
            for done in as_completed(steps):
                tick(1, steps[done].name)
            return {step.name: done.result() for done, step in steps.items()}
    finally:  # whoever presses Ctrl-C does not want to wait for the downloads, which the next call continues
        pool.shutdown(wait=False, cancel_futures=True)


def fetch(
    name: str,
    root: str | os.PathLike[str],
    log: Log,
    *,
    keep_archive: bool = False,
    unpacked: bool = False,
    jobs: int = JOBS,
    progress: bool | None = None,
) -> Fetched:
    """Bring the dataset `name` below `root`, unless it is there already in any known layout.

    `log` is called with a line about each step. An archive is unpacked into CoOp's layout, a mirror on the hub is read
    in place unless `unpacked`. A dataset that is there but incomplete or malformed is an error: it is not overwritten.
    """
    named = DATASETS.get(name)
    place = _place(root)
    place.mkdir(parents=True, exist_ok=True)
    report = check_one(named, place)
    if report.state in ("incomplete", "broken"):
        raise DataError(f"{named.name} in {place}: {report.problem}", report.todo)
    if named.source is None and report.state != "complete":
        raise DataError(f"{named.name} cannot be fetched: it has no known source", report.todo)
    problems: list[str] = []
    staging = place / ".usetta" / named.name
    if report.state == "complete" and not staging.with_suffix(".json").exists():
        shutil.rmtree(staging, ignore_errors=True)  # of a call that was killed after its last step but one
    if report.state != "complete":
        with exclusive(place / ".usetta" / f"{named.name}.lock", named.name):
            problems += _fetch_list(named, place, log)
            if report.state == "absent":
                get = partial(_fetch_images, named, place, log, keep_archive, unpacked, jobs, progress)
                problems += _first_that_works(named, get, log)
        report = check_one(named, place)
    return Fetched(report, _by_hand(named, report, place), tuple(problems))


def import_dataset(
    name: str,
    sources: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    log: Log,
    *,
    unpacked: bool = False,
    progress: bool | None = None,
) -> Report:
    """Make files that lie elsewhere the dataset `name` below `root`: image files, Parquet files or WebDataset tars.

    They stay where they are and are read there, unless `unpacked`. Ids, labels and names are those of the list.
    """
    named = DATASETS.get(name)
    place = _place(root)
    place.mkdir(parents=True, exist_ok=True)
    report = check_one(named, place)
    if report.state not in ("absent", "no list"):
        raise DataError(f"{named.name} is already in {place}: {report.where}", "choose another folder")
    with exclusive(place / ".usetta" / f"{named.name}.lock", named.name):
        files = packed_files([Path(source).expanduser() for source in sources])
        by = import_files(named, files, place)
        log(f"images recognised {by}")
        if unpacked:
            unpack_packed(named, place, progress=progress)
            _fetch_list(named, place, log)
    return check_one(named, place)


def _place(root: str | os.PathLike[str]) -> Path:
    return Path(root).expanduser().absolute()


def _fetch_list(named: NamedDataset, place: Path, log: Log) -> list[str]:
    """Put the list beside its images, if it is missing; returns why that failed."""
    source = named.source
    if not (source and source.split and _lacks_list(named, place)):
        return []
    try:
        put_list(source.split, place / source.folder, log)
    except DataError as error:
        return [str(error)]
    return []


def _first_that_works(named: NamedDataset, get: Callable[[Archive | Mirror], None], log: Log) -> list[str]:
    """Try the sources in order; returns the problems of those that failed, or raises if there is no other way."""
    problems: list[DataError] = []
    sources, by_hand = _sources(named), named.source.by_hand if named.source else ()
    for source in sources:
        try:
            get(source)
        except (DataError, ValueError) as error:  # ValueError: a package that reads Parquet is not installed
            problems.append(error if isinstance(error, DataError) else DataError(str(error)))
            if by_hand or len(sources) > 1:  # else it is raised
                log(str(error))
        else:
            break
    else:
        if problems and not by_hand:
            if len(problems) == 1:
                raise problems[0]
            raise DataError(
                f"no source of {named.name} can be used: {'; '.join(error.problem for error in problems)}",
                "rerun the same command later",
            )
    return [str(error) for error in problems]


def _fetch_images(
    named: NamedDataset,
    place: Path,
    log: Log,
    keep_archive: bool,
    unpacked: bool,
    jobs: int,
    progress: bool | None,
    source: Archive | Mirror,
) -> None:
    if isinstance(source, Archive):
        refuse_occupied(place / source.target)
        _fetch_archive(named.name, source, place, log, keep_archive, progress)
        return
    fetch_mirror(named, source, place, log, jobs=jobs, progress=progress)
    if unpacked:
        unpack_packed(named, place, progress=progress)


def _fetch_archive(
    name: str, archive: Archive, place: Path, log: Log, keep_archive: bool, progress: bool | None
) -> None:
    """Download, verify and unpack an archive, and note what it was."""
    file = place / ".usetta" / name / posixpath.basename(urlsplit(archive.url).path)
    url = archive.url.replace(HUB_PAGE, hub_address(), 1)
    if not file.exists():
        log(f"downloading {url}")
        download(url, file, progress=progress)
    hashes = checksums(file, "md5", "sha256")
    if archive.checksum:
        verify(file, url, archive.checksum, hashes)
    else:
        log(f"{file.name} has no published checksum; its SHA-256 is {hashes['sha256']}")
    log(f"unpacking {file.name}")
    try:
        unpack(file, archive.member, place / archive.target, within=archive.within)
    except DataError:
        file.unlink()  # else the next call would find the same bad archive
        raise
    facts = {"url": url, "bytes": file.stat().st_size, **hashes}
    if not keep_archive:
        shutil.rmtree(file.parent)
    save_note(place, name, facts | {"published_checksum": archive.checksum, "usetta": __version__})


def _by_hand(named: NamedDataset, report: Report, place: Path) -> tuple[str, ...]:
    source = named.source
    if source is None:
        return ()
    folder = place / source.folder
    steps = []
    if report.state == "absent":
        steps += [step.format(folder=folder) for step in source.by_hand]
    if source.split and _lacks_list(named, place):
        steps.append(f"Download {source.split.file} from {source.split.url} and put it into {folder}/.")
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
