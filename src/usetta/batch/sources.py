"""Where images come from: folders, patterns, lists, Parquet files and tars, local or behind a URL, as one stream.

The stream is never a list. Folders are read one at a time and in order, tables a few rows at a time, archives from
front to back, so ten million images take no more memory than ten. An image is identified by its source and its key:

    folder          path below the folder
    pattern         path that matched
    list            line as written
    Parquet         path as written, or the number of the row if the table holds the bytes
    tar             name of the member
    image           file name

URLs are opened by `fsspec`, which also handles credentials; local files do not need it. Paths and URLs are opened by
the worker; bytes from tables and archives are sent to it. An image in memory is limited to `MAX_BYTES`, whatever size
its file claims to have; formats and pixels are checked by `images.open_image`, as everywhere.
"""

import glob
import io
import os
import re
import tarfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any

from usetta.images import SUFFIXES, ImageError

MAX_BYTES = 2**28
"""Of an image that is held in memory before it is decoded."""
_TOO_LARGE = "file is larger than the limit of {:,} bytes"
_TARS = (".tar", ".tar.gz", ".tgz")
_TABLES = (".parquet", ".pq")
_ROWS_AT_ONCE = 64
"""Rows of a table in memory, which may hold images of several megabytes."""
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(::[a-zA-Z][a-zA-Z0-9+.-]*)*://")


class SourceError(ValueError):
    """A source cannot be read at all; the message says why."""


@dataclass(frozen=True)
class BatchImage:
    """An image that is not opened yet, small enough to be sent to a worker."""

    source: str
    key: str
    place: str | bytes
    """Path or URL, or the bytes themselves."""
    problem: str = ""
    """Why it cannot be read, if that is known already."""

    def read(self) -> str | bytes:
        """What `images.open_image` takes: the path of a local file, or the bytes of any other."""
        if self.problem:
            raise ImageError(self.key, self.problem)
        data = self.place
        if isinstance(data, str):
            if not is_url(data):
                return data
            data = _fetch(data)
        if len(data) > MAX_BYTES:
            raise ImageError(self.key, _TOO_LARGE.format(MAX_BYTES))
        return data


def check(sources: Sequence[str]) -> None:
    """Report a missing file before a model is loaded."""
    for source in sources:
        place = source.removeprefix("@")
        if not is_url(place) and not Path(place).expanduser().exists() and not _is_pattern(source):
            raise SourceError(f"{place}: no such file or folder")


def images(sources: Sequence[str], column: str | None = None) -> Generator[BatchImage, None, None]:
    """The images of all sources, one after the other. `column` holds the images of Parquet files that have several."""
    for source in sources:
        for image in _read_source(source, column):
            if (image.source + image.key).isascii():
                yield image
            else:  # file names may contain bytes that are not valid text, and could not be written to a table
                yield replace(image, source=_as_text(image.source), key=_as_text(image.key))


def is_url(place: str) -> bool:
    """Whether `place` is for fsspec, rather than a path on this machine."""
    return bool(_URL.match(place))


