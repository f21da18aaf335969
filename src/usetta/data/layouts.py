"""Read the paper's fifteen as they lie on disks.

Two layouts are common. CoOp's has folders such as `oxford_pets/images` with the list of the split beside them; TPT's
has `OxfordPets` with the images directly inside and all lists in one place. The benchmark that the paper uses puts
CoOp's folders into `few-shot-datasets`. All are understood, and spelling does not matter: `caltech-101`, `Caltech101`.

Nine datasets have a `split_zhou_*.json` by CoOp, Aircraft brings lists of its own, and ImageNet and its four relatives
have a folder for each class, named by wnid, or by number in ImageNet-V2. The classes of those five are the published
ones, not the folders that happen to exist, so a missing folder is noticed instead of shifting all labels after it.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from usetta.data.dataset import (
    AbsentError,
    DataError,
    Dataset,
    NoListError,
    Reading,
    class_name,
    missing_images,
    names_in,
)
from usetta.data.named import normalize
from usetta.images import SUFFIXES

_WITHIN = ("", "few-shot-datasets")
_LIST_FOLDERS = ("", "data_splits", "data/data_splits", "few-shot-datasets")
_FETCH_ANEW = "move its folder away and fetch the dataset again"


@dataclass(frozen=True)
class DiskLayout:
    """Under which names a dataset lies on disks."""

    name: str
    folders: tuple[str, ...]
    """Names of the dataset's own folder, CoOp's first; case and punctuation do not count."""
    inner: tuple[str, ...]
    """Where in its folder the images may lie, CoOp's place first."""
    list_file: str = ""
    """Name of the list of its images, if it has one."""

    def own_folders(self, root: Path, *, own: bool) -> Iterator[Path]:
        """Folders below `root` that have a name of the dataset, the likeliest first; with `own`, `root` at last."""
        for within in _WITHIN:
            names = sorted(names_in(root / within))
            for folder in self.folders:
                yield from (root / within / name for name in names if normalize(name) == normalize(folder))
        if own:
            yield root

    def image_folders(self, root: Path, *, own: bool) -> Iterator[Path]:
        """Existing folders that could hold the images, the likeliest first."""
        for folder in self.own_folders(root, own=own):
            yield from (folder / inner for inner in self.inner if (folder / inner).is_dir())

    def find_list(self, root: Path, *, own: bool) -> Path | None:
        """The dataset's `split_zhou_*.json`: in its own folder, or where lists are collected."""
        folders = [*self.own_folders(root, own=own), *(root / folder for folder in _LIST_FOLDERS)]
        candidates = (folder / f"{prefix}{self.list_file}" for folder in folders for prefix in ("", "sorted_"))
        return next((file for file in candidates if file.is_file()), None)

    def find_images_without_list(self, root: Path) -> Path | None:
        """A folder that probably holds the images, though without the list nobody can be sure."""
        folders = self.image_folders(root, own=False)
        return next((folder for folder in folders if any(_may_hold_images(folder))), None)


# ------------------------------------------------------------------------------------------------ datasets with a list


def read_split(layout: DiskLayout, root: Path, *, own: bool = False) -> Reading:
    """Read one of the nine. A split has parts `train`, `val` and `test`, with rows `[path, label, class name]`."""
    file = layout.find_list(root, own=own)
    if file is None:
        raise NoListError(
            f"{layout.name}: there is no {layout.list_file} in {root}",
            f"{fetch_command(layout.name, root)} downloads it",
            layout.find_images_without_list(root),
        )
    ids, labels, classes = parse_split(file)
    return _join(layout, root, ids, labels, classes, file, own=own)


def read_aircraft(layout: DiskLayout, root: Path, *, own: bool = False) -> Reading:
    """Read Aircraft: class k is line k of `variants.txt`; `images_variant_test.txt` gives image and class."""
    folders = [images.parent for images in layout.image_folders(root, own=own)]
    home = next((folder for folder in folders if (folder / "variants.txt").is_file()), None)
    if home is None:
        raise NoListError(
            f"aircraft: there is no variants.txt beside a folder images in {root}",
            _FETCH_ANEW,
            layout.find_images_without_list(root),
        )
    file = home / "images_variant_test.txt"
    if not file.is_file():
        raise NoListError(f"{file} does not exist", _FETCH_ANEW, layout.find_images_without_list(root))
    variants = _lines(home / "variants.txt")
    by_name = {variant: label for label, variant in enumerate(variants)}
    ids, labels = [], []
    for number, line in enumerate(_lines(file), 1):
        image, _, variant = line.partition(" ")
        if variant not in by_name:
            raise DataError(f"{file}, line {number}: {variant!r} is not in variants.txt", _FETCH_ANEW)
        ids.append(f"{image}.jpg")
        labels.append(by_name[variant])
    if not ids:
        raise DataError(f"{file} is empty", _FETCH_ANEW)
    return _join(layout, root, ids, labels, variants, file, own=own)


