"""Tables of a run: one metric of all methods on all datasets, all metrics on one, and how methods differ.

The paper's accuracies stand below ours where it has the same kind of run: the same prompt, and its ViT-B/16 unless the
run's model is another of its models. Differences are paired: they compare only images that both methods answered.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from usetta import methods as known
from usetta.evaluate.metrics import GROUPS, METRICS, accuracy_difference, mcnemar
from usetta.evaluate.store import Store, StoreError
from usetta.prompts import DEFAULT_TEMPLATE, TEMPLATES
from usetta.registry import suggest
from usetta.report import paper as published
from usetta.report.measured import (
    METRIC_FORMATS,
    RunMetrics,
    distinct_titles,
    paper_title,
    sorted_datasets,
    sorted_methods,
)
from usetta.report.tables import Cell, Column, Table, TableRow

_PAPER_MODELS = ("ViT-B-16", "RN50")
"""Models of the paper, the main one first."""
_EXCLUDES_ZERO = "the interval does not contain 0"
_CONCLUSIVE = 200
_INCONCLUSIVE = f"fewer than {_CONCLUSIVE} images: nothing can be concluded"
"""An image more or less then moves the difference by half a point and more, as much as methods differ."""


def accuracy_table(store: Store, *, metric: str = "top1", paper: bool = True) -> Table:
    """A metric by method and dataset, with the paper's means where the run has all of their datasets.

    With `paper`, its accuracies stand below ours, and notes say where our data, views or model differ from its own.
    """
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; {suggest(metric, METRICS)}")
    paper = paper and metric == "top1"
    run = RunMetrics(store, (metric,))
    rows = []
    for method in run.methods:
        cells = {dataset: run.cell(method, dataset, metric) for dataset in run.datasets}
        cells |= {group: run.mean(method, group, metric) for group in GROUPS}
        rows.append(TableRow(method, cells))
    means = [group for group in GROUPS if any(row.cells[group].value is not None for row in rows)]
    columns = [
        *(run.column(dataset, metric, paper=paper) for dataset in run.datasets),
        *(run.mean_column(group, metric, paper=paper) for group in means),
    ]
    title = f"{METRIC_FORMATS[metric].title} ({run.model})"
    table = Table(title, tuple(columns), tuple(rows), notes=(*run.computed_notes(), *run.footnotes()))
    return _with_paper(table, run) if paper else table


def metrics_table(store: Store, dataset: str) -> Table:
    """All metrics by method on a dataset."""
    present = {name for name, *_ in store.groups()}
    if not present:
        raise StoreError(f"the run in {store.folder} has no results yet")
    if dataset not in present:
        raise ValueError(f"the run in {store.folder} has no dataset {dataset!r}; {suggest(dataset, sorted(present))}")
    run = RunMetrics(store, tuple(METRICS), (dataset,))
    columns = tuple(Column(name, shown.heading, shown.digits, shown.best) for name, shown in METRIC_FORMATS.items())
    rows = []
    for method in run.methods:
        cells = {name: run.cell(method, dataset, name) for name in METRICS}
        # All numbers of a row come from the same images, so what they lack is a note on the row.
        cells = {name: replace(cell, notes=()) for name, cell in cells.items()}
        rows.append(TableRow(method, cells, notes=run.gaps(method, dataset)))
    size = run.data_notes(dataset, paper=False)
    title = f"{run.title(dataset)}: all metrics ({', '.join((run.model, *size))})"
    return Table(title, columns, tuple(rows), notes=(*run.footnotes(), *peak_memory_note(store)))


def peak_memory_note(store: Store) -> tuple[str, ...]:
    """A footnote on the memory of the processes that worked on the run."""
    peaks = [invocation.get("peak_memory") for invocation in store.facts("invocation").values()]
    highest = max((peak for peak in peaks if peak), default=None)
    return (f"peak memory of the process: {highest / 1e9:.2f} GB",) if highest else ()


def differences_table(store: Store, baseline: str = "clip") -> Table:
    """How many points each method is better than `baseline` on the images that both have answered.

    A section for each dataset: the difference, its 95 % confidence interval by paired bootstrap over images, and
    McNemar's p where there is one seed. Over several seeds, an image counts with the share of its right answers.
    """
    seeds: dict[tuple[str, str], set[int]] = {}
    for dataset, seed, method, _ in store.groups():
        seeds.setdefault((dataset, method), set()).add(seed)
    present = {method for _, method in seeds}
    baseline = present_method(present, baseline, store)
    facts, rows, without_baseline = store.facts("dataset"), [], []
    datasets = sorted_datasets({dataset for dataset, _ in seeds})
    titles = {dataset: str(facts.get(dataset, {}).get("title", paper_title(dataset))) for dataset in datasets}
    for dataset, title in distinct_titles(titles).items():
        if (dataset, baseline) not in seeds:
            without_baseline.append(title)
            continue
        theirs = {seed: _right(store, dataset, seed, baseline) for seed in seeds[dataset, baseline]}
        for method in sorted_methods(present - {baseline}):
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
    notes += [f"not compared, without {baseline}: {', '.join(without_baseline)}"] if without_baseline else []
    model = store.facts("run").get("model", {}).get("name", "an unknown model")
    return Table(f"Accuracy gain over {baseline}, points ({model})", columns, tuple(rows), notes=(*notes,))


def present_method(present: set[str], method: str, store: Store) -> str:
    """The name under which the run has results of a method that may be spelled in another way."""
    if not present:
        raise StoreError(f"the run in {store.folder} has no results yet")
    name = method if method in present else known.get(method).name
    if name not in present:
        raise ValueError(f"the run in {store.folder} has no method '{name}'; {suggest(name, sorted(present))}")
    if present == {name}:
        raise ValueError(f"the run in {store.folder} has no other method than '{name}' to compare")
    return name


def _difference(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> dict[str, Cell]:
    """The cells of a method, from whether its answers and the baseline's were right, by seed and image."""
    counts: dict[str, list[float]] = {}
    for seed, right in ours.items():
        for image, is_right in right.items():
            if image in theirs[seed]:
                count = counts.setdefault(image, [0, 0, 0])
                for place, more in enumerate((is_right, theirs[seed][image], 1)):
                    count[place] += more
    mine = [right / n for right, _, n in counts.values()]
    others = [right / n for _, right, n in counts.values()]
    whole = all(share in (0, 1) for share in (*mine, *others))  # one answer for each image
    interval = accuracy_difference(mine, others)
    few = len(counts) < _CONCLUSIVE
    notes = (_EXCLUDES_ZERO,) if not few and (interval.low > 0 or interval.high < 0) else ()
    return {
        "difference": Cell(interval.estimate, notes=notes),
        "low": Cell(interval.low),
        "high": Cell(interval.high),
        "p": Cell(mcnemar(mine, others) if len(ours) == 1 and counts and whole else None),
        "images": Cell(len(counts), notes=(_INCONCLUSIVE,) if few else ()),
    }