def arrow(module: str) -> Any:
    """A module of pyarrow, which is an optional dependency."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"Parquet needs pyarrow: pip install 'usetta[parquet]' ({error})") from None


def _read_source(source: str, column: str | None) -> Iterator[BatchImage]:
    if source.startswith("@") or source.lower().endswith(".txt"):
        return _read_list(source.removeprefix("@"))
    return _read_pattern(source, column) if _is_pattern(source) else _read_place(source, column)


def _read_place(place: str, column: str | None) -> Iterator[BatchImage]:
    if place.lower().endswith(_TARS):
        yield from _read_tar(place)
    elif place.lower().endswith(_TABLES) and not _is_folder(place):
        yield from _read_table(place, column)
    elif _is_folder(place):
        walk = _walk_url(place) if is_url(place) else _walk(place)
        yield from (BatchImage(place, key, path) for key, path in walk)
    else:
        yield BatchImage(place, PurePosixPath(place).name, _absolute(place))


def _walk(folder: str) -> Iterator[tuple[str, str]]:
    """Key and path of the images in a folder and below. Hidden ones are left out, links to folders followed."""
    root, visited = _absolute(folder), set[str]()
    pending = [""]
    while pending:
        relative = pending.pop()
        real = os.path.realpath(Path(root, relative))
        if real in visited:  # links may form a cycle
            continue
        visited.add(real)
        folders = []
        try:
            with os.scandir(Path(root, relative)) as entries:
                names = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
        except OSError as error:
            raise SourceError(f"{Path(root, relative)} cannot be listed: {_explain(error)}") from error
        for name, is_dir in names:
            key = f"{relative}/{name}" if relative else name
            if is_dir:
                folders.append(key)
            elif _is_image(name):
                yield key, str(Path(root, key))
        pending += reversed(folders)


def _walk_url(folder: str) -> Iterator[tuple[str, str]]:
    system, root = _file_system(folder)
    root = root.rstrip("/")
    try:
        for parent, _folders, names in system.walk(root, on_error="raise"):
            for name in sorted(names):
                path = f"{parent.rstrip('/')}/{name}"
                key = path.removeprefix(root).lstrip("/")
                if _is_image(key):
                    yield key, system.unstrip_protocol(path)
    except Exception as error:
        raise SourceError(f"{folder} cannot be listed: {_explain(error)}") from error


def _read_pattern(pattern: str, column: str | None) -> Iterator[BatchImage]:
    """What a pattern matches; archives, tables and folders among it are sources of their own."""
    places: Iterator[str]
    if is_url(pattern):
        system, path = _file_system(pattern)
        places = (system.unstrip_protocol(match) for match in sorted(system.glob(path)))
    else:
        places = glob.iglob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 - Path.glob needs a root
    for place in places:
        if place.lower().endswith((*_TARS, *_TABLES)) or _is_folder(place):
            yield from _read_place(place, column)
        elif _is_image(PurePosixPath(place).name):
            yield BatchImage(pattern, place, _absolute(place))


def _read_list(file: str) -> Iterator[BatchImage]:
    with _opened(file) as binary:
        try:
            for line in io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape"):
                written = line.strip()
                if written:
                    yield BatchImage(file, written, _relative_to(file, written))
        except OSError as error:
            raise SourceError(f"{file} cannot be read to its end: {_explain(error)}") from error


def _read_tar(file: str) -> Iterator[BatchImage]:
    """The images of an archive, which is read once from front to back. A damaged one yields what it has."""
    last = "its beginning"
    with _opened(file) as binary:
        try:
            with tarfile.open(fileobj=binary, mode="r|*") as archive:
                for member in archive:
                    last = member.name
                    if not member.isfile() or not _is_image(member.name):
                        continue
                    if member.size > MAX_BYTES:
                        yield BatchImage(file, member.name, b"", _TOO_LARGE.format(MAX_BYTES))
                        continue
                    content = archive.extractfile(member)
                    assert content is not None
                    yield BatchImage(file, member.name, content.read())
        except (tarfile.TarError, OSError, EOFError) as error:
            yield BatchImage(file, "", b"", f"the archive is damaged after {last} ({_explain(error)})")


def _read_table(file: str, column: str | None) -> Iterator[BatchImage]:
    """Images of a Parquet file: paths or URLs, bytes, or structs of both as datasets on the Hugging Face hub have."""
    parquet = arrow("pyarrow.parquet")
    with _opened(file) as binary:
        try:
            table = parquet.ParquetFile(binary)
        except (ValueError, OSError) as error:
            raise SourceError(f"{file} is not a Parquet file: {_explain(error)}") from error
        name = _choose_column(table.schema_arrow, column, file)
        number = 0
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[name]):
            for value in batch.column(0).to_pylist():
                content = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
                if isinstance(content, str) and content:
                    yield BatchImage(file, content, _relative_to(file, content))
                else:
                    yield BatchImage(file, str(number), content or b"")  # an empty cell is reported as an empty file
                number += 1


def _choose_column(schema: Any, column: str | None, file: str) -> str:
    """The column that holds images: the one that is named, else the only one of bytes, else the only one of texts."""
    types = arrow("pyarrow").types

    def is_bytes(kind: Any) -> bool:
        inner = [kind.field(i).name for i in range(kind.num_fields)] if types.is_struct(kind) else []
        return bool(types.is_binary(kind) or types.is_large_binary(kind)) or {"bytes", "path"} <= {*inner}

    def is_text(kind: Any) -> bool:
        return bool(types.is_string(kind) or types.is_large_string(kind))

    if column is not None:
        if column not in schema.names:
            raise SourceError(f"{file} has no column {column!r}; it has {', '.join(schema.names)}")
        kind = schema.field(column).type
        if not (is_bytes(kind) or is_text(kind)):
            raise SourceError(f"the column {column!r} of {file} holds neither paths nor bytes but {kind}")
        return column
    for fits in (is_bytes, is_text):
        names = [field.name for field in schema if fits(field.type)]
        if len(names) == 1:
            return str(names[0])
        if names:
            raise SourceError(f"several columns of {file} may hold images; choose with --column: {', '.join(names)}")
    raise SourceError(f"{file} has no column of paths or of bytes; it has {', '.join(schema.names)}")


@contextmanager
def _opened(place: str) -> Iterator[IO[bytes]]:
    try:
        if is_url(place):
            system, path = _file_system(place)
            file = system.open(path, "rb")
        else:
            file = Path(place).expanduser().open("rb")
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{place} cannot be read: {_explain(error)}") from error
    with file:
        yield file


def _fetch(url: str) -> bytes:
    system, path = _file_system(url)
    try:
        with system.open(path, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)  # one more shows that it is too large
    except Exception as error:  # of a network or of any of a dozen libraries: the image is bad, the run goes on
        raise ImageError(url, f"cannot be fetched: {_explain(error)}") from error
    return data


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        core = import_module("fsspec.core")
    except ImportError as error:
        raise SourceError(f"{url} needs fsspec: pip install 'usetta[cluster]' ({error})") from None
    try:
        system, path = core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # unknown protocol, or the package for it is not installed
        raise SourceError(f"{url} cannot be opened: {error}") from error
    return system, path


def _is_folder(place: str) -> bool:
    if not is_url(place):
        return Path(place).expanduser().is_dir()
    system, path = _file_system(place)
    try:
        return bool(system.isdir(path))
    except Exception as error:
        raise SourceError(f"{place} cannot be read: {_explain(error)}") from error


def _is_image(name: str) -> bool:
    """Whether a file in a folder or an archive is an image by its name; hidden files are not."""
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") and part != "." for part in path.parts)


def _is_pattern(source: str) -> bool:
    """A file may be called `photo[1].jpg`: what exists is no pattern."""
    return glob.has_magic(source) and (is_url(source) or not Path(source).expanduser().exists())


def _absolute(place: str) -> str:
    """Workers run in another folder."""
    return place if is_url(place) else str(Path(place).expanduser().absolute())


def _relative_to(file: str, written: str) -> str:
    """A place that is written in `file`: as it is, or relative to the folder of the file."""
    if is_url(written) or Path(written).is_absolute():
        return written
    if is_url(file):
        return f"{file.rpartition('/')[0]}/{written}"
    return str(Path(_absolute(file)).parent / written)


def _as_text(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _explain(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(f"{type(error).__name__}: {error}".split())
