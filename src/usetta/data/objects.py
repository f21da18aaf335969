"""Datasets that are objects of other libraries: of Hugging Face `datasets` and of torchvision, which are not imported.

One of the paper's datasets gets the ids, labels and names of its list, whatever the object calls them, so features that
were computed from files are found again. Any other keeps its own names. Images are given as they are stored, before
any transform of the object: a file, or its bytes.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from usetta.data.dataset import DataError, Dataset, class_name
from usetta.data.matching import Match, match_packed
from usetta.data.mirrors import wanted_images
from usetta.data.named import DATASETS, NamedDataset
from usetta.data.packed import LABEL_COLUMNS, NAME_COLUMNS, IndexedImage, PackedFiles, PackedRow
from usetta.images import ImageError

_ROWS = 1000
"""Rows that are read at once."""


@dataclass(frozen=True)
class HfReader:
    """Reads images of a Hugging Face dataset by id."""

    rows: Any
    column: str
    numbers: Mapping[str, int]

    def __call__(self, image_id: str) -> str | bytes:
        """The bytes of an image, or the path of its file."""
        cell = self.rows[self.numbers[image_id]][self.column] or {}  # a row may have no image at all
        content: str | bytes | None = cell.get("bytes") or cell.get("path")
        if not content:
            raise ImageError(image_id, "the dataset holds neither its bytes nor its path")
        return content


@dataclass(frozen=True)
class PathReader:
    """Gives the files of images by id."""

    paths: Mapping[str, str]

    def __call__(self, image_id: str) -> str:
        """The path of an image."""
        return self.paths[image_id]


def from_hf(rows: Any, name: str, root: str | os.PathLike[str] | None) -> Dataset:
    """See `Dataset.from_hf`."""
    features = getattr(rows, "features", None)
    if not isinstance(features, Mapping) or not hasattr(rows, "cast_column"):
        raise TypeError(f"expected a split of a Hugging Face dataset, not a {type(rows).__name__}")
    images = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    if not images:
        raise DataError(f"the dataset has no column of images; its columns are {', '.join(features)}")
    column = images[0]
    label = next((known for known in LABEL_COLUMNS if known in features), None)
    named = next((known for known in NAME_COLUMNS if known in features), None)
    if is_dataclass(features[column]):
        rows = rows.cast_column(column, replace(features[column], decode=False))
    names: list[str] = []
    labels: list[Any] = []
    for batch in rows.with_format("arrow").iter(batch_size=_ROWS):
        paths = batch.column(column).combine_chunks().field("path").to_pylist()  # without reading the bytes
        written = batch.column(named).to_pylist() if named else [None] * len(paths)
        names += [str(path or text or "") for path, text in zip(paths, written, strict=True)]
        labels += batch.column(label).to_pylist() if label else [None] * len(paths)
    classes = tuple(getattr(features[label], "names", None) or ()) if label else ()
    match = _match(names, labels, classes, name, root)
    numbers = {image.id: image.file for image in match.images}
    return _dataset(match, name, f"a Hugging Face dataset, {match.by}", HfReader(rows, column, numbers))


def from_torchvision(dataset: Any, name: str, root: str | os.PathLike[str] | None) -> Dataset:
    """See `Dataset.from_torchvision`."""
    paths, labels = _torchvision_files(dataset)
    classes = [name if isinstance(name, str) else name[0] for name in getattr(dataset, "classes", ())]
    known = DATASETS.find(name)
    if known and known.family == "imagenet":
        labels = [None] * len(paths)  # the folders say more than numbers, which depend on the folders that exist
    match = _match(paths, labels, tuple(classes), name, root)
    reader = PathReader({image.id: paths[image.file] for image in match.images})
    return _dataset(match, name, f"a torchvision dataset, {match.by}", reader)


def _torchvision_files(dataset: Any) -> tuple[list[str], list[Any]]:
    """Paths and labels, under the names that torchvision's classes give them."""
    for attribute in ("samples", "imgs", "_samples"):
        if pairs := getattr(dataset, attribute, None):
            return [os.fspath(path) for path, _ in pairs], [label for _, label in pairs]
    for attribute in ("_image_files", "_images"):
        if files := getattr(dataset, attribute, None):
            return [os.fspath(path) for path in files], list(getattr(dataset, "_labels", [None] * len(files)))
    if all(hasattr(dataset, attribute) for attribute in ("root", "categories", "index", "y")):  # Caltech101
        home = Path(dataset.root) / "101_ObjectCategories"
        folders = [dataset.categories[label] for label in dataset.y]
        pairs = zip(folders, dataset.index, strict=True)
        return [str(home / folder / f"image_{number:04d}.jpg") for folder, number in pairs], list(dataset.y)
    raise TypeError(f"a {type(dataset).__name__} does not say which files its images are; use the folder of its files")


def _match(
    names: Sequence[str],
    labels: Sequence[Any],
    classes: tuple[str, ...],
    name: str,
    root: str | os.PathLike[str] | None,
) -> Match:
    rows = tuple(PackedRow(number, (), *pair) for number, pair in enumerate(zip(names, labels, strict=True)))
    packed = PackedFiles((), rows, classes)
    named = DATASETS.find(name)
    if named is None:
        return _as_given(packed)
    has_list = named.family == "imagenet" or (named.source and named.source.split)
    if has_list:
        return match_packed(packed, wanted_images(named, Path(root).expanduser() if root else None), same_labels=True)
    return _complete(_as_given(packed), named)


def _as_given(packed: PackedFiles) -> Match:
    """All images in their own order, with their own labels; ids are their names, or numbers if these are not unique."""
    if not packed.classes or not all(isinstance(row.label, int) for row in packed.rows):
        raise DataError("the dataset does not say what its classes are called")
    names = [PurePosixPath(row.name).name for row in packed.rows]
    unique = len(set(names)) == len(names)
    ids = names if unique else [f"{number:06d}" for number in range(len(names))]
    images = [
        IndexedImage(image_id, int(row.label or 0), row.file, ())
        for image_id, row in zip(ids, packed.rows, strict=True)
    ]
    by = "with its own names" if unique else "with numbers as names"
    return Match(tuple(images), tuple(map(class_name, packed.classes)), by)


def _complete(match: Match, named: NamedDataset) -> Match:
    """`match`, if it has the size of the dataset: all that can be checked without a list."""
    if (len(match.images), len(match.classes)) != (named.images, named.classes):
        raise DataError(
            f"{named.name} has {named.images:,} images of {named.classes} classes, this has {len(match.images):,} of "
            f"{len(match.classes)}",
            "use its test split",
        )
    return match


def _dataset(match: Match, name: str, layout: str, reader: Any) -> Dataset:
    named = DATASETS.find(name)
    return Dataset(
        name=named.name if named else name,
        title=named.title if named else name,
        family=named.family if named else "other",
        classes=match.classes,
        ids=tuple(image.id for image in match.images),
        labels=tuple(image.label for image in match.images),
        root=Path(),
        layout=layout,
        reader=reader,
    )
