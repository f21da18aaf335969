"""Which packed images are those of a dataset: by name, by the names of classes, and what contradicts a list."""

import pytest

from usetta.data import DataError
from usetta.data.matching import ImageList, match_packed
from usetta.data.packed import PackedFiles, PackedRow

WANTED = ImageList(("a/1.jpg", "a/2.jpg", "b/3.jpg"), (0, 0, 1), ("apse indoor", "abbey"))


def copy(*rows: tuple[str, int | str | None], classes: tuple[str, ...] = ()) -> PackedFiles:
    return PackedFiles((), tuple(PackedRow(0, (n,), name, label) for n, (name, label) in enumerate(rows)), classes)


def rows_of(packed: PackedFiles, *, same_labels: bool = False) -> list[int]:
    """The rows that the images of the list are in."""
    match = match_packed(packed, WANTED, same_labels=same_labels)
    assert [image.id for image in match.images] == list(WANTED.ids)
    assert [image.label for image in match.images] == list(WANTED.labels)
    return [image.place[0] for image in match.images]


def test_images_are_known_by_name_whatever_the_labels_are_called() -> None:
    assert rows_of(copy(("x/3.png", "nine"), ("y/1.png", "seven"), ("y/2.png", "seven"))) == [1, 2, 0]
    assert rows_of(copy(("3", None), ("2", None), ("1", None))) == [2, 1, 0]


@pytest.mark.parametrize("labels", [(7, 8, 9), (7, 7, 7)])
def test_labels_that_divide_the_images_otherwise_contradict_the_list(labels: tuple[int, ...]) -> None:
    packed = copy(*((str(n + 1), label) for n, label in enumerate(labels)))
    image = "a/2.jpg, 8" if labels[1] == 8 else "b/3.jpg, 7"
    with pytest.raises(DataError, match=f"its label of {image}, contradicts the list"):
        match_packed(packed, WANTED)


def test_without_names_the_order_within_each_class_decides() -> None:
    packed = copy(("", 0), ("", 1), ("", 1), classes=("abbey", "indoor_apse"))
    assert rows_of(packed) == [1, 2, 0]
    assert rows_of(copy(("", "Indoor apse"), ("", "abbey"), ("", "Indoor apse"))) == [0, 2, 1]
    assert rows_of(copy(("", 1), ("", 0), ("", 0)), same_labels=True) == [1, 2, 0]


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (copy(("", 0), ("", 1), ("", 1), classes=("abbey", "chapel")), "its class 'chapel' is not in the list"),
        (copy(("", 0), ("", 1), ("", 1), classes=("abbey", "abbey")), "two of its classes are one class of the list"),
        (copy(("", 0), ("", 1), ("", 1)), "it does not say which class a label stands for; the files cannot be used"),
    ],
)
def test_classes_that_are_not_those_of_the_list_are_refused(packed: PackedFiles, message: str) -> None:
    with pytest.raises(DataError, match=message):
        match_packed(packed, WANTED)
