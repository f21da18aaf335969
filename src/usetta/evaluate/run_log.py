"""What a run reports while it works: accuracies to people, and to the store who computed how much when."""

import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from usetta.evaluate.provenance import peak_memory, provenance
from usetta.evaluate.store import Store
from usetta.evaluate.worker import Outcome, WorkItem


class RunningAccuracy:
    """Right answers and answers of each method so far, on the dataset and under the seed that is worked on."""

    def __init__(self, store: Store, methods: Mapping[str, tuple[str, ...]]) -> None:
        self._methods = methods
        """By dataset, in the order in which they are shown."""
        self._store = store
        self._place: tuple[str, int, int] | None = None
        self._counts: dict[str, tuple[int, int]] = {}

    def add(self, item: WorkItem, outcome: Outcome) -> None:
        """Count the rows of an outcome that is not in the store yet."""
        place = item.dataset, item.seed, item.order_seed
        if place != self._place:
            self._place = place
            stored = self._store.right(*place)
            self._counts = {name: stored.get(name, (0, 0)) for name in self._methods[item.dataset]}
        for row in outcome.rows:
            right, answers = self._counts[row.method]
            self._counts[row.method] = right + (row.label == row.prediction), answers + 1

    def text(self, shown: int | None = None) -> str:
        """The accuracy of each method, or of the first `shown`."""
        known = [f"{name} {100 * right / n:.1f} %" for name, (right, n) in self._counts.items() if n]
        return ", ".join(known[:shown]) or "no answers"


class RunLog:
    """What this call of `evaluate` was, kept up to date in the store while it works."""

    def __init__(self, store: Store) -> None:
        self.images = self.encoded = self.rows = 0
        self._store = store
        self._name: str | None = None
        self._started = time.perf_counter()
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self._facts = {"command": command, **provenance()}

    def count(self, item: WorkItem, outcome: Outcome) -> None:
        """A work item is done."""
        self.images += len(item.images)
        self.encoded += outcome.encoded
        self.rows += len(outcome.rows)

    def save(self) -> None:
        """Record what has been counted."""
        numbers = {
            "images": self.images,
            "encoded": self.encoded,
            "seconds": round(time.perf_counter() - self._started, 1),
            "peak_memory": peak_memory(),
        }
        if self._name is None:
            self._name = self._store.note_next("invocation", self._facts | numbers)
        else:
            self._store.note("invocation", self._name, self._facts | numbers)
