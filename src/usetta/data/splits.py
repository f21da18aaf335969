"""The nine sets whose test images CoOp lists in a `split_zhou_*.json`, and Aircraft, which brings lists of its own.

A split is a dictionary of `train`, `val` and `test`, each a list of `[path, label, class name]`. The names of all three
are read, so that a class keeps its name even if the test images had none of it.
"""

import json
from pathlib import Path
from typing import Any

from usetta.data.benchmark import Benchmark
from usetta.data.dataset import AbsentError, DataError, Dataset, NoListError, class_name
from usetta.data.locate import Reading, below, fetch_command, find_list, image_folders, missing_images

_PARTS = ("train", "val", "test")
_ANEW = "move its folder away and fetch the set anew"


def read_split(benchmark: Benchmark, root: Path, *, itself: bool) -> Reading:
    """Read one of the nine."""
    file = find_list(benchmark, root, itself=itself)
    if file is None:
        raise NoListError(
            f"{benchmark.name}: there is no {benchmark.split} in {root}",
            f"{fetch_command(benchmark.name, root)} tells where to get it",
        )
    ids, labels, classes = _parse(file)
    return _reading(benchmark, root, ids, labels, classes, file, itself=itself)


def read_aircraft(benchmark: Benchmark, root: Path, *, itself: bool) -> Reading:
    """Read Aircraft: class k is line k of `variants.txt`; `images_variant_test.txt` gives image and class."""
    folders = [images.parent for images in image_folders(benchmark, root, itself=itself)]
    home = next((folder for folder in folders if (folder / "variants.txt").is_file()), None)
    if home is None:
        raise NoListError(f"aircraft: there is no variants.txt beside a folder images in {root}", _ANEW)
    file = home / "images_variant_test.txt"
    variants = _lines(home / "variants.txt")
    by_name = {variant: label for label, variant in enumerate(variants)}
    ids, labels = [], []
    for number, line in enumerate(_lines(file), 1):
        image, _, variant = line.partition(" ")
        if variant not in by_name:
            raise DataError(f"{file}, line {number}: {variant!r} is not in variants.txt", _ANEW)
        ids.append(f"{image}.jpg")
        labels.append(by_name[variant])
    if not ids:
        raise DataError(f"{file} is empty", _ANEW)
    return _reading(benchmark, root, ids, labels, variants, file, itself=itself)


def _reading(
    benchmark: Benchmark,
    root: Path,
    ids: list[str],
    labels: list[int],
    classes: list[str],
    file: Path,
    *,
    itself: bool,
) -> Reading:
    """Join the list with the folder of its images: the first that holds one of a few of them, else of all."""
    candidates = list(image_folders(benchmark, root, itself=itself))
    probes = (ids[0], ids[len(ids) // 2], ids[-1])
    likely = [folder for folder in candidates if any((folder / image).exists() for image in probes)]
    for home in likely or candidates:
        missing = missing_images(home, ids)
        if len(missing) < len(ids):
            break
    else:
        places = " or ".join(f"{benchmark.folders[0]}/{inner}".rstrip("/") for inner in benchmark.inner)
        raise AbsentError(f"{benchmark.name}: its images are not in {root}", f"expected is a folder {places}")
    dataset = Dataset(
        name=benchmark.name,
        title=benchmark.title,
        family=benchmark.family,
        classes=tuple(map(class_name, classes)),
        ids=tuple(ids),
        labels=tuple(labels),
        root=home,
        layout=f"{below(home, root)}, listed in {below(file, root)}",
    )
    return Reading(dataset, missing)


def _parse(file: Path) -> tuple[list[str], list[int], list[str]]:
    """Ids, labels and class names of the test part."""
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise _malformed(file, "it is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise _malformed(file, f"it is not JSON (line {error.lineno}: {error.msg})") from error
    if not (isinstance(parts, dict) and isinstance(parts.get("test"), list)):
        raise _malformed(file, "it has no list 'test'")
    names: dict[int, str] = {}
    ids, labels = [], []
    for part in _PARTS:
        for number, entry in enumerate(parts.get(part) or ()):
            image, label, name = _entry(file, part, number, entry)
            if names.setdefault(label, name) != name:
                raise _malformed(file, f"class {label} is called {names[label]!r} and {name!r}")
            if part == "test":
                ids.append(image)
                labels.append(label)
    if not ids:
        raise _malformed(file, "its list 'test' is empty")
    for label in range(len(names)):
        if label not in names:
            raise _malformed(file, f"no image has label {label}, though labels go up to {max(names)}")
    return ids, labels, [names[label] for label in sorted(names)]


def _entry(file: Path, part: str, number: int, entry: Any) -> tuple[str, int, str]:
    match entry:
        case [str(path), int(label), str(name), *_] if label >= 0 and not isinstance(label, bool):
            return path, label, name
    raise _malformed(file, f"entry {number} of {part!r} is {entry!r}, not [path, label, class name]")


def _malformed(file: Path, why: str) -> DataError:
    return DataError(f"{file} cannot be used: {why}", "download it anew")


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise NoListError(f"{file} is not there", _ANEW) from error