def _join(
    layout: DiskLayout,
    root: Path,
    ids: list[str],
    labels: list[int],
    classes: list[str],
    file: Path,
    *,
    own: bool,
) -> Reading:
    """Join a list with the folder of its images: the first that holds one of three of them, else any of them."""
    candidates = list(layout.image_folders(root, own=own))
    probes = (ids[0], ids[len(ids) // 2], ids[-1])
    likely = [folder for folder in candidates if any((folder / image_id).exists() for image_id in probes)]
    for home in likely or candidates:
        missing = missing_images(home, ids)
        if len(missing) < len(ids):
            break
    else:
        expected = " or ".join(f"{layout.folders[0]}/{inner}".rstrip("/") for inner in layout.inner)
        raise AbsentError(f"{layout.name}: its images are not in {root}", f"expected a folder {expected}")
    where = f"{below(home, root)}, listed in {below(file, root)}"
    return Reading(_dataset(layout, [class_name(written) for written in classes], ids, labels, home, where), missing)


def _dataset(
    layout: DiskLayout, classes: list[str], ids: list[str], labels: list[int], home: Path, where: str
) -> Dataset:
    return Dataset(
        name=layout.name,
        title=layout.name,  # the title and the family in tables are known to the `NamedDataset`, which sets them
        family="other",
        classes=tuple(classes),
        ids=tuple(ids),
        labels=tuple(labels),
        root=home,
        layout=where,
    )


def parse_split(file: Path) -> tuple[list[str], list[int], list[str]]:
    """Ids and labels of the test part, and the class names by label."""
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
    # All parts are read for their names, so that a class keeps its name even if no test image is of it.
    for part in ("train", "val", "test"):
        for number, row in enumerate(parts.get(part) or ()):
            image_id, label, name = _parse_row(file, part, number, row)
            if names.setdefault(label, name) != name:
                raise _malformed(file, f"class {label} is called {names[label]!r} and {name!r}")
            if part == "test":
                ids.append(image_id)
                labels.append(label)
    if not ids:
        raise _malformed(file, "its list 'test' is empty")
    for label in range(len(names)):
        if label not in names:
            raise _malformed(file, f"no image has label {label}, though labels go up to {max(names)}")
    return ids, labels, [names[label] for label in sorted(names)]


def _parse_row(file: Path, part: str, number: int, row: Any) -> tuple[str, int, str]:
    match row:
        case [str(path), int(label), str(name), *_] if label >= 0 and not isinstance(label, bool):
            return path, label, name
    raise _malformed(file, f"entry {number} of {part!r} is {row!r}, not [path, label, class name]")


def _malformed(file: Path, why: str) -> DataError:
    return DataError(f"{file} cannot be used: {why}", "download it again")


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


# ------------------------------------------------------------------------------------------- ImageNet and its relatives


class ImageNetClass(NamedTuple):
    """A row of `imagenet_classes.tsv`."""

    wnid: str
    name: str
    also_in: str
    """Which of A and R have it, or `-`."""


@cache
def imagenet_classes() -> tuple[ImageNetClass, ...]:
    """The 1000 classes by label."""
    text = files("usetta.data").joinpath("imagenet_classes.tsv").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(ImageNetClass(*row.split("\t")) for row in rows[1:])


def class_folders(name: str) -> dict[str, str]:
    """The folders of the dataset `name` in the order of its labels, and the class name of each."""
    classes = imagenet_classes()
    if name == "imagenet-v2":
        # Published loaders read its folders in the order of strings: "0", "1", "10", "100".
        return {str(label): classes[label].name for label in sorted(range(len(classes)), key=str)}
    letter = {"imagenet-a": "A", "imagenet-r": "R"}.get(name, "")
    return {known.wnid: known.name for known in classes if letter in known.also_in}


def read_class_folders(layout: DiskLayout, root: Path, *, own: bool = False) -> Reading:
    """Read one of the five; what is missing are classes without images."""
    expected = class_folders(layout.name)
    candidates = list(layout.image_folders(root, own=own))
    home = next((folder for folder in candidates if not names_in(folder).isdisjoint(expected)), None)
    if home is None:
        raise _no_class_folders(layout, root, candidates)
    pattern = re.compile(r"\d+" if layout.name == "imagenet-v2" else r"n\d{8}")
    if unknown := sorted(name for name in names_in(home) if pattern.fullmatch(name) and name not in expected):
        raise DataError(
            f"{home} has the folder {unknown[0]}"
            f"{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}, "
            f"which {'is' if len(unknown) == 1 else 'are'} not of the {len(expected)} classes of {layout.name}",
            "it may be another dataset; move away what does not belong there",
        )
    ids: list[str] = []
    labels: list[int] = []
    missing = []
    for label, folder in enumerate(expected):
        images = _images_in(home / folder)
        ids += [f"{folder}/{image}" for image in images]
        labels += [label] * len(images)
        if not images:
            missing.append(folder)
    dataset = _dataset(layout, list(expected.values()), ids, labels, home, below(home, root))
    return Reading(dataset, tuple(missing), "classes")


def _no_class_folders(layout: DiskLayout, root: Path, candidates: list[Path]) -> DataError:
    for folder in candidates:
        if _images_in(folder):
            return DataError(
                f"{layout.name}: the images are directly in {folder}", "sort them into one folder per class (wnid)"
            )
    example = f"{layout.folders[0]}/{layout.inner[0]}/{next(iter(class_folders(layout.name)))}"
    return AbsentError(f"{layout.name}: its images are not in {root}", f"expected folders such as {example}")


def _images_in(folder: Path) -> list[str]:
    """Names of the images in `folder`, sorted."""
    return sorted(name for name in names_in(folder) if _is_image(name))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122 - 250 000 times


def _may_hold_images(folder: Path) -> Iterator[bool]:
    with os.scandir(folder) as entries:
        yield from (_is_image(entry.name) or (entry.is_dir() and entry.name[0] != ".") for entry in entries)


def fetch_command(name: str, root: Path) -> str:
    """What to type to get a dataset, for messages."""
    return f"`usetta data fetch {name} {shlex.quote(str(root))}`"


def below(path: Path, root: Path) -> str:
    """`path` relative to `root` if it lies there, for messages."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()
