"""Pictures whose answer another method turned from wrong to right, or from right to wrong.

The most changed come first: those whose true class gained or lost the most probability. A picture that several seeds
changed in the same direction is listed once, under the seed that changed it the most.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, NamedTuple

from usetta.evaluate.store import Store

_COLUMNS = ("picture", "label", "prediction", "confidence", "true_probability")


class Answer(NamedTuple):
    """What a method said about a picture."""

    prediction: int
    confidence: float
    true_probability: float


@dataclass(frozen=True)
class Change:
    """A picture, and what two methods said about it under one seed."""

    dataset: str
    picture: str
    seed: int
    label: int
    before: Answer
    after: Answer

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
    """How many answers changed in this direction, and the most changed of their pictures."""

    answers: int = 0
    most: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Changes:
    """What a method changed in the answers of another."""

    against: str
    method: str
    compared: int
    """Answers that both gave: one for every picture and seed."""
    to_right: Direction
    to_wrong: Direction


def find_changes(store: Store, against: str, method: str, most: int) -> Changes:
    """What `method` changed in the answers of `against`, with at most `most` pictures in each direction."""
    compared, to_right, to_wrong = 0, Direction(), Direction()
    for both in _compared(store, against, method):
        compared += len(both)
        changed = [each for each in both if each.was_right != each.is_right]
        to_right = _joined(to_right, [each for each in changed if each.is_right], most)
        to_wrong = _joined(to_wrong, [each for each in changed if not each.is_right], most)
    return Changes(against, method, compared, to_right, to_wrong)


def _compared(store: Store, against: str, method: str) -> Iterator[list[Change]]:
    """Pictures that both methods answered, changed or not, one list for every data set and seed."""
    groups = {(dataset, seed, name) for dataset, seed, name, _ in store.groups()}
    for dataset, seed in sorted({(dataset, seed) for dataset, seed, _ in groups}):
        if {(dataset, seed, against), (dataset, seed, method)} <= groups:
            before, after = (_answers(store, dataset, seed, name) for name in (against, method))
            yield [
                Change(dataset, picture, seed, label, answer, after[picture][1])
                for picture, (label, answer) in before.items()
                if picture in after
            ]


def _answers(store: Store, dataset: str, seed: int, method: str) -> dict[str, tuple[int, Answer]]:
    """Label and answer by picture."""
    found = store.columns(_COLUMNS, {"dataset": dataset, "seed": seed, "method": method})
    rows: Iterable[tuple[Any, ...]] = zip(*found.values(), strict=True)
    return {picture: (label, Answer(*answer)) for picture, label, *answer in rows}


def _joined(found: Direction, more: list[Change], most: int) -> Direction:
    largest: dict[tuple[str, str], Change] = {}
    for change in (*found.most, *more):
        key = change.dataset, change.picture
        if key not in largest or change.size > largest[key].size:
            largest[key] = change
    ordered = nsmallest(most, largest.values(), key=lambda change: (-change.size, change.dataset, change.picture))
    return Direction(found.answers + len(more), tuple(ordered))
