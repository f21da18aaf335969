"""Where things lie: the candidate folders of a dataset, and which of the listed images are there.

Whole directories are listed (`os.scandir`) instead of asking for one file after the other, which on the big sets and on
network disks is the difference between a second and minutes.
"""

import os
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from usetta.data.benchmark import Benchmark, plain
from usetta.data.dataset import Dataset
from usetta.images import SUFFIXES

_WITHIN = ("", "few-shot-datasets")
_LISTS = ("", "data_splits", "data/data_splits", "few-shot-datasets")


@dataclass(frozen=True)
class Reading:
    """A dataset as its list says, and which of it is not on the disk."""

    dataset: Dataset
    missing: tuple[str, ...] = ()


def own_folders(benchmark: Benchmark, root: Path, *, itself: bool) -> Iterator[Path]:
    """Folders below `root` that have a name of the set, the likeliest first; with `itself`, at last `root`."""
    for within in _WITHIN:
        here = sorted(names_in(root / within))
        for folder in benchmark.folders:
            yield from (root / within / name for name in here if plain(name) == plain(folder))
    if itself:
        yield root


def image_folders(benchmark: Benchmark, root: Path, *, itself: bool) -> Iterator[Path]:
    """Existing folders that could hold the images, the likeliest first."""
    for own in own_folders(benchmark, root, itself=itself):
        yield from (own / inner for inner in benchmark.inner if (own / inner).is_dir())


def find_list(benchmark: Benchmark, root: Path, *, itself: bool) -> Path | None:
    """The set's `split_zhou_*.json`: in its own folder, or where lists are collected."""
    places = [*own_folders(benchmark, root, itself=itself), *(root / place for place in _LISTS)]
    files = (place / f"{order}{benchmark.split}" for place in places for order in ("", "sorted_"))
    return next((file for file in files if file.is_file()), None)


def names_in(folder: Path) -> set[str]:
    """What is in `folder`; nothing if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def images_in(folder: Path) -> list[str]:
    """Names of the images in `folder`, sorted."""
    return sorted(name for name in names_in(folder) if is_image(name))


def is_image(name: str) -> bool:
    """Whether a file of that name counts as an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122 - 250 000 times


def missing_images(root: Path, ids: Iterable[str]) -> tuple[str, ...]:
    """Those of `ids` that are not below `root`."""
    listed: dict[str, set[str]] = {}
    missing = []
    for image in ids:
        folder, _, name = image.rpartition("/")
        if folder not in listed:
            listed[folder] = names_in(root / folder)
        if name not in listed[folder]:
            missing.append(image)
    return tuple(missing)


def fetch_command(name: str, root: Path) -> str:
    """What to type to get the set, for messages."""
    return f"`usetta data fetch {name} {shlex.quote(str(root))}`"


def below(path: Path, root: Path) -> str:
    """`path` relative to `root` if it lies there, for messages."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
