"""When to trust the answers of a run: a temperature and a threshold, fitted on its labels (see `usetta.rejection`)."""

from dataclasses import dataclass

import numpy as np

from usetta.evaluate.metrics import ece
from usetta.evaluate.store import Store, StoreError
from usetta.rejection import Calibration, calibrated, fit


@dataclass(frozen=True)
class FittedCalibration:
    """A calibration, and what it changes on the answers that it was fitted on."""

    calibration: Calibration
    ece_before: float
    """Calibration error in percent."""
    ece_after: float
    accuracy_of_all: float


def calibrate(store: Store, method: str | None, dataset: str | None, accuracy: float) -> FittedCalibration:
    """Fit on the rows of `method` (the only one if None) and `dataset` (all if None)."""
    groups = store.groups()
    datasets, names = {group[0] for group in groups}, {group[2] for group in groups}
    if method is None:
        if len(names) != 1:
            raise StoreError(f"the run has several methods: choose one with --method ({', '.join(sorted(names))})")
        (method,) = names
    if method not in names:
        raise StoreError(f"the run has no method {method!r}; it has {', '.join(sorted(names))}")
    if dataset is not None and dataset not in datasets:
        raise StoreError(f"the run has no dataset {dataset!r}; it has {', '.join(sorted(datasets))}")
    sizes = {name: facts["classes"] for name, facts in store.facts("dataset").items()}
    where = {"method": method} | ({"dataset": dataset} if dataset else {})
    columns = store.columns(["dataset", "label", "prediction", "confidence"], where)
    label, prediction, confidence = (np.asarray(columns[name]) for name in ("label", "prediction", "confidence"))
    classes = np.array([sizes[name] for name in columns["dataset"]])
    right = label == prediction
    temperature, below = fit(confidence, right, classes, accuracy)
    scores = calibrated(confidence, classes, temperature)
    kept = scores >= below
    model = store.facts("run")["model"]
    known = Calibration(
        model["name"],
        model["fingerprint"],
        method,
        temperature,
        below,
        accuracy=float(right[kept].mean()),
        kept=float(kept.mean()),
        images=len(label),
    )
    before, after = (float(ece(label, prediction, column)) for column in (confidence, scores))
    return FittedCalibration(known, before, after, float(right.mean()))
