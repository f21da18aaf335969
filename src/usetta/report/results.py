"""Tables of a run: one metric of all methods on all datasets, all metrics on one, and what differences are worth."""

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from usetta import methods as known
from usetta.evaluate.metrics import GROUPS, METRICS, accuracy_difference, mcnemar
from usetta.evaluate.store import Store, StoreError
from usetta.prompts import DEFAULT_TEMPLATE, TEMPLATES
from usetta.report.measured import LOOKS, Measured, datasets_in_order, methods_in_order, papers_title
from usetta.report.tables import Cell, Column, Table, TableRow, beside_paper

_PAPER_MODELS = ("ViT-B-16", "RN50")
"""Models of the paper, the main one first."""
_EXCLUDES_ZERO = "the interval does not contain 0"


def accuracy_table(store: Store, *, metric: str = "top1", paper: bool = True) -> Table:
    """A metric by method and dataset, with the paper's means where all of their datasets are there.

    With `paper`, its accuracies stand beside ours, and notes tell where our data, views or model are not its own.
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}{_near(metric, METRICS)}")
    paper = paper and metric == "top1"
    found = Measured(store, (metric,))
    rows = []
    for method in found.methods:
        cells = {dataset: found.cell(method, dataset, metric) for dataset in found.datasets}
        cells |= {group: found.mean(method, group, metric) for group in GROUPS}
        rows.append(TableRow(method, cells))
    means = [group for group in GROUPS if any(row.cells[group].value is not None for row in rows)]
    columns = [
        *(found.column(dataset, metric, paper=paper) for dataset in found.datasets),
        *(found.mean_column(group, metric, paper=paper) for group in means),
    ]
    title = f"{LOOKS[metric].title} ({found.model})"
    table = Table(title, tuple(columns), tuple(rows), notes=found.footnotes())
    return _with_paper(table, found) if paper else table


def metrics_table(store: Store, dataset: str) -> Table:
    """All metrics by method on a dataset."""
    present = {name for name, *_ in store.groups()}
    if not present:
        raise StoreError(f"the run in {store.folder} has no results yet")
    if dataset not in present:
        raise ValueError(f"the run in {store.folder} has no dataset {dataset!r}{_near(dataset, present)}")
    found = Measured(store, tuple(METRICS), (dataset,))
    columns = tuple(Column(name, look.heading, look.digits, look.best) for name, look in LOOKS.items())
    rows = []
    for method in found.methods:
        cells = {name: found.cell(method, dataset, name) for name in METRICS}
        # What a number lacks, its neighbours lack as well: the note belongs to the row.
        cells = {name: replace(cell, notes=()) for name, cell in cells.items()}
        rows.append(TableRow(method, cells, notes=found.gaps(method, dataset)))
    size = found.data_notes(dataset, paper=False)
    title = f"{found.title(dataset)}: all metrics ({', '.join((found.model, *size))})"
    return Table(title, columns, tuple(rows), notes=(*found.footnotes(), *peak_memory(store)))


def peak_memory(store: Store) -> tuple[str, ...]:
    """A footnote on the memory of the processes that worked on the run."""
    peaks = [each.get("peak_memory") for each in store.facts("invocation").values()]
    most = max((peak for peak in peaks if peak), default=None)
    return (f"peak memory of the process: {most / 1e9:.2f} GB",) if most else ()


def differences_table(store: Store, against: str = "clip") -> Table:
    """How many points each method is better than `against` on the images that both have answered.

    A section for each dataset: the difference, its 95 % confidence interval by paired bootstrap over images, and
    McNemar's p where there is one seed. Over several seeds, an image counts with the share of its right answers.
    """
    seeds: dict[tuple[str, str], set[int]] = {}
    for dataset, seed, method, _ in store.groups():
        seeds.setdefault((dataset, method), set()).add(seed)
    present = {method for _, method in seeds}
    against = _one_of(present, against, store)
    facts, rows, alone = store.facts("dataset"), [], []
    for dataset in datasets_in_order({dataset for dataset, _ in seeds}):
        title = str(facts.get(dataset, {}).get("title", papers_title(dataset)))
        if (dataset, against) not in seeds:
            alone.append(title)
            continue
        theirs = {seed: _right(store, dataset, seed, against) for seed in seeds[dataset, against]}
        for method in methods_in_order(present - {against}):
            common = sorted(seeds.get((dataset, method), set()) & set(theirs))
            if common:
                ours = {seed: _right(store, dataset, seed, method) for seed in common}
                rows.append(TableRow(method, _difference(ours, theirs), title))
    columns: tuple[Column, ...] = (
        Column("difference", "points", 2, "high"),
        Column("low", "from", 2, "none"),
        Column("high", "to", 2, "none"),
        Column("p", "p", 4, "none", ("by McNemar's exact test, which is for one seed",)),
        Column("images", "images", 0, "none"),
    )
    if all(row.cells["p"].value is None for row in rows):
        columns = tuple(column for column in columns if column.name != "p")
    notes = ["from, to: 95 % confidence interval, by paired bootstrap over the images that both methods answered"]
    notes += [f"not compared, without {against}: {', '.join(alone)}"] if alone else []
    model = store.facts("run").get("model", {}).get("name", "an unknown model")
    return Table(f"Accuracy against {against}, points ({model})", columns, tuple(rows), notes=(*notes,))


def _one_of(present: set[str], against: str, store: Store) -> str:
    """The method that others are compared with, however it is written."""
    if not present:
        raise StoreError(f"the run in {store.folder} has no results yet")
    name = against if against in present else known.get(against).name
    if name not in present:
        raise ValueError(f"the run in {store.folder} has no method '{name}'{_near(name, present)}")
    if present == {name}:
        raise ValueError(f"the run in {store.folder} has no other method than '{name}' to compare")
    return name


def _difference(ours: dict[int, dict[str, bool]], theirs: dict[int, dict[str, bool]]) -> dict[str, Cell]:
    """The cells of a method, from whether its answers and the others' were right, by seed and image."""
    counts: dict[str, list[int]] = {}
    for seed, right in ours.items():
        for image, is_right in right.items():
            if image in theirs[seed]:
                count = counts.setdefault(image, [0, 0, 0])
                for place, more in enumerate((is_right, theirs[seed][image], 1)):
                    count[place] += more
    shares = [(mine / n, others / n) for mine, others, n in counts.values()]
    mine, others = (list(each) for each in zip(*shares, strict=True)) if shares else ([], [])
    interval = accuracy_difference(mine, others)
    notes = (_EXCLUDES_ZERO,) if interval.low > 0 or interval.high < 0 else ()
    return {
        "difference": Cell(interval.estimate, notes=notes),
        "low": Cell(interval.low),
        "high": Cell(interval.high),
        "p": Cell(mcnemar(mine, others) if len(ours) == 1 and shares else None),
        "images": Cell(len(shares)),
    }


