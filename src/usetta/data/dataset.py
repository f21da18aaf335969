"""What a loaded dataset is: class names, and images by id with their labels. No image is opened here.

An image's id is its path below the folder of the images, written with `/`. It does not change with the machine, the
layout of the disk or the order of the list, so views that are keyed by it do not either. The fingerprint is made of the
same parts and forgets the order as well: the lists that CoOp and USE publish hold the same images in different order.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

Family = Literal["imagenet", "fine-grained", "other"]


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
    """The list of the images is not there."""


class DatasetItem(NamedTuple):
    """An image of a dataset."""

    id: str
    path: Path
    label: int | None


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory: for each of 250 000 images one string and one reference to a label."""

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
    """Where it was found, for people."""

    def __post_init__(self) -> None:
        if not self.ids:
            raise DataError(f"{self.name} has no images")
        if not self.classes:
            raise DataError(f"{self.name} has no classes")
        if len(set(self.ids)) < len(self.ids):
            twice = Counter(self.ids).most_common(1)[0][0]
            raise DataError(f"{self.name} lists the image {twice} twice", "list every image once")
        if self.labels is not None:
            if len(self.labels) != len(self.ids):
                raise DataError(f"{self.name} has {len(self.ids)} images and {len(self.labels)} labels")
            if not (min(self.labels) >= 0 and max(self.labels) < len(self.classes)):
                raise DataError(f"{self.name} has labels outside 0..{len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> DatasetItem:
        image = self.ids[index]
        return DatasetItem(image, self.root / image, None if self.labels is None else self.labels[index])

    def __iter__(self) -> Iterator[DatasetItem]:
        return (self[index] for index in range(len(self)))

    @property
    def augmix(self) -> bool:
        """Whether the paper's strong views of this set go through AugMix; elsewhere they are crops only."""
        return self.family == "fine-grained"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of class names, ids and labels; the order of the images does not count."""
        digest = hashlib.blake2b(json.dumps(self.classes).encode(), digest_size=16)
        labels = self.labels or (None,) * len(self.ids)
        for image, label in sorted(zip(self.ids, labels, strict=True)):
            digest.update(f"\n{image}\0{label}".encode())
        return digest.hexdigest()


def class_name(written: str) -> str:
    """A class name as prompts want it: underscores become spaces, nothing else changes."""
    return written.replace("_", " ")
