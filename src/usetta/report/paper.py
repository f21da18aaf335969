"""The paper's own numbers, to compare ours with.

Tables are numbered as in the compiled paper (`table-1` … `table-24`; `text` holds what only the text says). Rows have
the names of our methods, columns those of our datasets and of the means `in&o`, `ood`, `fgvc` and `avg`. The data file
is written by `tools/paper_tables.py` from the paper's source. Its numbers are as printed; where the paper contradicts
itself a number carries a note. This module needs neither torch nor NumPy, so `usetta --help` may import it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from usetta.registry import suggest


@dataclass(frozen=True)
class PaperRow:
    """A row of a table."""

    method: str | None
    """The method in our grammar; None where the row is not one."""
    name: str
    """What the paper calls it; in the table of datasets, our name of the dataset."""
    values: Mapping[str, float]
    """By column; accuracies in percent."""
    std: Mapping[str, float] = field(default_factory=dict)
    """Standard deviations of the values, where the paper gives them."""
    suspicious: tuple[str, ...] = ()
    """Columns whose values should not be a target: probably copied from another row, or a mean of such values."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Where the paper contradicts itself, by column."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    id: str
    label: str
    """Its label in the paper's source."""
    caption: str
    """What it shows, in our words."""
    quantity: str
    """What its cells hold: `accuracy`, `std` (of accuracies), `efficiency` or `size` (of datasets)."""
    model: str | None
    coop: bool
    """Whether the methods start from CoOp's context."""
    ensemble: bool
    """Whether the classes are described by seven templates instead of one."""
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]


@dataclass(frozen=True)
class PaperNumber:
    """One number of the paper."""

    value: float
    std: float | None
    table: str
    suspicious: bool
    note: str | None


@cache
def tables() -> tuple[PaperTable, ...]:
    """All tables with numbers, in the order of the paper."""
    stored = json.loads(files("usetta.report").joinpath("paper_numbers.json").read_text(encoding="utf-8"))
    return tuple(map(_table, stored["tables"]))


def _table(stored: dict[str, Any]) -> PaperTable:
    rows = tuple(PaperRow(**row | {"suspicious": tuple(row.get("suspicious", ()))}) for row in stored["rows"])
    return PaperTable(**stored | {"columns": tuple(stored["columns"]), "rows": rows})


def table(name: str) -> PaperTable:
    """The table of that id, such as `table-3`."""
    by_id = {table.id: table for table in tables()}
    if name not in by_id:
        raise ValueError(f"the paper has no numbers in {name!r}; {suggest(name, by_id)}")
    return by_id[name]


def number(table_id: str, method: str, dataset: str, model: str) -> PaperNumber:
    """What that table has for a method on a dataset (or a mean, or another column)."""
    source = table(table_id)
    if source.model != model:
        raise ValueError(f"{table_id} is about {source.model or 'no model'}, not {model}")
    if dataset not in source.columns:
        raise ValueError(f"{table_id} has no column {dataset!r}; {suggest(dataset, source.columns)}")
    value = _number(source, method, dataset)
    if value is None:
        methods = [row.method for row in source.rows if row.method and dataset in row.values]
        raise ValueError(f"{table_id} has no {dataset} of method {method!r}; {suggest(method, methods)}")
    return value


def find(
    method: str, dataset: str, model: str = "ViT-B-16", *, coop: bool = False, ensemble: bool = False
) -> PaperNumber | None:
    """The accuracy that the paper reports, from its first table that does; None if it reports none."""
    for source in tables():
        if source.quantity == "accuracy" and (source.model, source.coop, source.ensemble) == (model, coop, ensemble):
            accuracy = _number(source, method, dataset)
            if accuracy is not None:
                return accuracy
    return None


def _number(source: PaperTable, method: str, column: str) -> PaperNumber | None:
    for row in source.rows:
        if row.method == method and column in row.values:
            return PaperNumber(
                row.values[column], row.std.get(column), source.id, column in row.suspicious, row.notes.get(column)
            )
    return None