def _right(store: Store, dataset: str, seed: int, method: str) -> dict[str, bool]:
    found = store.columns(("image", "label", "prediction"), {"dataset": dataset, "seed": seed, "method": method})
    answers: Iterator[tuple[Any, ...]] = zip(*found.values(), strict=True)
    return {image: label == prediction for image, label, prediction in answers}


def _with_paper(table: Table, found: Measured) -> Table:
    prompt = found.run.get("prompt", {})
    templates = tuple(prompt.get("templates", (DEFAULT_TEMPLATE,)))
    ensemble, coop = templates == TEMPLATES["ensemble"], bool(prompt.get("context"))
    model = found.model if found.model in _PAPER_MODELS else _PAPER_MODELS[0]
    table = beside_paper(table, model, coop=coop, ensemble=ensemble, our_model=found.model)
    own = [dataset for dataset in found.datasets if not found.benchmark(dataset)]
    rows = [
        replace(
            row, cells={**row.cells, **{name: replace(row.cells[name], paper=None, paper_notes=()) for name in own}}
        )
        for row in table.rows
    ]
    notes = table.notes
    if templates != (DEFAULT_TEMPLATE,) and not ensemble and not coop:
        notes += (f"prompt: {', '.join(templates)}; in the paper: {DEFAULT_TEMPLATE}",)
    return replace(table, rows=tuple(rows), notes=notes)


def _near(name: str, there: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(there), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(sorted(there))}"
