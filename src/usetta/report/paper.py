"""The paper's own numbers, to stand beside ours.

Tables have the numbers of the compiled paper (`table-1` … `table-24`; `text` for what only the text says), rows the
names of our methods, columns those of our datasets and the means `in&o`, `ood`, `fgvc` and `avg`. The data file is
written by `tools/paper_tables.py` from the paper's source: its numbers are as printed, and a number comes with a note
where the paper contradicts itself.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


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
    """Columns whose values are not to be aimed at: probably copied from another row, or a mean of such values."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What does not fit in the paper, by column."""


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
class Number:
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
    known = {each.id: each for each in tables()}
    if name not in known:
        raise ValueError(f"the paper has no numbers in {name!r}{_near(name, known)}")
    return known[name]


def number(table_id: str, method: str, dataset: str, model: str) -> Number:
    """What that table has for a method on a dataset (or a mean, or another column)."""
    place = table(table_id)
    if place.model != model:
        raise ValueError(f"{table_id} is about {place.model or 'no model'}, not {model}")
    if dataset not in place.columns:
        raise ValueError(f"{table_id} has no column {dataset!r}{_near(dataset, place.columns)}")
    found = _number(place, method, dataset)
    if found is None:
        methods = [row.method for row in place.rows if row.method and dataset in row.values]
        raise ValueError(f"{table_id} has no {dataset} of method {method!r}{_near(method, methods)}")
    return found


def find(
    method: str, dataset: str, model: str = "ViT-B-16", *, coop: bool = False, ensemble: bool = False
) -> Number | None:
    """The accuracy that the paper reports, from its first table that does; None if it reports none."""
    for place in tables():
        if place.quantity == "accuracy" and (place.model, place.coop, place.ensemble) == (model, coop, ensemble):
            found = _number(place, method, dataset)
            if found is not None:
                return found
    return None


def _number(place: PaperTable, method: str, column: str) -> Number | None:
    for row in place.rows:
        if row.method == method and column in row.values:
            return Number(
                row.values[column], row.std.get(column), place.id, column in row.suspicious, row.notes.get(column)
            )
    return None


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(known)}"
