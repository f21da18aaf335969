"""Load a dataset by name, folder or list, and check which of the named ones are on a disk.

Loading is strict: an image that is listed but missing is an error, because results on a part of a dataset look like
results on all of it. Checking reports every state a disk may be in, with one sentence about what to do next.
"""

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from usetta.data.dataset import AbsentError, DataError, Dataset, NoListError
from usetta.data.layouts import below, fetch_command
from usetta.data.named import DATASETS, NamedDataset, list_datasets
from usetta.data.own_images import MANIFESTS, read_folder, read_list

ROOT = "USETTA_DATA"
"""Environment variable: the folder that holds the datasets, if no other is given."""

State = Literal["complete", "incomplete", "no list", "absent", "broken"]


def load_dataset(
    name: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Load a named dataset, or any images of yours.

    `name` is a name from `list_datasets` or an alias, and `root` the folder that holds the datasets (default:
    `$USETTA_DATA`) or the dataset's own; or `name` is the path of a folder with a folder for each class, of a list of
    images (see `own_images`), or of a folder with a `manifest.*`. `classes` names the classes of a list.
    """
    written = os.fspath(name)
    if root is None and _is_path(written):
        return _load_path(Path(written).expanduser().absolute(), classes, written)
    named = DATASETS.get(written)
    if classes is not None:
        raise ValueError(f"{named.name} has its own class names; they cannot be given")
    root = root or os.environ.get(ROOT)
    if not root:
        raise DataError(
            f"no folder given for the dataset {named.name}", f"pass the folder of the datasets (--data), or set {ROOT}"
        )
    place = _existing_folder(root)
    reading = named.read(place, own=True)
    if reading.missing:
        what = "classes without images" if reading.missing_kind == "classes" else "listed images missing"
        raise DataError(
            f"{named.name} is incomplete: {len(reading.missing)} {what} in {reading.dataset.root}, "
            f"the first is {reading.missing[0]}",
            f"see `usetta data check {shlex.quote(str(place))}`",
        )
    return reading.dataset


def load_datasets(names: Sequence[str], root: str | os.PathLike[str] | None = None) -> list[Dataset]:
    """Load several: named datasets below `root`, other folders and lists in it, or paths.

    Without names, all datasets that are recognised below `root`: named ones that are complete, and folders with a
    `manifest.*`. If there are none, `root` is itself the dataset.
    """
    if names:
        return [_load_below(name, root) for name in names]
    root = root or os.environ.get(ROOT)
    if not root:
        raise DataError("no datasets given", f"pass --data or --datasets, or set {ROOT}")
    place = _existing_folder(root)
    if _manifest(place):
        return [load_dataset(place)]
    named = [load_dataset(report.name, place) for report in check(place) if report.state == "complete"]
    folders = [folder for folder in sorted(place.iterdir()) if folder.is_dir() and not folder.name.startswith(".")]
    listed = [folder for folder in folders if _manifest(folder)]
    own = [load_dataset(folder) for folder in listed if not any(known.root.is_relative_to(folder) for known in named)]
    return [*named, *own] or [load_dataset(place)]


def _load_below(name: str, root: str | os.PathLike[str] | None) -> Dataset:
    if _is_path(name):
        inside = Path(root).expanduser() / name if root else None
        return load_dataset(inside.absolute() if inside and inside.exists() else name)
    return load_dataset(name, root)


def _is_path(name: str) -> bool:
    """The name of a dataset is never taken for a path, even if a folder is called so; `./pets` is a path."""
    return any(mark in name for mark in ("/", os.sep)) or name.startswith((".", "~")) or name not in DATASETS


def _load_path(path: Path, classes: Sequence[str] | None, written: str) -> Dataset:
    if path.is_file():
        return read_list(path, classes)
    if not path.is_dir():
        if path.name == written and not path.suffix:
            DATASETS.get(written)  # more likely a misspelled name than a path: the error suggests the nearest
        raise DataError(f"{path} does not exist")
    if manifest := _manifest(path):
        return read_list(manifest, classes)
    if classes is not None:
        raise ValueError(f"the class names of {path} are those of its folders; they cannot be given")
    return read_folder(path)


def _manifest(folder: Path) -> Path | None:
    return next((folder / name for name in MANIFESTS if (folder / name).is_file()), None)


def _existing_folder(root: str | os.PathLike[str]) -> Path:
    folder = Path(root).expanduser().absolute()
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    return folder


@dataclass(frozen=True)
class Report:
    """The state of one dataset on a disk."""

    name: str
    title: str
    state: State
    images: int
    """On the disk, of those that belong to the dataset."""
    expected: int
    """In a complete copy."""
    missing: int
    """Images that the list names and the disk lacks, or classes without images where there is no list."""
    where: str
    """Below the folder that was checked; empty if nothing was found."""
    problem: str
    todo: str
    """One sentence."""


def check(root: str | os.PathLike[str], names: Iterable[str] = ()) -> list[Report]:
    """Report on all named datasets, or those of `names`, below `root`."""
    datasets = [DATASETS.get(name) for name in names] or list_datasets()
    place = _existing_folder(root)
    return [check_one(named, place) for named in datasets]


def check_one(named: NamedDataset, root: Path) -> Report:
    """Report on one dataset below `root`."""
    try:
        reading = named.read(root)
    except DataError as error:
        return _report_unread(named, root, error)
    dataset, missing = reading.dataset, reading.missing
    by_class = reading.missing_kind == "classes"
    problems = []
    if missing:
        what = "classes have no images" if by_class else "listed images are missing"
        problems.append(f"{len(missing)} {what}, the first is {missing[0]}")
    if len(dataset) != named.images:
        problems.append(f"{len(dataset):,} images instead of {named.images:,}")
    if len(dataset.classes) != named.classes:
        problems.append(f"{len(dataset.classes)} classes instead of {named.classes}")
    todo = "Nothing to do."
    if problems:
        fetch_again = f"move {below(dataset.root, root)} away and run {fetch_command(named.name, root)}"
        todo = f"Unpack the archive again, or {fetch_again}." if named.source else "Unpack it again."
    return Report(
        named.name,
        named.title,
        "incomplete" if problems else "complete",
        len(dataset) if by_class else len(dataset) - len(missing),
        named.images,
        len(missing),
        dataset.layout,
        "; ".join(problems),
        todo,
    )


def _report_unread(named: NamedDataset, root: Path, error: DataError) -> Report:
    """The report on a dataset that could not be read: is it absent, or is something wrong with it?"""
    source = named.source
    images = error.images if isinstance(error, NoListError) else None
    state: State
    if isinstance(error, AbsentError) or (isinstance(error, NoListError) and images is None):
        state = "absent"
        todo = _sentence(error.todo) or "Put it there."
        if source:
            by_hand = "" if source.archive or source.mirrors else " for the steps to take by hand"
            todo = f"Run {fetch_command(named.name, root)}{by_hand}."
    elif isinstance(error, NoListError) and source and source.split:
        state = "no list"
        todo = f"Run {fetch_command(named.name, root)}, which downloads {source.split.file}."
    else:
        state = "broken"
        todo = _sentence(error.todo) or "Move its folder away and fetch it again."
    where = below(images, root) if images else ""
    return Report(named.name, named.title, state, 0, named.images, 0, where, error.problem, todo)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
