"""Files by path or by URL, for everything that `fsspec` opens; credentials are its business.

Local files need no fsspec. An image that is fetched whole must not be larger than `MAX_BYTES`, whatever it says of
itself; formats and pixels are checked by `images`, as everywhere.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import IO, Any

from usetta.images import SUFFIXES, ImageError

MAX_BYTES = 2**28
"""Of an image that is held in memory before it is decoded."""

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(::[a-zA-Z][a-zA-Z0-9+.-]*)*://")


class SourceError(ValueError):
    """Images cannot be had from there at all; the message says why."""


def is_url(place: str) -> bool:
    """Whether `place` is for fsspec, rather than a path of this machine."""
    return bool(_URL.match(place))


def absolute(place: str) -> str:
    """A place as workers in other folders know it."""
    return place if is_url(place) else str(Path(place).expanduser().absolute())


def beside(file: str, written: str) -> str:
    """A place that is written in `file`: as it is, or relative to the folder of the file."""
    if is_url(written) or Path(written).is_absolute():
        return written
    if is_url(file):
        return f"{file.rpartition('/')[0]}/{written}"
    return str(Path(absolute(file)).parent / written)


def is_image(name: str) -> bool:
    """Whether the name of a file in a folder or an archive is that of an image; hidden files are not."""
    path = PurePosixPath(name)
    return path.suffix.lower() in SUFFIXES and not any(part.startswith(".") and part != "." for part in path.parts)


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        core = import_module("fsspec.core")
    except ImportError as error:
        raise SourceError(f"{url} needs fsspec: pip install 'usetta[cluster]' ({error})") from None
    try:
        system, path = core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no such kind of URL, or a package for it is not installed
        raise SourceError(f"{url} cannot be opened: {error}") from error
    return system, path


@contextmanager
def opened(place: str) -> Iterator[IO[bytes]]:
    """A file of images or of their names, to be read."""
    try:
        if is_url(place):
            system, path = file_system(place)
            file = system.open(path, "rb")
        else:
            file = Path(place).expanduser().open("rb")
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"{place} cannot be read: {explained(error)}") from error
    with file:
        yield file


def read_image(place: str) -> str | bytes:
    """What `images.open_image` takes: the path of a local file, or the bytes of any other."""
    if not is_url(place):
        return place
    system, path = file_system(place)
    try:
        with system.open(path, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)
    except Exception as error:  # of a network or of any of a dozen libraries: the image is bad, the run goes on
        raise ImageError(place, f"cannot be fetched: {explained(error)}") from error
    return within_limit(data, place)


def within_limit(data: bytes, place: str) -> bytes:
    """The bytes of an image, if they are not too many."""
    if len(data) > MAX_BYTES:
        raise ImageError(place, f"file is larger than the limit of {MAX_BYTES:,} bytes")
    return data


def explained(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(f"{type(error).__name__}: {error}".split())
