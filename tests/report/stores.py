"""Small runs with made-up answers, so that every number in a table can be checked by hand; and ways to read tables."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from usetta.data.named import DATASETS
from usetta.evaluate.metrics import FINE_GRAINED, IMAGENET
from usetta.evaluate.store import ResultRow, Store
from usetta.report import tables
from usetta.report.reproduce import ITEMS
from usetta.report.tables import Cell, Table

CLASSES = ["red fox", 'naïve, "quoted" cat', "owl"]


def answers(dataset: str, method: str, right: str, *, seed: int = 0, first: int = 0, **changed: Any) -> list[ResultRow]:
    """One row per character of `right`, `1` for a right answer, of the images with the numbers from `first` on.

    The probabilities are 0.8 for the answer and 0.2 for another class, which is the true one if the answer is wrong.
    """
    tuned = method.partition(":")[0] in ("use", "tpt", "tpt+se")
    rows = []
    for number, sign in enumerate(right, start=first):
        hit = sign == "1"
        values: dict[str, Any] = {
            "dataset": dataset,
            "image": f"{number:04}.jpg",
            "seed": seed,
            "method": method,
            "label": 0,
            "prediction": 0 if hit else 1,
            "confidence": 0.8,
            "true_probability": 0.8 if hit else 0.2,
            "rank": 0 if hit else 5,
            "sum_of_squares": 0.68,
            "delta": 0.5,
            "beta": 0.5,
            "before": 1 if tuned else None,
            "skipped": number % 2 == 0 if tuned else None,
            "views": 64,
            "seconds": 0.25,
        }
        rows.append(ResultRow(**values | changed))
    return rows


def full(name: str, datasets: tuple[str, ...] = (), seeds: tuple[int, ...] = (0, 1)) -> list[ResultRow]:
    """All rows that an item needs: method m is right on 5 + m of 20 images, and on one more under seed 1."""
    item = ITEMS[name]
    return [
        row
        for dataset in datasets or item.datasets
        for place, method in enumerate(item.methods)
        for seed in seeds
        for row in answers(
            dataset, method, ("1" * (5 + place + seed)).ljust(20, "0"), seed=seed, seconds=0.1 * (1 + place)
        )
    ]


def make_run(
    folder: Path,
    rows: Iterable[ResultRow],
    *,
    model: str = "ViT-B-16",
    views: int = 64,
    templates: Iterable[str] = ("a photo of a {}.",),
    context: str | None = None,
    sets: dict[str, dict[str, Any]] | None = None,
) -> Store:
    """A run with these rows and the facts that the runner writes; `sets` has other facts of datasets."""
    store = Store(folder)
    rows = list(rows)
    store.add(rows)
    for name in sorted({row.dataset for row in rows}):
        known = DATASETS.find(name)
        facts = {
            "title": known.title if known else name,
            "family": known.family if known else "other",
            "augmix": bool(known and known.family == "fine-grained"),
            "fingerprint": "0",
            "images": known.images if known else len({row.image for row in rows if row.dataset == name}),
            "classes": known.classes if known else len(CLASSES),
        }
        store.fix("dataset", name, facts | (sets or {}).get(name, {}))
        store.note("classes", name, CLASSES)
    shape = {"size": 224, "scale": [0.08, 1.0], "ratio": [0.75, 4 / 3], "severity": 1.0}
    store.fix("run", "model", {"name": model, "fingerprint": "0", "precision": "fp32", "logit_scale": 100.0})
    store.fix("run", "views", {"views": views, **shape})
    store.fix("run", "prompt", {"templates": list(templates), "context": context})
    return store


def cell(table: Table, row: str, column: str) -> Cell:
    """The cell of a table."""
    return next(line for line in table.rows if line.name == row).cells[column]


def column_notes(table: Table) -> dict[str, tuple[str, ...]]:
    """Notes by column."""
    return {column.name: column.notes for column in table.columns}


def printed(table: Table, width: int = 80) -> str:
    """What a terminal of that width shows, without colours and without spaces at the ends of lines."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(tables.terminal(table))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def values(table: Table) -> dict[str, dict[str, float | None]]:
    """Our numbers by row and column."""
    return {
        row.name: {column.name: row.cells.get(column.name, Cell()).value for column in table.columns}
        for row in table.rows
    }


def fifteen(method: str = "se", seed: int = 0, more: str = "") -> list[Any]:
    """25, 50, 75, 100 and 0 % on the ImageNet sets, 100 % on DTD, 50 % on the nine others."""
    right = dict(zip(IMAGENET, ("1000", "1100", "1110", "1111", "0000"), strict=True))
    right |= {name: "1111" if name == "dtd" else "1100" for name in FINE_GRAINED}
    return [row for name, signs in right.items() for row in answers(name, method, more or signs, seed=seed)]
