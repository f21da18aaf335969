"""Images whose answer another method turned from wrong to right, or from right to wrong.

The most changed come first: those whose true class gained or lost the most probability. An image that several seeds
changed in the same direction is listed once, under the seed that changed it the most.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, NamedTuple

from usetta.evaluate.store import Store

_COLUMNS = ("image", "label", "prediction", "confidence", "true_probability")


class MethodAnswer(NamedTuple):
    """What a method said about an image."""

    prediction: int
    confidence: float
    true_probability: float


@dataclass(frozen=True)
class AnswerChange:
    """An image, and what two methods said about it under one seed."""

    dataset: str
    image: str
    seed: int
    label: int
    before: MethodAnswer
    after: MethodAnswer

    @property
    def was_right(self) -> bool:
        return self.before.prediction == self.label

    @property
    def is_right(self) -> bool:
        return self.after.prediction == self.label

    @property
    def size(self) -> float:
        """How much probability the true class gained, or lost if the answer is wrong now."""
        gain = self.after.true_probability - self.before.true_probability
        return gain if self.is_right else -gain


@dataclass(frozen=True)
class Direction:
    """How many answers changed in this direction, and the most changed of their images."""

    answers: int = 0
    most: tuple[AnswerChange, ...] = ()


@dataclass(frozen=True)
class Changes:
    """What a method changed in the answers of another."""

    against: str
    method: str
    compared: int
    """Answers that both gave: one for every image and seed."""
    to_right: Direction
    to_wrong: Direction


def find_changes(store: Store, against: str, method: str, most: int) -> Changes:
    """What `method` changed in the answers of `against`, with at most `most` images in each direction."""
    compared, to_right, to_wrong = 0, Direction(), Direction()
    for both in _compared(store, against, method):
        compared += len(both)
        changed = [each for each in both if each.was_right != each.is_right]
        to_right = _joined(to_right, [each for each in changed if each.is_right], most)
        to_wrong = _joined(to_wrong, [each for each in changed if not each.is_right], most)
    return Changes(against, method, compared, to_right, to_wrong)


def _compared(store: Store, against: str, method: str) -> Iterator[list[AnswerChange]]:
    """Images that both methods answered, changed or not, one list for every dataset and seed."""
    groups = {(dataset, seed, name) for dataset, seed, name, _ in store.groups()}
    for dataset, seed in sorted({(dataset, seed) for dataset, seed, _ in groups}):
        if {(dataset, seed, against), (dataset, seed, method)} <= groups:
            before, after = (_answers(store, dataset, seed, name) for name in (against, method))
            yield [
                AnswerChange(dataset, image, seed, label, answer, after[image][1])
                for image, (label, answer) in before.items()
                if image in after
            ]


def _answers(store: Store, dataset: str, seed: int, method: str) -> dict[str, tuple[int, MethodAnswer]]:
    """Label and answer by image."""
    found = store.columns(_COLUMNS, {"dataset": dataset, "seed": seed, "method": method})
    rows: Iterable[tuple[Any, ...]] = zip(*found.values(), strict=True)
    return {image: (label, MethodAnswer(*answer)) for image, label, *answer in rows}


def _joined(found: Direction, more: list[AnswerChange], most: int) -> Direction:
    largest: dict[tuple[str, str], AnswerChange] = {}
    for change in (*found.most, *more):
        key = change.dataset, change.image
        if key not in largest or change.size > largest[key].size:
            largest[key] = change
    ordered = nsmallest(most, largest.values(), key=lambda change: (-change.size, change.dataset, change.image))
    return Direction(found.answers + len(more), tuple(ordered))
