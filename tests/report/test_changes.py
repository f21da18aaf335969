"""Which images changed, how many, and in which order they are shown."""

from pathlib import Path

import pytest

from usetta.evaluate.store import ResultRow, Store
from usetta.report.changes import Changes, MethodAnswer, find_changes


def row(image: str, method: str, prediction: int, true: float, *, seed: int = 0, dataset: str = "pets") -> ResultRow:
    """An answer; the true class is 1."""
    return ResultRow(dataset, image, seed, method, 1, prediction, 0.9, true, 0, 0.5, None, 1.0, None, None, 0.1)


def changes(folder: Path, rows: list[ResultRow], most: int = 9) -> Changes:
    with Store(folder) as store:
        store.add(rows)
        return find_changes(store, "clip", "use", most)


def pair(image: str, before: tuple[int, float], after: tuple[int, float], **where: object) -> list[ResultRow]:
    return [row(image, "clip", *before, **where), row(image, "use", *after, **where)]  # type: ignore[arg-type]


def test_the_most_changed_come_first_and_all_are_counted(tmp_path: Path) -> None:
    found = changes(
        tmp_path,
        [
            *pair("stays-right", (1, 0.2), (1, 0.9)),
            *pair("stays-wrong", (2, 0.2), (3, 0.1)),
            *pair("little", (2, 0.40), (1, 0.45)),
            *pair("much", (2, 0.1), (1, 0.8)),
            *pair("less-sure-but-right", (2, 0.45), (1, 0.40)),
            *pair("lost", (1, 0.9), (0, 0.1), dataset="dtd"),
            row("only-clip", "clip", 1, 0.9),
            row("only-use", "use", 1, 0.9),
        ],
        most=2,
    )
    assert (found.against, found.method, found.compared) == ("clip", "use", 6)
    assert (found.to_right.answers, found.to_wrong.answers) == (3, 1)
    assert [each.image for each in found.to_right.most] == ["much", "little"]
    (lost,) = found.to_wrong.most
    assert (lost.dataset, lost.image, lost.seed, lost.label) == ("dtd", "lost", 0, 1)
    assert (lost.before, lost.after) == (MethodAnswer(1, 0.9, 0.9), MethodAnswer(0, 0.9, 0.1))
    assert lost.was_right
    assert not lost.is_right
    assert lost.size == pytest.approx(0.8)


def test_a_image_is_listed_once_under_the_seed_that_changed_it_the_most(tmp_path: Path) -> None:
    found = changes(
        tmp_path,
        [
            *pair("a", (2, 0.3), (1, 0.5), seed=0),
            *pair("a", (2, 0.3), (1, 0.9), seed=1),
            *pair("a", (2, 0.3), (1, 0.6), seed=2),
            *pair("a", (1, 0.6), (2, 0.5), seed=3),
            *pair("b", (2, 0.3), (1, 0.8), seed=0),
        ],
    )
    assert (found.compared, found.to_right.answers, found.to_wrong.answers) == (5, 4, 1)
    assert [(each.image, each.seed) for each in found.to_right.most] == [("a", 1), ("b", 0)]
    assert [(each.image, each.seed) for each in found.to_wrong.most] == [("a", 3)]


def test_seeds_that_one_method_lacks_are_not_compared(tmp_path: Path) -> None:
    found = changes(tmp_path, [row("a", "clip", 2, 0.1), row("a", "use", 1, 0.9, seed=1)])
    assert (found.compared, found.to_right.most, found.to_wrong.most) == (0, (), ())


def test_equal_changes_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = [each for name in "cab" for each in pair(name, (2, 0.25), (1, 0.75))]
    assert [each.image for each in changes(tmp_path, rows).to_right.most] == ["a", "b", "c"]
