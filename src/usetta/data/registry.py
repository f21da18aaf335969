"""Load a dataset by name, folder or list."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from usetta.data.benchmark import Benchmark, find_benchmark, get_benchmark
from usetta.data.dataset import DataError, Dataset
from usetta.data.folder import read_folder
from usetta.data.imagenet import read_class_folders
from usetta.data.locate import Reading
from usetta.data.manifest import NAMES, read_manifest
from usetta.data.splits import read_aircraft, read_split

ROOT = "USETTA_DATA"
"""Environment variable: where the datasets of the benchmark lie, if nothing else is said."""

_READERS = {"split": read_split, "variants": read_aircraft, "class folders": read_class_folders}


def load_dataset(
    name: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    classes: Sequence[str] | None = None,
) -> Dataset:
    """Load one of the paper's sets, or any images of yours.

    `name` is a name from `list_datasets` or an alias, and `root` the folder that holds the sets (default:
    `$USETTA_DATA`) or the set's own; or `name` is the path of a folder with a folder for each class, of a list of
    images (see `manifest`), or of a folder with a `manifest.*`. `classes` names the classes of a list.

    An image that is listed but not there is an error here: results on a part of a set look like results on the set.
    """
    written = os.fspath(name)
    if root is None and _is_path(written):
        return _load_path(Path(written).expanduser().absolute(), classes, written)
    benchmark = get_benchmark(written)
    if classes is not None:
        raise ValueError(f"{benchmark.name} has class names of its own")
    root = root or os.environ.get(ROOT)
    if not root:
        raise DataError(f"where is {benchmark.name}?", f"give the folder of the datasets, or set {ROOT}")
    place = Path(root).expanduser().absolute()
    if not place.is_dir():
        raise DataError(f"{place} is not a folder" if place.exists() else f"{place} does not exist")
    reading = read_benchmark(benchmark, place, itself=True)
    if reading.missing:
        what = "classes without images" if benchmark.kind == "class folders" else "listed images missing"
        raise DataError(
            f"{benchmark.name} is incomplete: {len(reading.missing)} {what} in {reading.dataset.root}, "
            f"the first is {reading.missing[0]}",
            f"`usetta data check {shlex.quote(str(place))}` tells more",
        )
    return reading.dataset


def load_datasets(names: Sequence[str], root: str | os.PathLike[str] | None = None) -> list[Dataset]:
    """Load several sets: names of the paper's fifteen below `root`, other folders and lists in it, or paths.

    Without names, all of the fifteen that are complete below `root`; if there are none, `root` is itself the set.
    """
    if names:
        return [_load_named(name, root) for name in names]
    root = root or os.environ.get(ROOT)
    if not root:
        raise DataError("which datasets?", f"give their names, or their folder, or set {ROOT}")
    from usetta.data.checking import check  # which reads sets by this module

    found = [report.name for report in check(root) if report.state == "complete"]
    return [load_dataset(name, root) for name in found] or [load_dataset(Path(root).absolute())]


def _load_named(name: str, root: str | os.PathLike[str] | None) -> Dataset:
    if _is_path(name):
        inside = Path(root).expanduser() / name if root else None
        return load_dataset(inside.absolute() if inside and inside.exists() else name)
    return load_dataset(name, root)


def read_benchmark(benchmark: Benchmark, root: Path, *, itself: bool = False) -> Reading:
    """Read one of the fifteen below `root`, or with `itself` also in it, whether or not it is complete."""
    return _READERS[benchmark.kind](benchmark, root, itself=itself)


def _is_path(name: str) -> bool:
    """A name of the benchmark is never taken for a path, even if a folder is called so; `./pets` is one."""
    return find_benchmark(name) is None or any(mark in name for mark in ("/", os.sep)) or name.startswith((".", "~"))


def _load_path(path: Path, classes: Sequence[str] | None, written: str) -> Dataset:
    if path.is_file():
        return read_manifest(path, classes)
    if not path.is_dir():
        if path.name == written and not path.suffix:
            get_benchmark(written)  # more likely a name with a slip than a path: the error suggests the nearest
        raise DataError(f"{path} does not exist")
    if lists := [path / name for name in NAMES if (path / name).is_file()]:
        return read_manifest(lists[0], classes)
    if classes is not None:
        raise ValueError(f"the classes of {path} are its folders")
    return read_folder(path)
