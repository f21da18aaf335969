"""What a loaded dataset is: class names, and images by id with their labels. No image is opened here.

An image's id is its path below the folder of the images, written with `/`. It does not change with the machine, the
layout on the disk or the order of the list, and so neither do views, which are keyed by it. The fingerprint is made of
the same parts and ignores the order as well: the lists that CoOp and USE publish hold the same images in different
order.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast, get_args

from usetta.registry import suggest

Family = Literal["imagenet", "fine-grained", "other"]
ImageReader = Callable[[str], str | bytes]
"""Gives the path or the content of an image by its id. It may travel to other processes, so it must be picklable."""


class DataError(Exception):
    """A dataset that cannot be used as it is: `problem` says what is wrong, `todo` what to do about it."""

    def __init__(self, problem: str, todo: str = "") -> None:
        super().__init__(problem, todo)  # both in `args`, so that the error survives pickling between processes
        self.problem = problem
        self.todo = todo

    def __str__(self) -> str:
        return f"{self.problem}; {self.todo}" if self.todo else self.problem


class UnknownDatasetError(DataError, ValueError):
    """No dataset has that name."""


class AbsentError(DataError):
    """The images are not there at all."""


class NoListError(DataError):
    """The list of the images is not there; `images` is the folder that probably holds them, if there is one."""

    def __init__(self, problem: str, todo: str = "", images: Path | None = None) -> None:
        super().__init__(problem, todo)
        self.args = (problem, todo, images)
        self.images = images


class DatasetItem(NamedTuple):
    """An image of a dataset."""

    id: str
    path: Path
    """Of the file; images in packed files have none, and `Dataset.source` reads them."""
    label: int | None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory: for each image one string and one reference to a label, so that 250 000 are no burden."""

    name: str
    title: str
    """As in the paper's table of datasets."""
    family: Family
    classes: tuple[str, ...] = field(repr=False)
    """Names by label, as prompts want them (spaces, no underscores)."""
    ids: tuple[str, ...] = field(repr=False)
    labels: tuple[int, ...] | None = field(repr=False)
    """None if the images have no labels."""
    root: Path
    """The folder that ids are relative to."""
    layout: str
    """Where it was found, to be shown to people."""
    reader: ImageReader | None = field(default=None, repr=False)
    """Where the images are not files below `root`: what reads them."""

    def __post_init__(self) -> None:
        if not self.ids:
            raise DataError(f"{self.name} has no images")
        if not self.classes:
            raise DataError(f"{self.name} has no classes")
        if len(set(self.ids)) < len(self.ids):
            repeated = Counter(self.ids).most_common(1)[0][0]
            raise DataError(f"{self.name} lists the image {repeated} twice", "list every image once")
        if self.labels is not None:
            if len(self.labels) != len(self.ids):
                raise DataError(f"{self.name} has {len(self.ids)} images and {len(self.labels)} labels")
            if not (min(self.labels) >= 0 and max(self.labels) < len(self.classes)):
                raise DataError(f"{self.name} has labels outside 0..{len(self.classes) - 1}")

    @classmethod
    def from_hf(cls, rows: Any, name: str, *, root: str | os.PathLike[str] | None = None) -> "Dataset":
        """A split of a Hugging Face dataset (`datasets.load_dataset(...)["test"]`), which is not copied.

        With the `name` of one of the paper's datasets, ids, labels and class names are those of its list, which is
        looked for below `root` and in the cache, or downloaded. With any other, they are its own.
        """
        from usetta.data.objects import from_hf  # it imports this module

        return from_hf(rows, name, root)

    @classmethod
    def from_torchvision(cls, dataset: Any, name: str, *, root: str | os.PathLike[str] | None = None) -> "Dataset":
        """A dataset of torchvision, or any that lists its files as `samples`; its transforms are not applied.

        `name` and `root` as in `from_hf`.
        """
        from usetta.data.objects import from_torchvision

        return from_torchvision(dataset, name, root)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> DatasetItem:
        image_id = self.ids[index]
        return DatasetItem(image_id, self.root / image_id, None if self.labels is None else self.labels[index])

    def __iter__(self) -> Iterator[DatasetItem]:
        return (self[index] for index in range(len(self)))

    def source(self, image_id: str) -> str | Callable[[], str | bytes]:
        """An image as `ImageRequest` takes it: the path of a file, or what reads it."""
        return str(self.root / image_id) if self.reader is None else partial(self.reader, image_id)

    @property
    def augmix(self) -> bool:
        """Whether the paper's strong views of this dataset go through AugMix; elsewhere they are crops only."""
        return self.family == "fine-grained"

    def as_family(self, family: str) -> Self:
        """The same images, measured with the settings that the paper has for datasets of that family."""
        if family not in get_args(Family):
            raise ValueError(f"unknown family {family!r}; {suggest(family, get_args(Family))}")
        return replace(self, family=cast(Family, family))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of class names, ids and labels; the order of the images does not count."""
        digest = hashlib.blake2b(json.dumps(self.classes).encode(), digest_size=16)
        labels = self.labels or (None,) * len(self.ids)
        for image_id, label in sorted(zip(self.ids, labels, strict=True)):
            digest.update(f"\n{image_id}\0{label}".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Reading:
    """A dataset as its list says, and what of it is not on the disk."""

    dataset: Dataset
    missing: tuple[str, ...] = ()
    missing_kind: Literal["images", "classes"] = "images"
    """Ids of images; or names of class folders without images, where there is no list that says which there are."""


def class_name(written: str) -> str:
    """A class name as prompts want it: underscores become spaces, nothing else changes."""
    return written.replace("_", " ")


def names_in(folder: Path) -> set[str]:
    """What is in `folder`; nothing if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def missing_images(root: Path, ids: Iterable[str]) -> tuple[str, ...]:
    """Those of `ids` that are not below `root`."""
    # Whole folders are listed instead of asking for one file after the other: on the big datasets and on network disks
    # that is the difference between a second and minutes.
    names: dict[str, set[str]] = {}
    missing = []
    for image_id in ids:
        folder, _, name = image_id.rpartition("/")
        if folder not in names:
            names[folder] = names_in(root / folder)
        if name not in names[folder]:
            missing.append(image_id)
    return tuple(missing)
