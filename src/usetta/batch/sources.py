"""Where images come from: folders, patterns, lists, Parquet files and tars, here or behind a URL, as one stream.

The stream is never a list. Folders are read one at a time and in order, tables by a few rows, archives from front to
back, so ten million images take no more memory than ten. An image is known by its source and by its key in it:

    folder          path below the folder
    pattern         path as it was found
    list            line as it is written
    Parquet         path as it is written, or the number of the row if the table holds the bytes
    tar             name of the member
    image         its name

Paths and URLs are opened where the work is done; bytes out of tables and archives travel with it.
"""

import glob
import io
import os
import tarfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from usetta.batch.files import (
    MAX_BYTES,
    SourceError,
    absolute,
    beside,
    explained,
    file_system,
    is_image,
    is_url,
    opened,
    read_image,
    within_limit,
)
from usetta.batch.tables import read_table
from usetta.images import ImageError

_TARS = (".tar", ".tar.gz", ".tgz")
_TABLES = (".parquet", ".pq")


@dataclass(frozen=True)
class BatchImage:
    """An image that is not opened yet; it travels."""

    source: str
    key: str
    place: str | bytes
    """Path or URL, or the bytes themselves."""
    problem: str = ""
    """Why it cannot be had at all."""

    def read(self) -> str | bytes:
        """What `images.open_image` takes."""
        if self.problem:
            raise ImageError(self.key, self.problem)
        return within_limit(self.place, self.key) if isinstance(self.place, bytes) else read_image(self.place)


def check(sources: Sequence[str]) -> None:
    """Tell what is not there before a model is loaded."""
    for source in sources:
        place = source.removeprefix("@")
        if not is_url(place) and not Path(place).expanduser().exists() and not _is_pattern(source):
            raise SourceError(f"{place}: no such file or folder")


def images(sources: Sequence[str], column: str | None = None) -> Generator[BatchImage, None, None]:
    """The images of all sources, one after the other. `column` is that of Parquet files, where they have several."""
    for source in sources:
        for found in _of_source(source, column):
            if (found.source + found.key).isascii():
                yield found
            else:  # names of files may hold bytes that are no text
                yield replace(found, source=_as_text(found.source), key=_as_text(found.key))


def _of_source(source: str, column: str | None) -> Iterator[BatchImage]:
    if _is_list(source):
        return _of_list(source.removeprefix("@"))
    return _of_pattern(source, column) if _is_pattern(source) else _of_place(source, column)


def _as_text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_list(source: str) -> bool:
    return source.startswith("@") or source.lower().endswith(".txt")


def _is_pattern(source: str) -> bool:
    if not glob.has_magic(source):
        return False
    return is_url(source) or not Path(source).expanduser().exists()


def _of_place(place: str, column: str | None) -> Iterator[BatchImage]:
    if place.lower().endswith(_TARS):
        yield from _of_tar(place)
    elif place.lower().endswith(_TABLES) and not _is_folder(place):
        for key, found in read_table(place, column):
            yield BatchImage(place, key, beside(place, found) if isinstance(found, str) else found)
    elif _is_folder(place):
        yield from (BatchImage(place, key, found) for key, found in _below(place))
    else:
        yield BatchImage(place, PurePosixPath(place).name, absolute(place))


def _is_folder(place: str) -> bool:
    if not is_url(place):
        return Path(place).expanduser().is_dir()
    system, path = file_system(place)
    try:
        return bool(system.isdir(path))
    except Exception as error:
        raise SourceError(f"{place} cannot be looked at: {explained(error)}") from error


def _below(folder: str) -> Iterator[tuple[str, str]]:
    """Images in a folder and below, by their path in it; hidden ones are left out, links to folders followed."""
    if is_url(folder):
        yield from _below_url(folder)
        return
    root, seen = absolute(folder), set[str]()
    waiting = [""]
    while waiting:
        here = waiting.pop()
        real = os.path.realpath(Path(root, here))
        if real in seen:  # links may lead in circles
            continue
        seen.add(real)
        folders = []
        try:
            with os.scandir(Path(root, here)) as entries:
                names = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
        except OSError as error:
            raise SourceError(f"{Path(root, here)} cannot be listed: {explained(error)}") from error
        for name, is_dir in names:
            inside = f"{here}/{name}" if here else name
            if is_dir:
                folders.append(inside)
            elif is_image(name):
                yield inside, str(Path(root, inside))
        waiting += reversed(folders)


def _below_url(folder: str) -> Iterator[tuple[str, str]]:
    system, root = file_system(folder)
    root = root.rstrip("/")
    try:
        for here, _folders, names in system.walk(root, on_error="raise"):
            for name in sorted(names):
                path = f"{here.rstrip('/')}/{name}"
                key = path.removeprefix(root).lstrip("/")
                if is_image(key):
                    yield key, system.unstrip_protocol(path)
    except Exception as error:
        raise SourceError(f"{folder} cannot be listed: {explained(error)}") from error


def _of_pattern(pattern: str, column: str | None) -> Iterator[BatchImage]:
    """What a pattern matches: archives, tables and folders are sources of their own, in the order they are found in."""
    found: Iterator[str]
    if is_url(pattern):
        system, path = file_system(pattern)
        found = (system.unstrip_protocol(each) for each in sorted(system.glob(path)))
    else:
        found = glob.iglob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 - a `Path` has no patterns
    for place in found:
        if place.lower().endswith((*_TARS, *_TABLES)) or _is_folder(place):
            yield from _of_place(place, column)
        elif is_image(PurePosixPath(place).name):
            yield BatchImage(pattern, place, absolute(place))


def _of_list(file: str) -> Iterator[BatchImage]:
    with opened(file) as binary:
        try:
            for line in io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape"):
                written = line.strip()
                if written:
                    yield BatchImage(file, written, beside(file, written))
        except OSError as error:
            raise SourceError(f"{file} cannot be read to its end: {explained(error)}") from error


def _of_tar(file: str) -> Iterator[BatchImage]:
    """The images of an archive, which is read once from front to back. A damaged one gives what it has."""
    last = "its beginning"
    with opened(file) as binary:
        try:
            with tarfile.open(fileobj=binary, mode="r|*") as archive:
                for member in archive:
                    last = member.name
                    if not member.isfile() or not is_image(member.name):
                        continue
                    if member.size > MAX_BYTES:
                        limit = f"file is larger than the limit of {MAX_BYTES:,} bytes"
                        yield BatchImage(file, member.name, b"", limit)
                        continue
                    inside = archive.extractfile(member)
                    assert inside is not None
                    yield BatchImage(file, member.name, inside.read())
        except (tarfile.TarError, OSError, EOFError) as error:
            yield BatchImage(file, "", b"", f"the archive is damaged after {last} ({explained(error)})")
