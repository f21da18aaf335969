"""The paper's tables from a run of one's own: what is missing for one, and the table with the paper's numbers beside.

Rows and columns are the paper's. What the run does not have is a dash and is named in a footnote. A table of means has
nothing to show as long as one dataset is missing; then the datasets that are there stand behind the means.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from usetta import methods
from usetta.evaluate.metrics import GROUPS
from usetta.evaluate.store import Store
from usetta.prompts import TEMPLATES
from usetta.report import paper
from usetta.report.items import ITEMS, PaperItem, get
from usetta.report.measured import MEANS, Measured, papers_title
from usetta.report.paper_figures import Figures, as_figures
from usetta.report.results import peak_memory
from usetta.report.tables import Cell, Column, Table, TableRow

__all__ = ["ITEMS", "Figures", "Missing", "PaperItem", "as_figures", "as_table", "get", "needed", "sizes_table"]

_EFFICIENCY = (
    Column("seconds", "time, s", 3, "low"),
    Column("gigabytes", "memory, GB", 3, "low"),
    Column("fgvc", MEANS["fgvc"]),
    Column("gain", "gain"),
)


class Missing(NamedTuple):
    """What a run does not have, or has only in part."""

    dataset: str
    method: str
    seed: int


def needed(
    item: PaperItem, store: Store, *, seeds: Sequence[int] | None = None, images: Mapping[str, int] | None = None
) -> list[Missing]:
    """What the run lacks for an item, under the item's seeds or others.

    `images` is how many images of each dataset there must be; by default as many as the most complete method has.
    """
    counts = {Missing(dataset, method, seed): n for dataset, seed, method, n in store.groups()}
    whole = {name: max((n for key, n in counts.items() if key.dataset == name), default=1) for name in item.datasets}
    whole |= images or {}
    wanted = (
        Missing(dataset, method, seed)
        for dataset in item.datasets
        for method in item.methods
        for seed in (item.seeds if seeds is None else seeds)
    )
    return [each for each in wanted if counts.get(each, 0) < whole[each.dataset]]


def as_table(item: PaperItem, store: Store) -> Table:
    """A table of the paper with the numbers of a run, and the paper's."""
    if item.kind == "figure":
        raise ValueError(f"{item.name} is not a table")
    if item.kind == "size":
        facts = store.facts("dataset")
        ours = {name: fact for name, fact in facts.items() if fact["family"] != "other"}
        return sizes_table({name: (fact["images"], fact["classes"]) for name, fact in ours.items()})
    metrics = ("top1", "seconds_per_image") if item.kind == "efficiency" else ("top1",)
    found = Measured(store, metrics, item.datasets, item.methods)
    source = paper.table(item.name)
    columns = _columns(item, source, found)
    rows = []
    for row, section in zip(source.rows, _sections(source.rows), strict=True):
        cells = {column.name: _cell(item, row.method, column.name, found) for column in columns}
        rows.append(_beside(TableRow(row.method or row.name, cells, section), row, source, found))
    unit = {"accuracy": "accuracy in %, ", "std": "points, "}.get(item.kind, "")
    title = f"{item.name.replace('-', ' ').capitalize()}: {item.shows} ({unit}{found.model})"
    memory = peak_memory(store) if item.kind == "efficiency" else ()
    spread = "standard deviation" if item.kind == "std" else "mean ± standard deviation"
    return Table(title, columns, tuple(rows), notes=(*_notes(item, found), *memory, *found.footnotes(spread)))


def sizes_table(sizes: Mapping[str, tuple[int, int]]) -> Table:
    """The paper's table of datasets, with the numbers of images and classes of those that are there."""
    source = paper.table("table-11")
    rows = []
    for row in source.rows:
        ours = dict(zip(("images", "classes"), sizes.get(row.name, (None, None)), strict=True))
        cells = {column: Cell(ours[column], paper=row.values[column]) for column in source.columns}
        rows.append(TableRow(row.name, cells))
    columns = tuple(Column(name, digits=0, best="none") for name in source.columns)
    absent = [papers_title(row.name) for row in source.rows if row.name not in sizes]
    notes = (f"not there: {', '.join(absent)}",) if absent else ()
    return Table(f"Table 11: {source.caption}", columns, tuple(rows), "dataset", notes)