def _right(store: Store, dataset: str, seed: int, method: str) -> dict[str, float]:
    """Whether the answer was right, by image; of a stream the share of orders in which it was."""
    columns = store.columns(("image", "label", "prediction"), {"dataset": dataset, "seed": seed, "method": method})
    answers: Iterator[tuple[Any, ...]] = zip(*columns.values(), strict=True)
    right: dict[str, list[bool]] = {}  # a stream in several orders has several answers
    for image, label, prediction in answers:
        right.setdefault(image, []).append(label == prediction)
    return {image: sum(hits) / len(hits) for image, hits in right.items()}


def _with_paper(table: Table, run: RunMetrics) -> Table:
    prompt = run.settings.get("prompt", {})
    templates = tuple(prompt.get("templates", (DEFAULT_TEMPLATE,)))
    ensemble, coop = templates == TEMPLATES["ensemble"], bool(prompt.get("context"))
    model = run.model if run.model in _PAPER_MODELS else _PAPER_MODELS[0]
    table = beside_paper(table, model, coop=coop, ensemble=ensemble, our_model=run.model)
    # A folder of one's own that is called `pets` is not the paper's Pets.
    own = [dataset for dataset in run.datasets if not run.benchmark(dataset)]
    rows = []
    for row in table.rows:
        without = {name: replace(row.cells[name], paper=None, paper_notes=()) for name in own}
        rows.append(replace(row, cells={**row.cells, **without}))
    notes = table.notes
    if templates != (DEFAULT_TEMPLATE,) and not ensemble and not coop:
        notes += (f"prompt: {', '.join(templates)}; in the paper: {DEFAULT_TEMPLATE}",)
    return replace(table, rows=tuple(rows), notes=notes)


def beside_paper(
    table: Table, model: str, *, coop: bool = False, ensemble: bool = False, our_model: str | None = None
) -> Table:
    """The table with the paper's numbers of `model` where it has any; rows are methods, columns datasets or means.

    `our_model`: the model of our numbers; if it is another, a note says so. Doubts about the paper's numbers become
    notes too, unless they concern the last digit only.
    """
    row_notes = other_model_note(model, our_model) if our_model is not None else ()
    rows = []
    for row in table.rows:
        cells = dict(row.cells)
        for column in table.columns:
            number = published.find(row.name, column.name, model, coop=coop, ensemble=ensemble)
            if number is not None:
                cell = cells.get(column.name, Cell())
                doubts = (number.note,) if number.suspicious and number.note else ()
                cells[column.name] = replace(cell, paper=number.value, paper_notes=cell.paper_notes + doubts)
        rows.append(replace(row, cells=cells, paper_notes=row.paper_notes + row_notes))
    return replace(table, rows=tuple(rows))


def other_model_note(papers: str | None, ours: str) -> tuple[str, ...]:
    """A note where the paper's numbers are those of another model."""
    return (f"the paper's model is {papers}, ours {ours}",) if papers != ours else ()
