"""ImageNet and its four relatives: a folder of images for each class, named by wnid, or by number in ImageNet-V2.

The classes are those of the set, not the folders that happen to be there, so a missing folder is noticed instead of
shifting all labels after it. ImageNet-V2 is read in the order of its folders' names as strings ("0", "1", "10", "100"),
as published loaders do, and its class names are put into the same order.
"""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from usetta.data.benchmark import Benchmark
from usetta.data.dataset import AbsentError, DataError, Dataset
from usetta.data.locate import Reading, below, image_folders, images_in, names_in

_A_CLASS = re.compile(r"n\d{8}")
_A_NUMBER = re.compile(r"\d+")


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
    """The folders of the set `name` in the order of its labels, and the class name of each."""
    classes = imagenet_classes()
    if name == "imagenet-v2":
        return {str(label): classes[label].name for label in sorted(range(len(classes)), key=str)}
    letter = {"imagenet-a": "A", "imagenet-r": "R"}.get(name, "")
    return {each.wnid: each.name for each in classes if letter in each.also_in}


def read_class_folders(benchmark: Benchmark, root: Path, *, itself: bool) -> Reading:
    """Read one of the five; what is missing are classes without images."""
    expected = class_folders(benchmark.name)
    candidates = list(image_folders(benchmark, root, itself=itself))
    home = next((folder for folder in candidates if not names_in(folder).isdisjoint(expected)), None)
    if home is None:
        raise _not_found(benchmark, root, candidates)
    pattern = _A_NUMBER if benchmark.name == "imagenet-v2" else _A_CLASS
    if unknown := sorted(n for n in names_in(home) if pattern.fullmatch(n) and n not in expected):
        raise DataError(
            f"{home} has the folder {unknown[0]}"
            f"{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}, "
            f"which {'is' if len(unknown) == 1 else 'are'} not of the {len(expected)} classes of {benchmark.title}",
            "it may be another set; move what does not belong there away",
        )
    ids: list[str] = []
    labels: list[int] = []
    missing = []
    for label, folder in enumerate(expected):
        images = images_in(home / folder)
        ids += [f"{folder}/{image}" for image in images]
        labels += [label] * len(images)
        if not images:
            missing.append(folder)
    dataset = Dataset(
        name=benchmark.name,
        title=benchmark.title,
        family=benchmark.family,
        classes=tuple(expected.values()),
        ids=tuple(ids),
        labels=tuple(labels),
        root=home,
        layout=below(home, root),
    )
    return Reading(dataset, tuple(missing))


def _not_found(benchmark: Benchmark, root: Path, candidates: list[Path]) -> DataError:
    for folder in candidates:
        if images_in(folder):
            return DataError(
                f"{benchmark.name}: the images lie in {folder} itself", "sort them into one folder for each wnid"
            )
    place = f"{benchmark.folders[0]}/{benchmark.inner[0]}"
    example = next(iter(class_folders(benchmark.name)))
    return AbsentError(
        f"{benchmark.name}: its images are not in {root}", f"expected are folders such as {place}/{example}"
    )
