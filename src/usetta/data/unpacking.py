"""Take one folder out of an archive.

Every name in the archive is checked, also of members that are not wanted: one that would lead out of the folder it is
unpacked into condemns the archive. The folder is unpacked beside its target and moved there when it is whole, so a
folder that exists is complete.
"""

import lzma
import posixpath
import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path

from usetta.data.dataset import DataError

_ZIP = b"PK\x03\x04"


def unpack(archive: Path, member: str, target: Path, *, within: str = "") -> None:
    """Put the folder `member` of `archive`, or of the archive `within` it, at `target`, which must be free."""
    refuse_occupied(target)
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


def refuse_occupied(target: Path) -> None:
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
