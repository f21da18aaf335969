"""Small runs with answers that were never computed, so that every number in a table can be checked by hand."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from usetta.data.named import DATASETS
from usetta.evaluate.store import ResultRow, Store

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
            "seconds": 0.25,
        }
        rows.append(ResultRow(**values | changed))
    return rows


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
