"""Where images come from: folders, patterns, lists, Parquet files, tars and standard input, local or behind a URL.

The result is a stream. Folders are read one at a time and in order, tables a few rows at a time, archives from front to
back, so ten million images take no more memory than ten. Only what a pattern matches is listed first, to be sorted. An
image is identified by its source and its key:

    folder          path below the folder
    pattern         path that matched
    list            line as written
    Parquet         path as written, or the number of the row if the table holds the bytes
    tar             name of the member
    image           file name
    - (stdin)       hash of its bytes

URLs, which lists and tables may contain too, are opened only if the caller allows it: http and https by `web`, all
others by `fsspec`, which also handles credentials. Paths and URLs are opened by the worker; bytes from tables and
archives are sent to it. An image in memory is limited to `MAX_BYTES`, whatever size its file claims to have; formats
and pixels are checked by `images.open_image`, as everywhere.
"""

import glob
import hashlib
import io
import os
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any

from usetta.files import arrow
from usetta.images import ImageError, fetch_image, is_ignored, is_readable, is_web_address
from usetta.web import FetchError, open_url

STDIN = "-"
MAX_BYTES = 2**28
"""Of an image that is held in memory before it is decoded."""
_TOO_LARGE = "file is larger than the limit of {:,} bytes"
_TARS = (".tar", ".tar.gz", ".tgz")
_TABLES = (".parquet", ".pq")
_ROWS_AT_ONCE = 64
"""Rows of a table in memory, which may hold images of several megabytes."""
_REFUSED_URL = "URLs are opened only with --allow-urls"
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
    name: str = ""
    """What people are shown: a path or URL where there is one."""

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


@dataclass(frozen=True)
class SourceOptions:
    """How sources are read."""

    column: str | None = None
    """Holds the images of Parquet files that have several columns."""
    allow_urls: bool = False
    ignored: Counter[str] = field(default_factory=Counter)
    """Counts files with the suffix of an image that cannot be read here, while the stream goes on."""


def check(sources: Sequence[str], options: SourceOptions | None = None) -> None:
    """Report what cannot be read before a model is loaded."""
    options = options or SourceOptions()
    for source in sources:
        place = source.removeprefix("@")
        if source == STDIN:
            if sys.stdin.isatty():
                raise SourceError("'-' reads an image from standard input: pipe one into this command")
        elif is_url(place):
            _require_allowed(place, options)
        elif _is_pattern(source):
            if next(_matches(source), None) is None:
                raise SourceError(f"{source}: no file matches this pattern")
        elif not Path(place).expanduser().exists():
            raise SourceError(f"{place}: no such file or folder")


def images(sources: Sequence[str], options: SourceOptions | None = None) -> Generator[BatchImage, None, None]:
    """The images of all sources, one after the other."""
    options = options or SourceOptions()
    for source in sources:
        for image in _read_source(source, options):
            if isinstance(image.place, str) and is_url(image.place) and not options.allow_urls:
                image = replace(image, problem=_REFUSED_URL)
            if not (image.source + image.key).isascii():
                # File names may contain bytes that are not valid text, and could not be written to a table.
                texts = {name: _as_text(getattr(image, name)) for name in ("source", "key", "name")}
                image = replace(image, **texts)
            yield image


def is_url(place: str) -> bool:
    """Whether `place` is for fsspec, rather than a path on this machine."""
    return bool(_URL.match(place))


def _require_allowed(url: str, options: SourceOptions) -> None:
    if not options.allow_urls:
        raise SourceError(f"{url}: {_REFUSED_URL}")


def _read_source(source: str, options: SourceOptions) -> Iterator[BatchImage]:
    if source == STDIN:
        return _read_stdin()
    if is_url(source.removeprefix("@")):
        _require_allowed(source.removeprefix("@"), options)
    if source.startswith("@") or source.lower().endswith(".txt"):
        return _read_list(source.removeprefix("@"))
    return _read_pattern(source, options) if _is_pattern(source) else _read_place(source, options)


def _read_stdin() -> Iterator[BatchImage]:
    """One image. Its key is its content, so that a run with --out is not continued with another image."""
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    yield BatchImage(STDIN, hashlib.blake2b(data, digest_size=16).hexdigest(), data, name=STDIN)


def _read_place(place: str, options: SourceOptions) -> Iterator[BatchImage]:
    if place.lower().endswith(_TARS):
        yield from _read_tar(place, options.ignored)
    elif place.lower().endswith(_TABLES) and not _is_folder(place):
        yield from _read_table(place, options.column)
    elif _is_folder(place):
        walk = _walk_url(place, options.ignored) if is_url(place) else _walk(place, options.ignored)
        yield from (BatchImage(place, key, path, name=_below(place, key)) for key, path in walk)
    else:
        yield BatchImage(place, PurePosixPath(place).name, _absolute(place), name=place)


def _walk(folder: str, ignored: Counter[str]) -> Iterator[tuple[str, str]]:
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
            elif _is_image(name, ignored):
                yield key, str(Path(root, key))
        pending += reversed(folders)


def _walk_url(folder: str, ignored: Counter[str]) -> Iterator[tuple[str, str]]:
    system, root = _file_system(folder)
    root = root.rstrip("/")
    try:
        for parent, _folders, names in system.walk(root, on_error="raise"):
            for name in sorted(names):
                path = f"{parent.rstrip('/')}/{name}"
                key = path.removeprefix(root).lstrip("/")
                if _is_image(key, ignored):
                    yield key, system.unstrip_protocol(path)
    except Exception as error:
        raise SourceError(f"{folder} cannot be listed: {_explain(error)}") from error


