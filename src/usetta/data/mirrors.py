"""Datasets in packed files: copies on the Hugging Face hub, and files that somebody has already.

The hub lists the files of a repository with their SHA-256, and every file is compared with it. Whether they are the
dataset is decided by their content (`matching`): its images by name, or their number and the number of each class.
"""

import fnmatch
import json
import posixpath
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from usetta.data.dataset import DataError, class_name
from usetta.data.download import NoAccessError, NotFoundError, download, hub_address, verify
from usetta.data.layouts import class_folders, parse_split
from usetta.data.lists import cached_list
from usetta.data.matching import ClassList, ImageList, match_packed
from usetta.data.named import Mirror, NamedDataset
from usetta.data.packed import INDEX, PACKED, TABLES, TARS, open_below, read_packed, scan, write_index
from usetta.data.unpacking import refuse_occupied
from usetta.files import write_atomically
from usetta.images import find_images
from usetta.progress import bar, track

Log = Callable[[str], object]


class HubFile(NamedTuple):
    """A file of a repository on the hub."""

    path: str
    bytes: int
    checksum: str

    def url(self, mirror: Mirror) -> str:
        """Where it is downloaded."""
        revision = quote(mirror.revision, safe="")
        return f"{hub_address()}/datasets/{mirror.repo}/resolve/{revision}/{quote(self.path)}"


def fetch_mirror(
    named: NamedDataset, mirror: Mirror, place: Path, log: Log, *, jobs: int, progress: bool | None
) -> None:
    """Download the files of a mirror and index them."""
    assert named.source
    staging, folder = place / ".usetta" / named.name, place / named.source.folder / PACKED
    wanted = wanted_images(named, place)
    try:
        files = _files(mirror, staging, progress)
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        log(f"downloading {count} of {hub_address()}/datasets/{mirror.repo}")
        paths = []
        with bar(len(files), f"{named.name} (files)", progress) as tick, ThreadPoolExecutor(jobs) as pool:
            for path in pool.map(lambda file: _fetch_file(mirror, file, staging, folder, progress), files):
                paths.append(path)
                tick(1, path.name)
        classes = _class_names(mirror, staging)
    except NoAccessError as error:
        page = f"{hub_address()}/datasets/{mirror.repo}"
        raise NoAccessError(f"{mirror.repo} is gated", f"accept its terms at {page} and set HF_TOKEN") from error
    try:
        packed = scan(paths, classes)
        match = match_packed(packed, wanted, same_labels=mirror.same_labels)
    except DataError as error:
        shutil.rmtree(folder)  # else they would be in the way of the next source
        raise DataError(f"{mirror.repo} cannot be used: {error.problem}", error.todo) from error
    write_index(folder, packed, match.images, match.classes, f"{mirror.repo} on the hub, {match.by}")
    shutil.rmtree(staging, ignore_errors=True)
    facts = {"url": f"{hub_address()}/datasets/{mirror.repo}", "revision": mirror.revision, "matched": match.by}
    save_note(place, named.name, facts | {"files": [file._asdict() for file in files]})


def import_files(named: NamedDataset, files: Sequence[Path], place: Path) -> str:
    """Index files that lie elsewhere as the dataset `named` below `place`; returns how images were recognised."""
    if named.source is None:
        raise DataError(f"{named.name} has no folder of its own, so it cannot be imported")
    folder = place / named.source.folder / PACKED
    packed = scan(files, _names_beside(files))
    match = match_packed(packed, wanted_images(named, place), same_labels=False)
    write_index(folder, packed, match.images, match.classes, f"imported {match.by}")
    return match.by


def packed_files(sources: Sequence[Path]) -> list[Path]:
    """The Parquet files, tars and images that files and folders contain; of a folder with packed files, only these."""
    files: list[Path] = []
    for source in sources:
        if not source.exists():
            raise DataError(f"{source} does not exist")
        if source.is_file():
            files.append(source.absolute())
            continue
        below = [path for path in source.absolute().rglob("*") if path.suffix.lower() in (*TARS, *TABLES)]
        files += sorted(below) or find_images(source.absolute())
    return files


