"""Images that stay where they are packed: in Parquet files, in WebDataset tars, or in files under other names.

An index beside them (`packed/usetta-index.json`) says for every image of a dataset, by its id, in which file it is and
where. Nothing is unpacked: an image in a tar is a range of bytes of it, and of a Parquet file one group of rows is
decoded and kept, because the neighbours of an image usually come next. A worker in another process gets the folder and
reads the index itself.
"""

import json
import os
import re
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from usetta.data.dataset import DataError, Dataset, Reading
from usetta.files import arrow, write_atomically
from usetta.images import ImageError, is_readable

PACKED = "packed"
"""Name of the folder in a dataset's own."""
INDEX = "usetta-index.json"
TARS, TABLES = (".tar",), (".parquet", ".pq")
_FORMAT = 1
_GROUPS_KEPT = 3
"""Groups of rows of Parquet files that are kept in memory, which may be a hundred megabytes each."""
LABEL_COLUMNS = ("label", "labels", "cls", "fine_label", "wnid", "class", "class_name", "target")
NAME_COLUMNS = ("file_name", "filename", "image_id", "path", "id", "__key__")
_LABEL_FILES = ("cls", "cls.txt", "label", "label.txt")


class PackedRow(NamedTuple):
    """An image in a packed file, as the file describes it."""

    file: int
    """Number of the file."""
    place: tuple[int, ...]
    """Offset and length in a tar, group and row in a Parquet file, nothing for a file of its own."""
    name: str
    """A path, a file name or a key."""
    label: int | str | None


@dataclass(frozen=True)
class PackedFiles:
    """What packed files contain."""

    files: tuple[Path, ...]
    rows: tuple[PackedRow, ...]
    classes: tuple[str, ...] = ()
    """Names by label, if the files say."""


class IndexedImage(NamedTuple):
    """A row of the index."""

    id: str
    label: int
    file: int
    place: tuple[int, ...]


# ----------------------------------------------------------------------------------------------------------------- scan


def scan(files: Sequence[Path], classes: Sequence[str] = ()) -> PackedFiles:
    """What is in tars, Parquet files and image files, in the order of `files`, which are sorted by their numbers."""
    ordered = sorted(files, key=lambda file: _by_number(file.as_posix()))
    rows: list[PackedRow] = []
    names = tuple(classes)
    for number, file in enumerate(ordered):
        suffix = file.suffix.lower()
        if suffix in TABLES:
            names = names or _class_names(file)
            rows += _scan_table(number, file)
        elif suffix in TARS:
            rows += _scan_tar(number, file)
        else:
            rows.append(PackedRow(number, (), file.as_posix(), None))
    return PackedFiles(tuple(ordered), tuple(rows), names)


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that sorts `10.tar` after `9.tar`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name) if part]


def _scan_tar(number: int, file: Path) -> Iterator[PackedRow]:
    """A sample of WebDataset is what shares a name up to the first dot, such as `7.jpg` and `7.cls`."""
    samples: dict[str, list[tarfile.TarInfo]] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                if member.isfile():
                    folder, _, name = member.name.rpartition("/")
                    samples.setdefault(f"{folder}/{name.partition('.')[0]}", []).append(member)
            for key, members in samples.items():
                images = [member for member in members if is_readable(PurePosixPath(member.name).suffix)]
                if len(images) > 1:
                    raise DataError(f"{file}: the sample {key.strip('/')} has {len(images)} images", "expected one")
                for image in images:
                    label = _tar_label(file, tar, members)
                    yield PackedRow(number, (image.offset_data, image.size), image.name, label)
    except tarfile.TarError as error:
        raise DataError(f"{file} cannot be read in place: {error}", "expected a tar without compression") from error


def _tar_label(file: Path, tar: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> int | str | None:
    for member in members:
        kind = member.name.rpartition("/")[2].partition(".")[2].lower()
        content = tar.extractfile(member) if kind in (*_LABEL_FILES, "json") and member.size < 2**20 else None
        if content is None:
            continue
        text = content.read().decode("utf-8", "replace").strip()
        if kind == "json":
            try:
                facts = json.loads(text)
            except ValueError as error:
                raise DataError(f"{file}: {member.name} is not JSON", "download it again") from error
            known = [name for name in LABEL_COLUMNS if isinstance(facts, dict) and facts.get(name) is not None]
            if known:
                label = facts[known[0]]
                return label if isinstance(label, int) else str(label)
        else:
            return int(text) if text.isdecimal() else text
    return None


def _scan_table(number: int, file: Path) -> Iterator[PackedRow]:
    """Rows of a table as `datasets` writes it: an image is a struct of bytes and path, or plain bytes."""
    with _readable(file):
        table = arrow("pyarrow.parquet").ParquetFile(file)
    schema = table.schema_arrow
    column = image_column(schema, file)
    label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
    name = next((name for name in NAME_COLUMNS if name in schema.names and name != column), None)
    has_path = arrow("pyarrow").types.is_struct(schema.field(column).type)
    columns = [*([f"{column}.path"] if has_path else []), *(part for part in (label, name) if part)]
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).num_rows
        with _readable(file):
            values = table.read_row_group(group, columns=columns).to_pydict() if columns else {}
        labels = values.get(label) or [None] * size
        paths = [(image or {}).get("path") for image in values[column]] if has_path else [None] * size
        written = values.get(name) or [None] * size
        for row in range(size):
            # A column of names is more often complete than the paths, which `datasets` drops when it embeds bytes.
            known = paths[row] or written[row] or ""
            yield PackedRow(number, (group, row), str(known), labels[row])