def _read_pattern(pattern: str, options: SourceOptions) -> Iterator[BatchImage]:
    """What a pattern matches; archives, tables and folders among it are sources of their own."""
    for place in sorted(_matches(pattern)):
        if place.lower().endswith((*_TARS, *_TABLES)) or _is_folder(place):
            yield from _read_place(place, options)
        elif _is_image(PurePosixPath(place).name, options.ignored):
            yield BatchImage(pattern, place, _absolute(place), name=place)


def _matches(pattern: str) -> Iterator[str]:
    if not is_url(pattern):
        return glob.iglob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207 - Path.glob needs a root
    system, path = _file_system(pattern)
    return (system.unstrip_protocol(match) for match in system.glob(path))


def _read_list(file: str) -> Iterator[BatchImage]:
    with _opened(file) as binary:
        try:
            for line in io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape"):
                written = line.strip()
                if written:
                    yield BatchImage(file, written, _relative_to(file, written), name=written)
        except OSError as error:
            raise SourceError(f"{file}: reading stopped before the end: {_explain(error)}") from error


def _read_tar(file: str, ignored: Counter[str]) -> Iterator[BatchImage]:
    """The images of an archive, which is read once from front to back. A damaged one yields what it has."""
    last = "its beginning"
    with _opened(file) as binary:
        try:
            with tarfile.open(fileobj=binary, mode="r|*") as archive:
                for member in archive:
                    last = member.name
                    if not member.isfile() or not _is_image(member.name, ignored):
                        continue
                    name = _below(file, member.name)
                    if member.size > MAX_BYTES:
                        yield BatchImage(file, member.name, b"", _TOO_LARGE.format(MAX_BYTES), name)
                        continue
                    content = archive.extractfile(member)
                    assert content is not None
                    yield BatchImage(file, member.name, content.read(), name=name)
        except (tarfile.TarError, OSError, EOFError) as error:
            yield BatchImage(file, "", b"", f"the archive is damaged after {last} ({_explain(error)})", file)


def _read_table(file: str, column: str | None) -> Iterator[BatchImage]:
    """Images of a Parquet file: paths or URLs, bytes, or structs of both as datasets on the Hugging Face hub have."""
    parquet = arrow("pyarrow.parquet")
    with _opened(file, seekable=True) as binary:
        try:
            table = parquet.ParquetFile(binary)
        except (ValueError, OSError) as error:
            raise SourceError(f"{file} is damaged or not a Parquet file") from error
        name = _choose_column(table.schema_arrow, column, file)
        number = 0
        try:
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[name]):
                for value in batch.column(0).to_pylist():
                    content = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
                    if isinstance(content, str) and content:
                        yield BatchImage(file, content, _relative_to(file, content), name=content)
                    else:  # an empty cell is reported as an empty file
                        yield BatchImage(file, str(number), content or b"", name=_below(file, str(number)))
                    number += 1
        except (ValueError, OSError) as error:  # which Arrow raises for what is damaged
            yield BatchImage(file, "", b"", f"the file is damaged after row {number} ({_explain(error)})", file)


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
            raise SourceError(f"{file} has no column {column!r}; its columns are {', '.join(schema.names)}")
        kind = schema.field(column).type
        if not (is_bytes(kind) or is_text(kind)):
            raise SourceError(f"column {column!r} of {file} holds {kind}, neither paths nor bytes")
        return column
    for fits in (is_bytes, is_text):
        names = [field.name for field in schema if fits(field.type)]
        if len(names) == 1:
            return str(names[0])
        if names:
            raise SourceError(
                f"several columns of {file} may hold images, choose one with --column: {', '.join(names)}"
            )
    raise SourceError(f"{file} has no column of paths or image bytes; its columns are {', '.join(schema.names)}")


@contextmanager
def _opened(place: str, *, seekable: bool = False) -> Iterator[IO[bytes]]:
    try:
        if is_web_address(place) and not seekable:
            file = open_url(place)
        elif is_url(place):
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
    if is_web_address(url):
        return fetch_image(url, MAX_BYTES)
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
    if is_web_address(place):  # web servers do not list folders
        return False
    system, path = _file_system(place)
    try:
        return bool(system.isdir(path))
    except Exception as error:
        raise SourceError(f"{place} cannot be read: {_explain(error)}") from error


def _is_image(name: str, ignored: Counter[str]) -> bool:
    """Whether a file in a folder or an archive is a readable image by its name; hidden files are not."""
    path = PurePosixPath(name)
    if any(part.startswith(".") and part != "." for part in path.parts):
        return False
    if is_ignored(path.suffix):
        ignored[path.suffix.lower()] += 1
    return is_readable(path.suffix)


def _is_pattern(source: str) -> bool:
    """A file may be called `photo[1].jpg`: what exists is no pattern, nor is the query of a web address."""
    if is_url(source):
        return glob.has_magic(source) and not is_web_address(source)
    return glob.has_magic(source) and not Path(source).expanduser().exists()


def _absolute(place: str) -> str:
    """Workers run in another folder."""
    return place if is_url(place) else str(Path(place).expanduser().absolute())


def _below(place: str, key: str) -> str:
    """What an image inside `place` is called."""
    return f"{place.rstrip('/')}/{key}" if is_url(place) else str(Path(place, key))


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
    if isinstance(error, FetchError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(f"{type(error).__name__}: {error}".split())
