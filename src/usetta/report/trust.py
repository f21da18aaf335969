"""How far the answers of a run can be trusted: calibration, selection, images of other classes, stability.

One table with a section for each dataset. Calibration error is given over 15 and over 20 bins, since the field uses
both. Differences from a baseline come with intervals by paired bootstrap over images.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from usetta.evaluate.metrics import OOD_SCORES, auroc, changed, fpr95, metric_difference, ood_difference, over_seeds
from usetta.evaluate.store import Store
from usetta.report.measured import METRIC_FORMATS, RunMetrics, distinct_titles
from usetta.report.results import present_method
from usetta.report.tables import Cell, Column, Table, TableRow

TRUST = ("top1", "ece", "ece20", "aece", "nll", "brier", "aurc", "acc80")
_MEASURES = {"auroc": (auroc, "AUROC", "high"), "fpr95": (fpr95, "FPR95", "low")}


def trust_table(store: Store, baseline: str | None = None) -> Table:
    """All metrics of trust by method and dataset; with a `baseline`, differences from it with their intervals."""
    run = RunMetrics(store, TRUST)
    titles = distinct_titles({dataset: run.title(dataset) for dataset in run.datasets})
    if baseline is not None:
        return _differences(store, run, titles, present_method(set(run.methods), baseline, store))
    rows = []
    for dataset, title in titles.items():
        for method in run.methods:
            if (dataset, method) in run.by_seed:
                cells = {metric: run.cell(method, dataset, metric) for metric in TRUST}
                cells = {metric: Cell(cell.value) for metric, cell in cells.items()}  # deviations have their columns
                cells |= _stability(store, run, dataset, method) | _ood(store, run, dataset, method)
                rows.append(TableRow(method, cells, title, notes=run.gaps(method, dataset)))
    columns = [_metric_column(metric) for metric in TRUST]
    columns += [
        Column("seeds", "± seeds", 2, "none", ("standard deviation of accuracy over seeds of the views",)),
        Column("orders", "± orders", 2, "none", ("standard deviation of accuracy over orders of the stream",)),
        Column("seeds_change", "Δ seeds, %", 1, "low", ("answers that change with the seed of the views",)),
        Column("orders_change", "Δ orders, %", 1, "low", ("answers that change with the order of the stream",)),
    ]
    others = sorted({name for row in rows for name in row.cells if name.partition(" ")[0] in _MEASURES})
    columns += [_ood_column(name) for name in others]
    columns = [
        column for column in columns if any(row.cells.get(column.name, Cell()).value is not None for row in rows)
    ]
    return Table(f"Trust ({run.model})", tuple(columns), tuple(rows), notes=(_BINS, *run.footnotes(None)))


_BINS = "ECE: 15 bins of equal width; ECE-20: 20 bins; AECE: 15 bins of equally many images"


def _metric_column(metric: str) -> Column:
    shown = METRIC_FORMATS[metric]
    return Column(metric, shown.heading, shown.digits, shown.best)


def _ood_column(name: str) -> Column:
    measure, score, other = name.split(" ", 2)
    _, heading, best = _MEASURES[measure]
    return Column(name, f"{heading} {score}, %", 1, best, (f"images of {other} are of no class",))  # type: ignore[arg-type]


def _stability(store: Store, run: RunMetrics, dataset: str, method: str) -> dict[str, Cell]:
    by_seed = run.by_seed[dataset, method]
    seeds = [measured.values["top1"] for measured in by_seed.values()]
    spread = over_seeds([value for value in seeds if value is not None])
    orders = run.order_spread(method, dataset, "top1")
    per_order = {
        order: _aligned(store, dataset, method, [(seed, order) for seed in by_seed], ("prediction",))["prediction"]
        for order in store.orders(dataset, next(iter(by_seed)), method)
    }
    per_seed = [
        _aligned(store, dataset, method, [(seed, order) for order in per_order], ("prediction",))["prediction"]
        for seed in by_seed
    ]
    return {
        "seeds": Cell(spread.std),
        "orders": Cell(orders.std if orders else None),
        "seeds_change": Cell(float(np.mean([changed(answers) for answers in per_order.values()]))),
        "orders_change": Cell(float(np.mean([changed(answers) for answers in per_seed]))),
    }


def _runs(store: Store, dataset: str, method: str, seeds: Iterator[int]) -> list[tuple[int, int]]:
    """Seeds of views and of orders under which a method has answers."""
    return [(seed, order) for seed in seeds for order in store.orders(dataset, seed, method)]


def _aligned(
    store: Store, dataset: str, method: str, runs: list[tuple[int, int]], names: tuple[str, ...]
) -> dict[str, np.ndarray[Any, Any]]:
    """Columns (runs, n) of the images that all `runs` have, in the order of their names, and those names (n,)."""
    read = [
        store.columns(("image", *names), {"dataset": dataset, "method": method, "seed": seed, "order_seed": order})
        for seed, order in runs
    ]
    if not read:
        return {name: np.empty((0, 0)) for name in ("image", *names)}
    common = sorted(set.intersection(*(set(columns["image"]) for columns in read)))
    result = {"image": np.array(common)}
    for name in names:
        by_image = [dict(zip(columns["image"], columns[name], strict=True)) for columns in read]
        result[name] = np.array([[values[image] for image in common] for values in by_image])
    return result


def _ood_datasets(run: RunMetrics, dataset: str) -> list[str]:
    return [name for name, facts in run.facts.items() if facts.get("ood_of") == dataset]


def _scores(store: Store, dataset: str, method: str, seeds: list[int], column: str) -> np.ndarray[Any, Any] | None:
    """A score (n,) of images, the mean over seeds and orders; None where answers have none."""
    values = _aligned(store, dataset, method, _runs(store, dataset, method, iter(seeds)), (column,))[column]
    if not values.size or (values == None).any():  # noqa: E711 - an array of objects
        return None
    mean: np.ndarray[Any, Any] = values.astype(float).mean(axis=0)
    return mean


def _ood(store: Store, run: RunMetrics, dataset: str, method: str) -> dict[str, Cell]:
    cells = {}
    for other in _ood_datasets(run, dataset):
        title = other.removeprefix(f"{dataset} ood ")
        for score, pair in _score_pairs(store, run, dataset, other, method):
            for measure, (compute, _, _) in _MEASURES.items():
                cells[f"{measure} {score} {title}"] = Cell(compute(*pair))
    return cells


def _score_pairs(
    store: Store, run: RunMetrics, dataset: str, other: str, method: str
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    seeds = list(run.by_seed[dataset, method])
    for score, (column, sign) in OOD_SCORES.items():
        inside, outside = (_scores(store, name, method, seeds, column) for name in (dataset, other))
        if inside is not None and outside is not None:
            yield score, (sign * inside, sign * outside)


def _differences(store: Store, run: RunMetrics, titles: dict[str, str], baseline: str) -> Table:
    columns = ("label", "prediction", "confidence", "true_probability", "sum_of_squares")
    rows = []
    for dataset, title in titles.items():
        if (dataset, baseline) not in run.by_seed:
            continue
        for method in run.methods:
            if method == baseline or (dataset, method) not in run.by_seed:
                continue
            seeds = [seed for seed in run.by_seed[dataset, method] if seed in run.by_seed[dataset, baseline]]
            runs = _runs(store, dataset, method, iter(seeds))
            # A method without a memory has one run for each seed, which is compared with every order.
            ordered = store.orders(dataset, seeds[0], baseline) if seeds else []
            theirs = [(seed, order if order in ordered else ordered[0]) for seed, order in runs]
            mine, other = (
                _aligned(store, dataset, name, pairs, columns) for name, pairs in ((method, runs), (baseline, theirs))
            )
            _, own, its = np.intersect1d(mine.pop("image"), other.pop("image"), return_indices=True)
            for metric in TRUST:
                interval = metric_difference(
                    metric,
                    {name: values[:, own] for name, values in mine.items()},
                    {name: values[:, its] for name, values in other.items()},
                )
                rows.append(_difference_row(method, f"{title}: {METRIC_FORMATS[metric].heading}", interval))
            for ood in _ood_datasets(run, dataset):
                scores = dict(_score_pairs(store, run, dataset, ood, baseline))
                for score, pair in _score_pairs(store, run, dataset, ood, method):
                    same = score in scores and [len(part) for part in pair] == [len(part) for part in scores[score]]
                    for compute, heading, _ in _MEASURES.values() if same else ():
                        interval = ood_difference(compute, pair, scores[score])
                        rows.append(_difference_row(method, f"{title}: {heading} {score}, %", interval))
    sections = list(dict.fromkeys(row.section for row in rows))
    rows.sort(key=lambda row: sections.index(row.section))  # methods of a section stand together
    shown = (
        Column("difference", "difference", 3, "none"),
        Column("low", "from", 3, "none"),
        Column("high", "to", 3, "none"),
    )
    notes = (_BINS, "from, to: 95 % confidence interval, by paired bootstrap over the images")
    return Table(f"Differences from {baseline} ({run.model})", shown, tuple(rows), notes=notes)


def _difference_row(method: str, section: str, interval: Any) -> TableRow:
    cells = {"difference": interval.estimate, "low": interval.low, "high": interval.high}
    return TableRow(method, {name: Cell(value) for name, value in cells.items()}, section)