def unpack_packed(named: NamedDataset, place: Path, *, progress: bool | None) -> None:
    """Write the images of packed files to files of their own, where CoOp's layout has them."""
    assert named.source
    folder, target = place / named.source.folder / PACKED, place / named.source.images
    dataset = read_packed(folder).dataset
    beside = place / named.source.folder / ".unpacking"
    shutil.rmtree(beside, ignore_errors=True)
    for image_id in track(dataset.ids, len(dataset), f"unpacking {named.name}", progress):
        content = open_below(folder, image_id)
        path = beside / image_id
        if not path.resolve().is_relative_to(beside.resolve()):
            raise DataError(f"{folder / INDEX} is not safe to unpack: it contains {image_id}", "nothing was unpacked")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
    target.mkdir(parents=True, exist_ok=True)
    for child in beside.iterdir():
        refuse_occupied(target / child.name)
    for child in list(beside.iterdir()):
        child.replace(target / child.name)
    beside.rmdir()
    (folder / INDEX).unlink()  # first, so that a kill leaves no index of files that are gone
    shutil.rmtree(folder)


def wanted_images(named: NamedDataset, place: Path | None) -> ImageList | ClassList:
    """What the images of a dataset should be, by the list below `place` or in the cache, or by its classes."""
    assert named.source
    if split := named.source.split:
        beside = place and place / named.source.folder / split.file
        return listed(beside if beside and beside.is_file() else cached_list(split))
    if named.family != "imagenet":
        raise DataError(f"{named.name} has no list to compare with", "keep its own files")
    return ClassList(class_folders(named.name), named.images, named.source.balanced)


def listed(file: Path) -> ImageList:
    """The test images of a list, with class names as prompts want them."""
    ids, labels, classes = parse_split(file)
    return ImageList(tuple(ids), tuple(labels), tuple(map(class_name, classes)))


def _files(mirror: Mirror, staging: Path, progress: bool | None) -> list[HubFile]:
    """What the hub lists of the files that belong to a mirror."""
    folder = posixpath.dirname(mirror.files)
    url = f"{hub_address()}/api/datasets/{mirror.repo}/tree/{quote(mirror.revision, safe='')}/{quote(folder)}"
    listing = staging / "files.json"
    listing.unlink(missing_ok=True)
    download(url.rstrip("/"), listing, progress=progress)
    try:
        entries = json.loads(listing.read_text(encoding="utf-8"))
        files = [_hub_file(entry) for entry in entries if fnmatch.fnmatch(entry["path"], mirror.files)]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{url} is not a list of files", "the hub may have changed") from error
    listing.unlink()
    if not files:
        raise DataError(f"{mirror.repo} has no files {mirror.files}", "it may have changed")
    return files


def _hub_file(entry: dict[str, object]) -> HubFile:
    large = entry.get("lfs")
    checksum = f"sha256:{large['oid']}" if isinstance(large, dict) else f"blob:{entry['oid']}"
    return HubFile(str(entry["path"]), int(str(entry["size"])), checksum)


def _fetch_file(mirror: Mirror, file: HubFile, staging: Path, folder: Path, progress: bool | None) -> Path:
    """A file of a mirror; it gets its place when it has been verified, so one that is there is right."""
    if posixpath.isabs(file.path) or ".." in file.path.split("/"):
        raise DataError(f"{mirror.repo} contains the path {file.path}", "refused")
    target = folder / file.path
    if not target.is_file():
        part = staging / file.path.replace("/", "-")
        if not part.is_file():
            download(file.url(mirror), part, progress=progress)
        verify(part, file.url(mirror), file.checksum)
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)
    return target


def _class_names(mirror: Mirror, staging: Path) -> tuple[str, ...]:
    """The names that a repository of tars lists beside them; a table has them inside."""
    if not mirror.files.endswith(TARS):
        return ()
    file = staging / "classnames.txt"
    try:
        download(HubFile("classnames.txt", 0, "").url(mirror), file, progress=False)
    except NotFoundError:
        return ()
    names = _lines(file)
    file.unlink()
    return names


def _names_beside(files: Sequence[Path]) -> tuple[str, ...]:
    """The names in a `classnames.txt` beside or above tars."""
    folders = {parent for file in files if file.suffix in TARS for parent in file.parents[:2]}
    lists: Iterator[Path] = (folder / "classnames.txt" for folder in sorted(folders))
    return next((_lines(file) for file in lists if file.is_file()), ())


def _lines(file: Path) -> tuple[str, ...]:
    return tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())


def save_note(place: Path, name: str, facts: dict[str, object]) -> None:
    """Record what was downloaded."""
    write_atomically(place / ".usetta" / f"{name}.json", f"{json.dumps(facts, indent=2)}\n".encode())
