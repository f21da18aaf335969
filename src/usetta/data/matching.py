"""Which image of a dataset a row of a table, a member of a tar or a file is.

Copies of a dataset call its images differently, or not at all. Where every image of the list is found by its name, the
names decide, and the copy may contain more. Without names, a copy with as many images of each class as the list is
taken class by class in its order: the labels are right, though an image may have the id of a neighbour of its class.
Where there is no list, the ids are the names that the copy has, which are the original's only if it kept them.
Everything else is refused: another number of images, other classes, labels that contradict the list.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from usetta.data.dataset import DataError
from usetta.data.packed import IndexedImage, PackedFiles, PackedRow

_HINT = "it is another version of the dataset"
_WNID = re.compile(r"_n\d{8}$")
"""What the hub's ImageNet appends to the names of validation images."""


@dataclass(frozen=True)
class ImageList:
    """What the images of a dataset should be."""

    ids: tuple[str, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class ClassList:
    """What the classes of a dataset without a list should be, and how many images there are."""

    folders: Mapping[str, str]
    """Folder of each class in the order of our labels, and its name."""
    images: int
    balanced: bool
    """Whether all classes have the same number of images."""


@dataclass(frozen=True)
class Match:
    """The images of a dataset in packed files."""

    images: tuple[IndexedImage, ...]
    """In the order of the list."""
    classes: tuple[str, ...]
    by: str
    """How they were recognised, for people."""


def match_packed(packed: PackedFiles, wanted: ImageList | ClassList, *, same_labels: bool = False) -> Match:
    """Find the images of a dataset; `same_labels`: labels count as ours do where names of classes do not decide."""
    if isinstance(wanted, ImageList):
        return match_list(packed, wanted, same_labels=same_labels)
    return match_classes(packed, wanted, same_labels=same_labels)


def match_list(packed: PackedFiles, wanted: ImageList, *, same_labels: bool = False) -> Match:
    """Find the images of a list."""
    rows, missing = _by_name(packed.rows, wanted.ids)
    if not missing:
        _require_consistent(rows, wanted)
        return Match(_indexed(wanted.ids, wanted.labels, rows), wanted.classes, "by name")
    if len(missing) < len(wanted.ids):
        raise DataError(
            f"{len(missing)} of {len(wanted.ids)} listed images are not in it, the first is {missing[0]}", _HINT
        )
    return _by_order(packed, wanted, same_labels)


def match_classes(packed: PackedFiles, wanted: ClassList, *, same_labels: bool = False) -> Match:
    """Take all images as those of a dataset that has a folder for each class and no list."""
    folders = list(wanted.folders)
    by_label = _labels(packed, folders, list(wanted.folders.values()), same_labels)
    if len(packed.rows) != wanted.images:
        raise DataError(f"it has {len(packed.rows):,} images instead of {wanted.images:,}", _HINT)
    rows: dict[int, list[tuple[str, PackedRow]]] = defaultdict(list)
    for number, row in enumerate(packed.rows):
        name = PurePosixPath(row.name)
        stem = _WNID.sub("", name.stem) if row.name else f"{number:06d}"
        label = by_label.get(row.label, -1) if row.label is not None else _label_of_folder(name, folders)
        rows[label].append((f"{stem}{name.suffix or '.jpg'}", row))
    if strange := rows.get(-1):
        raise DataError(f"{len(strange)} of its images are of other classes, such as {strange[0][1].name}", _HINT)
    if empty := next((folder for label, folder in enumerate(folders) if label not in rows), None):
        raise DataError(f"it has no image of {empty}", _HINT)
    sizes = {len(group) for group in rows.values()}
    if wanted.balanced and len(sizes) > 1:
        raise DataError(f"its classes have {min(sizes)} to {max(sizes)} images instead of equally many", _HINT)
    images = [
        IndexedImage(f"{folder}/{name}", label, row.file, row.place)
        for label, folder in enumerate(folders)
        for name, row in sorted(rows[label])
    ]
    if twice := [image_id for image_id, count in Counter(image.id for image in images).items() if count > 1]:
        raise DataError(f"it has several images called {twice[0]}", _HINT)
    named = "with their own file names" if all(row.name for row in packed.rows) else "numbered"
    return Match(tuple(images), tuple(wanted.folders.values()), f"by class, {named}")


def _label_of_folder(name: PurePosixPath, folders: Sequence[str]) -> int:
    return folders.index(name.parent.name) if name.parent.name in folders else -1


def _indexed(ids: Sequence[str], labels: Sequence[int], rows: Sequence[PackedRow]) -> tuple[IndexedImage, ...]:
    triples = zip(ids, labels, rows, strict=True)
    return tuple(IndexedImage(image_id, label, row.file, row.place) for image_id, label, row in triples)


def _by_name(rows: Sequence[PackedRow], ids: Sequence[str]) -> tuple[list[PackedRow], list[str]]:
    """The row of each image, and the images that have none, or several that cannot be told apart."""
    by_stem: dict[str, list[PackedRow]] = defaultdict(list)
    for row in rows:
        by_stem[PurePosixPath(row.name).stem].append(row)
    chosen, missing = [], []
    for image_id in ids:
        path = PurePosixPath(image_id).with_suffix("").as_posix()
        rows_of_stem = by_stem.get(PurePosixPath(image_id).stem, [])
        exact = [row for row in rows_of_stem if _ends_with(row.name, path)] or rows_of_stem
        if len(exact) == 1:
            chosen.append(exact[0])
        else:
            missing.append(image_id)
    return chosen, missing


def _ends_with(name: str, path: str) -> bool:
    written = PurePosixPath(name).with_suffix("").as_posix()
    return written == path or written.endswith(f"/{path}")


def _require_consistent(rows: Sequence[PackedRow], wanted: ImageList) -> None:
    """Whatever the classes are called and how they are counted: one label of the copy is one label of the list."""
    ours: dict[int | str, int] = {}
    theirs: dict[int, int | str] = {}
    for image_id, label, row in zip(wanted.ids, wanted.labels, rows, strict=True):
        if row.label is None:
            continue
        if ours.setdefault(row.label, label) != label or theirs.setdefault(label, row.label) != row.label:
            raise DataError(f"its label of {image_id}, {row.label!r}, contradicts the list", _HINT)


def _by_order(packed: PackedFiles, wanted: ImageList, same_labels: bool) -> Match:
    if len(packed.rows) != len(wanted.ids):
        raise DataError(
            f"it has {len(packed.rows):,} images without the names of the list, which has {len(wanted.ids):,}", _HINT
        )
    by_label = _labels(packed, [], list(wanted.classes), same_labels)
    rows: dict[int, list[PackedRow]] = defaultdict(list)
    for row in packed.rows:
        rows[by_label.get(row.label, -1) if row.label is not None else -1].append(row)
    for label, count in sorted(Counter(wanted.labels).items()):
        if len(rows[label]) != count:
            raise DataError(
                f"it has {len(rows[label])} images of {wanted.classes[label]!r}, the list has {count}", _HINT
            )
    waiting = {label: iter(group) for label, group in rows.items()}
    chosen = [next(waiting[label]) for label in wanted.labels]
    return Match(_indexed(wanted.ids, wanted.labels, chosen), wanted.classes, "by order within each class")


def _labels(
    packed: PackedFiles, folders: Sequence[str], names: Sequence[str], same_labels: bool
) -> dict[int | str | None, int]:
    """Our label of each label of the copy: by the names of its classes, or by number if it counts as we do."""
    numbers = list(range(len(names)))
    written = {row.label for row in packed.rows if isinstance(row.label, str)}
    if written or packed.classes:
        known = {_words(name): label for label, name in enumerate(names)}
        known |= {_words(folder): label for label, folder in enumerate(folders)}
        theirs: dict[int | str, str] = {name: name for name in written} or dict(enumerate(packed.classes))
        mapped = {label: known.get(_words(name)) for label, name in theirs.items()}
        if None not in mapped.values() and len(set(mapped.values())) == len(mapped):
            return {label: ours for label, ours in mapped.items() if ours is not None}
        if not same_labels:
            strange = next((theirs[label] for label, ours in mapped.items() if ours is None), None)
            if strange is None:
                raise DataError("two of its classes are one class of the list", _HINT)
            raise DataError(f"its class {strange!r} is not in the list", _HINT)
    elif not same_labels and any(row.label is not None for row in packed.rows):
        raise DataError("it does not say which class a label stands for", "the files cannot be used by themselves")
    # A folder that is a number, as ImageNet-V2 has it, is the number of its class.
    by_number = {int(folder): label for label, folder in enumerate(folders) if folder.isdecimal()}
    return {number: by_number.get(number, number) for number in numbers}


def _words(name: str) -> tuple[str, ...]:
    """The words of a class name in one order: `apse_indoor` is `indoor apse`."""
    return tuple(sorted(re.findall(r"[a-z0-9]+", name.lower())))
