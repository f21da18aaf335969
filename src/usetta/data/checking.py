"""What is there of the paper's fifteen below a folder, and what to do next for each of them."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from usetta.data.benchmark import BENCHMARKS, Benchmark, get_benchmark
from usetta.data.dataset import AbsentError, DataError, NoListError
from usetta.data.locate import below, fetch_command, image_folders, is_image
from usetta.data.registry import read_benchmark
from usetta.data.sources import SOURCES

State = Literal["complete", "incomplete", "no list", "absent", "broken"]


@dataclass(frozen=True)
class Report:
    """The state of one dataset."""

    name: str
    title: str
    state: State
    images: int
    """On the disk, of those that belong to the set."""
    expected: int
    """In the paper."""
    missing: int
    """Images that the list names and the disk lacks, or classes without images where there is no list."""
    where: str
    """Below the folder that was asked about; empty if nothing was found."""
    problem: str
    todo: str
    """One sentence."""


def check(root: str | os.PathLike[str], names: Iterable[str] = ()) -> list[Report]:
    """Look for the fifteen, or those of `names`, below `root`."""
    wanted = [get_benchmark(name) for name in names] or BENCHMARKS
    place = Path(root).expanduser().absolute()
    if not place.is_dir():
        raise DataError(f"{place} is not a folder" if place.exists() else f"{place} does not exist")
    return [check_one(benchmark, place) for benchmark in wanted]


def check_one(benchmark: Benchmark, root: Path) -> Report:
    """Look for one of them below `root`."""
    try:
        reading = read_benchmark(benchmark, root)
    except DataError as error:
        return _unread(benchmark, root, error)
    dataset, missing = reading.dataset, reading.missing
    by_class = benchmark.kind == "class folders"
    images = len(dataset) if by_class else len(dataset) - len(missing)
    problems = []
    if missing:
        what = "classes have no images" if by_class else "listed images are missing"
        problems.append(f"{len(missing)} {what}, the first is {missing[0]}")
    if len(dataset) != benchmark.images:
        problems.append(f"{len(dataset):,} images instead of {benchmark.images:,}")
    if len(dataset.classes) != benchmark.classes:
        problems.append(f"{len(dataset.classes)} classes instead of {benchmark.classes}")
    todo = "Nothing to do."
    if problems:
        again = fetch_command(benchmark.name, root)
        todo = f"Unpack the archive again, or move {below(dataset.root, root)} away and run {again}."
    return Report(
        benchmark.name,
        benchmark.title,
        "incomplete" if problems else "complete",
        images,
        benchmark.images,
        len(missing),
        dataset.layout,
        "; ".join(problems),
        todo,
    )


def _unread(benchmark: Benchmark, root: Path, error: DataError) -> Report:
    """The report on a set that could not be read: is it absent, or is something wrong with it?"""
    found = _images_without_list(benchmark, root) if isinstance(error, NoListError) else None
    source = SOURCES[benchmark.name]
    state: State
    if isinstance(error, AbsentError) or (isinstance(error, NoListError) and found is None):
        state = "absent"
        todo = f"Run {fetch_command(benchmark.name, root)}{'' if source.archive else ' for the steps to take by hand'}."
    elif isinstance(error, NoListError) and source.list_url:
        state = "no list"
        todo = f"Download {benchmark.split} from {source.list_url} into {source.folder}/."
    else:
        state = "broken"
        todo = f"{error.todo[:1].upper()}{error.todo[1:]}." if error.todo else "Move its folder away and fetch it anew."
    where = "" if found is None else below(found, root)
    return Report(benchmark.name, benchmark.title, state, 0, benchmark.images, 0, where, error.problem, todo)


def _images_without_list(benchmark: Benchmark, root: Path) -> Path | None:
    """A folder that probably holds the set's images, though without the list nobody can be sure."""
    folders = image_folders(benchmark, root, itself=False)
    return next((folder for folder in folders if any(_may_hold_images(folder))), None)


def _may_hold_images(folder: Path) -> Iterator[bool]:
    with os.scandir(folder) as entries:
        yield from (is_image(entry.name) or (entry.is_dir() and entry.name[0] != ".") for entry in entries)