def image_column(schema: Any, file: Path) -> str:
    """The column of a table that holds images."""
    types = arrow("pyarrow").types

    def holds_bytes(kind: Any) -> bool:
        inner = {kind.field(place).name for place in range(kind.num_fields)} if types.is_struct(kind) else set()
        return bool(types.is_binary(kind) or types.is_large_binary(kind)) or {"bytes", "path"} <= inner

    names = [field.name for field in schema if holds_bytes(field.type)]
    if len(names) != 1 and "image" not in names:
        raise DataError(f"{file} has no column of images; its columns are {', '.join(schema.names)}")
    return "image" if "image" in names else str(names[0])


def _class_names(file: Path) -> tuple[str, ...]:
    """The names of the labels, which `datasets` keeps in the metadata of a table."""
    with _readable(file):
        metadata = (arrow("pyarrow.parquet").read_schema(file).metadata or {}).get(b"huggingface")
    features = json.loads(metadata).get("info", {}).get("features", {}) if metadata else {}
    kinds = (features.get(column) or {} for column in LABEL_COLUMNS)
    return next((tuple(kind["names"]) for kind in kinds if isinstance(kind.get("names"), list)), ())


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Arrow's errors about a damaged table are a `DataError`; those of the disk stay what they are."""
    try:
        yield
    except (arrow("pyarrow").ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise DataError(f"{file} is damaged or not a Parquet file", "download it again") from error


# ---------------------------------------------------------------------------------------------------------------- index


def write_index(
    folder: Path, packed: PackedFiles, images: Sequence[IndexedImage], classes: Sequence[str], origin: str
) -> None:
    """Write the index into `folder`; files below it are written with relative paths, so that it can be moved."""
    paths = [str(file.relative_to(folder) if file.is_relative_to(folder) else file) for file in packed.files]
    content = {
        "format": _FORMAT,
        "from": origin,
        "files": [[path, file.stat().st_size] for path, file in zip(paths, packed.files, strict=True)],
        "classes": list(classes),
        "images": [[image.id, image.label, image.file, *image.place] for image in images],
    }
    write_atomically(folder / INDEX, json.dumps(content, separators=(",", ":")).encode())


def read_packed(folder: Path) -> Reading:
    """The dataset that an index describes; images of files that are gone or have another size are missing."""
    index = _load_index(folder)
    gone = {n for n, (path, size) in enumerate(index.files) if not path.is_file() or path.stat().st_size != size}
    dataset = Dataset(
        name=folder.parent.name,
        title=folder.parent.name,
        family="other",
        classes=index.classes,
        ids=tuple(index.images),
        labels=tuple(image.label for image in index.images.values()),
        root=folder,
        layout=f"{folder.parent.name}/{folder.name}, {index.origin}",
        reader=PackedReader(folder),
    )
    return Reading(dataset, tuple(image.id for image in index.images.values() if image.file in gone))


@dataclass(frozen=True)
class _Index:
    origin: str
    files: tuple[tuple[Path, int], ...]
    classes: tuple[str, ...]
    images: Mapping[str, IndexedImage]


def _load_index(folder: Path) -> _Index:
    file = folder / INDEX
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise DataError(f"{file} has the format {content['format']}, which this version does not know")
        images = [IndexedImage(name, label, number, tuple(place)) for name, label, number, *place in content["images"]]
        return _Index(
            str(content["from"]),
            tuple((folder / path, int(size)) for path, size in content["files"]),
            tuple(content["classes"]),
            {image.id: image for image in images},
        )
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged", "delete it and fetch or import the dataset again") from error


# ----------------------------------------------------------------------------------------------------------------- read


class PackedReader:
    """Reads images by id. Threads may share it; it is pickled as its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._lock = threading.Lock()
        self._index: _Index | None = None
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __reduce__(self) -> tuple[type["PackedReader"], tuple[Path]]:
        return PackedReader, (self._folder,)

    def __call__(self, image_id: str) -> str | bytes:
        """The bytes of an image, or the path of its file."""
        with self._lock:
            if self._index is None:
                self._index = _load_index(self._folder)
        image = self._index.images.get(image_id)
        if image is None:
            raise ImageError(image_id, "the index does not contain it")
        file = self._index.files[image.file][0]
        if not image.place:
            return str(file)
        try:
            if file.suffix.lower() in TARS:
                return _read_range(file, *image.place)
            with self._lock:
                return self._read_cell(file, image)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # Arrow's own text repeats the path
            raise ImageError(f"{file}: {image_id}", f"cannot be read ({reason})") from error
        except DataError as error:
            raise ImageError(f"{file}: {image_id}", f"cannot be read ({error.problem})") from error

    def _read_cell(self, file: Path, image: IndexedImage) -> str | bytes:
        group, row = image.place
        key = image.file, group
        if key not in self._groups:
            while len(self._groups) >= _GROUPS_KEPT:
                self._groups.popitem(last=False)
            with _readable(file):
                table = arrow("pyarrow.parquet").ParquetFile(file)
                column = image_column(table.schema_arrow, file)
                self._groups[key] = table.read_row_group(group, columns=[column]).column(0)
        self._groups.move_to_end(key)
        value = self._groups[key][row].as_py()
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(content, bytes):
            return content
        if path and (file.parent / path).is_file():
            return str(file.parent / path)
        raise ImageError(f"{file}: {image.id}", "the table holds neither its bytes nor its path")


def _read_range(file: Path, offset: int, length: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(length)


@cache
def _reader(folder: Path) -> PackedReader:
    return PackedReader(folder)


def open_below(root: Path, image_id: str) -> str | bytes:
    """What `images.open_image` takes, for an image of a dataset whose `root` a run has recorded."""
    return _reader(root)(image_id) if (root / INDEX).is_file() else os.fspath(root / image_id)