def _columns(item: PaperItem, source: paper.PaperTable, found: Measured) -> tuple[Column, ...]:
    """The paper's columns, and datasets behind them where it has nothing but means that cannot be had."""
    columns: list[Column] = []
    for name in source.columns:
        if name in GROUPS:
            columns.append(found.mean_column(name, "top1", paper=True))
        elif name in item.datasets:
            there = name in found.datasets
            columns.append(found.column(name, "top1", paper=True) if there else Column(name, papers_title(name)))
        else:
            columns += [column for column in _EFFICIENCY if column.name == name]
    if item.kind == "std":
        return tuple(replace(column, best="none") for column in columns)
    means = [name for name in source.columns if name in GROUPS]
    had = all(any(found.mean(method, name, "top1").value is not None for method in found.methods) for name in means)
    if not had and not set(source.columns) & set(item.datasets):
        columns += [found.column(name, "top1", paper=True) for name in found.datasets]
    return tuple(columns)


def _cell(item: PaperItem, method: str | None, column: str, found: Measured) -> Cell:
    """Our number, empty if there is none."""
    if method is None:
        return Cell()
    if column in item.datasets:
        cell = found.cell(method, column, "top1")
        return Cell(cell.std, notes=cell.notes if cell.std is not None else ()) if item.kind == "std" else cell
    if column in GROUPS:
        return found.mean(method, column, "top1")
    if column == "seconds":
        times = [found.cell(method, dataset, "seconds_per_image").value for dataset in found.datasets]
        known = [time for time in times if time is not None]
        return Cell(sum(known) / len(known) if known else None)
    if column == "gain" and method != "clip":
        ours, clip = (found.mean(name, "fgvc", "top1").value for name in (method, "clip"))
        return Cell(None if ours is None or clip is None else ours - clip)
    return Cell()


def _beside(row: TableRow, source: paper.PaperRow, table: paper.PaperTable, found: Measured) -> TableRow:
    """The row with the paper's numbers."""
    cells = {}
    for column, cell in row.cells.items():
        number, doubt = _papers_number(source, table, column)
        cells[column] = replace(cell, paper=number, paper_notes=(doubt,) if doubt else ())
    differs = found.datasets and found.model != table.model
    notes = (f"the paper's model is {table.model}, ours {found.model}",) if differs else ()
    return replace(row, cells=cells, paper_notes=notes)


def _papers_number(source: paper.PaperRow, table: paper.PaperTable, column: str) -> tuple[float | None, str | None]:
    """The number of this table, or for a column that it does not have, of any other; and a doubt about it."""
    if column in table.columns:
        return source.values.get(column), source.notes.get(column) if column in source.suspicious else None
    if source.method and table.model:
        other = paper.find(source.method, column, table.model, coop=table.coop, ensemble=table.ensemble)
        if other:
            return other.value, other.note if other.suspicious else None
    return None, None


def _sections(rows: Sequence[paper.PaperRow]) -> list[str]:
    """Methods without tuning and methods with it, where the paper lists them one after the other."""
    tuned = [bool(row.method and methods.get(row.method).tunes) for row in rows]
    if len(set(tuned)) < 2 or tuned != sorted(tuned) or not all(row.method for row in rows):
        return [""] * len(rows)
    return ["with tuning" if each else "without tuning" for each in tuned]


def _notes(item: PaperItem, found: Measured) -> Iterator[str]:
    """What the table lacks, and how the run differs from the paper's as a whole."""
    absent = [papers_title(name) for name in item.datasets if name not in found.datasets]
    if absent:
        yield f"no results yet: {', '.join(absent)}"
    lacking: dict[tuple[str, ...], list[str]] = {}
    for method in item.methods:
        sets = tuple(found.title(name) for name in found.datasets if (name, method) not in found.answers)
        if sets:
            lacking.setdefault(sets, []).append(method)
    for sets, names in lacking.items():
        yield f"no results yet of {', '.join(names)} on {', '.join(sets)}"
    if item.kind == "std" and found.datasets and len(found.seeds) < 2:
        yield "a standard deviation takes at least two seeds"
    if item.kind == "efficiency":
        yield "time: mean of the datasets that are there, on this machine, views included; the paper's on its own"
        yield "memory: that of a single method is not measured; CLIP-64 is no method here, but 64 views encoded"
    if found.datasets:
        yield from _prompt_notes(item, found.run.get("prompt", {}))


def _prompt_notes(item: PaperItem, prompt: Mapping[str, object]) -> Iterator[str]:
    coop, templates = bool(prompt.get("context")), prompt.get("templates", ())
    ensemble = isinstance(templates, Iterable) and tuple(templates) == TEMPLATES["ensemble"]
    if coop != item.coop:
        yield f"made with{'' if coop else 'out'} a learned context, unlike the paper's"
    if ensemble != item.ensemble:
        yield f"made with{'' if ensemble else 'out'} the ensemble of seven templates, unlike the paper's"
