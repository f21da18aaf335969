"""The paper's tables and figures: what it takes to measure each, what a run lacks for one, and the tables themselves.

What a table takes follows from its rows and columns in `paper`. What a figure takes is in the paper's captions and
text; these do not give seeds, and two of them fit the standard deviations. Rows and columns of a table are the paper's,
with its numbers below ours. What the run does not have is a dash and is named in a footnote. A table of means would be
empty as long as one dataset is missing; then the datasets of the run follow the means. Figures are in `paper_figures`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from usetta import methods
from usetta.evaluate.metrics import FINE_GRAINED, GROUPS, IMAGENET, members_of
from usetta.evaluate.store import Store
from usetta.prompts import TEMPLATES
from usetta.report import paper
from usetta.report.measured import MEANS, RunMetrics, paper_title
from usetta.report.results import other_model_note, peak_memory_note
from usetta.report.tables import Cell, Column, Table, TableRow

_VIT, _RN50 = "ViT-B-16", "RN50"
_ALL = (*IMAGENET, *FINE_GRAINED)
GAMMAS = (0.2, 0.4, 0.6, 0.8, 1.0)
STEPS = (1, 2, 4, 6)
BETAS = {
    "0": "use:beta=0.0",
    "0.5": "use:beta=0.5",
    "1": "use:beta=1.0",
    "uniform": "use:beta=uniform",
    "adaptive": "use",
}
"""Weights of the weak view, in the pseudo-label and in the answer, and the methods that have them."""

_EFFICIENCY = (
    Column("seconds", "time, s", 3, "low"),
    Column("gigabytes", "memory, GB", 3, "low"),
    Column("fgvc", MEANS["fgvc"]),
    Column("gain", "gain"),
)


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure of the paper."""

    name: str
    shows: str
    kind: Literal["accuracy", "std", "efficiency", "size", "figure"]
    methods: tuple[str, ...]
    """In our grammar, in the order of the paper."""
    datasets: tuple[str, ...]
    models: tuple[str, ...] = (_VIT,)
    """Each has a run of its own."""
    seeds: tuple[int, ...] = (0, 1)
    coop: bool = False
    """Whether the prompt starts from CoOp's context, which must be given."""
    ensemble: bool = False
    """Whether the classes are described by the paper's seven templates."""

    @property
    def templates(self) -> tuple[str, ...]:
        """As `ClassPrompts` takes them; none leaves the choice to the context, or to CLIP's own."""
        return ("ensemble",) if self.ensemble else ()


def gamma_method(value: float) -> str:
    """USE with that γ; the default is not spelled out, so that its results are shared with plain `use`."""
    return "use" if value == 0.4 else f"use:gamma={value}"


def steps_method(method: str, count: int) -> str:
    """A method with that many tuning steps."""
    return method if count == 1 else f"{method}:steps={count}"


def _table_item(source: paper.PaperTable) -> PaperItem:
    of_columns = {name for column in source.columns for name in members_of(column)}
    of_rows = {row.name for row in source.rows}
    row_methods = tuple(row.method for row in source.rows if row.method)
    return PaperItem(
        name=source.id,
        shows=source.caption,
        kind=source.quantity,  # type: ignore[arg-type]
        methods=row_methods,
        datasets=tuple(name for name in _ALL if name in (of_rows if source.quantity == "size" else of_columns)),
        models=(source.model,) if source.model else (),
        seeds=(0, 1) if row_methods else (),
        coop=source.coop,
        ensemble=source.ensemble,
    )


_FIGURE_ITEMS = (
    PaperItem(
        "figure-2",
        "gain over the weak view: strong views, their average with it, and the uniform mean",
        "figure",
        ("clip", "strong", "average", "uniform"),
        FINE_GRAINED,
    ),
    PaperItem("figure-3", "fixed weights of the weak view, and USE's adaptive one", "figure", (*BETAS.values(),), _ALL),
    PaperItem(
        "figure-4",
        "how much USE skips, and its accuracy without and with it",
        "figure",
        ("use:skip=false", "use"),
        _ALL,
    ),
    PaperItem(
        "figure-5",
        "the weak view and the most confident strong ones of some images",
        "figure",
        ("se",),  # any method that uses strong views has them recorded
        ("imagenet", "pets", "eurosat", "food101"),
        seeds=(0,),
    ),
    PaperItem(
        "figure-6",
        "tuning in several steps",
        "figure",
        tuple(steps_method(method, count) for method in ("tpt", "use") for count in STEPS),
        ("dtd", "eurosat", "imagenet-v2"),
    ),
    PaperItem(
        "figure-7",
        "USE with other values of γ",
        "figure",
        (*map(gamma_method, GAMMAS),),
        _ALL,
        models=(_VIT, _RN50),
    ),
)

ITEMS: dict[str, PaperItem] = {
    item.name: item
    for item in (*(_table_item(table) for table in paper.tables() if table.id != "text"), *_FIGURE_ITEMS)
}
"""By name, tables first, in the order of the paper. Table 14 lists templates, so there is nothing to measure."""


def get(name: str) -> PaperItem:
    """The item of that name; spelling does not matter: `Table 3`, `fig. 2`."""
    kind, digits = name.strip().lower()[:1], "".join(filter(str.isdigit, name))
    written = f"{ {'t': 'table', 'f': 'figure'}.get(kind, '') }-{digits}"
    if written not in ITEMS:
        raise ValueError(f"unknown table or figure {name!r}; `usetta reproduce --list` shows all")
    return ITEMS[written]


@dataclass(frozen=True)
class PaperRun:
    """What all tables and figures need of one model with one kind of prompt."""

    model: str
    coop: bool
    ensemble: bool
    methods: Mapping[str, tuple[str, ...]]
    """By dataset, in the order of the paper."""
    items: tuple[PaperItem, ...]

    @property
    def item(self) -> PaperItem:
        """An item with the prompt of the run."""
        return self.items[0]


def paper_runs(*, model: str | None = None, coop: bool = True) -> list[PaperRun]:
    """The runs that give every table and figure: two backbones, and the prompts that the paper compares.

    `model` takes the place of both backbones. Without `coop`, what starts from CoOp's context is left out.
    """
    groups: dict[tuple[str, bool, bool], list[PaperItem]] = {}
    for item in ITEMS.values():
        if coop or not item.coop:
            for backbone in (model,) if model and item.models else item.models:
                groups.setdefault((backbone, item.coop, item.ensemble), []).append(item)
    runs = []
    for (backbone, learned, ensemble), items in groups.items():
        methods = {
            name: tuple(dict.fromkeys(method for item in items if name in item.datasets for method in item.methods))
            for name in _ALL
        }
        wanted = {name: names for name, names in methods.items() if names}
        runs.append(PaperRun(backbone, learned, ensemble, wanted, tuple(items)))
    return runs


class MissingResult(NamedTuple):
    """What a run does not have, or has only in part."""

    dataset: str
    method: str
    seed: int


def missing_results(
    item: PaperItem, store: Store, *, seeds: Sequence[int] | None = None, images: Mapping[str, int] | None = None
) -> list[MissingResult]:
    """What the run lacks for an item, under the item's seeds or others.

    `images`: how many images of each dataset there must be; by default as many as the most complete method has.
    """
    counts = {MissingResult(dataset, method, seed): n for dataset, seed, method, n in store.groups()}
    wanted = {name: max((n for key, n in counts.items() if key.dataset == name), default=1) for name in item.datasets}
    wanted |= images or {}
    needed = (
        MissingResult(dataset, method, seed)
        for dataset in item.datasets
        for method in item.methods
        for seed in (item.seeds if seeds is None else seeds)
    )
    return [result for result in needed if counts.get(result, 0) < wanted[result.dataset]]


def as_table(item: PaperItem, store: Store) -> Table:
    """A table of the paper with the numbers of a run, and the paper's."""
    if item.kind == "figure":
        raise ValueError(f"{item.name} is not a table")
    if item.kind == "size":
        facts = store.facts("dataset")
        ours = {name: fact for name, fact in facts.items() if fact["family"] != "other"}
        return sizes_table({name: (fact["images"], fact["classes"]) for name, fact in ours.items()})
    metrics = ("top1", "seconds_per_image") if item.kind == "efficiency" else ("top1",)
    run = RunMetrics(store, metrics, item.datasets, item.methods)
    source = paper.table(item.name)
    columns = _columns(item, source, run)
    rows = []
    for row, section in zip(source.rows, _sections(source.rows), strict=True):
        cells = {column.name: _cell(item, row.method, column.name, run) for column in columns}
        rows.append(_beside(TableRow(row.method or row.name, cells, section), row, source, run))
    unit = {"accuracy": "accuracy in %, ", "std": "points, "}.get(item.kind, "")
    title = f"{item.name.replace('-', ' ').capitalize()}: {item.shows} ({unit}{run.model})"
    memory = peak_memory_note(store) if item.kind == "efficiency" else ()
    spread = "standard deviation" if item.kind == "std" else "mean ± standard deviation"
    return Table(title, columns, tuple(rows), notes=(*_notes(item, run), *memory, *run.footnotes(spread)))


def sizes_table(sizes: Mapping[str, tuple[int, int]]) -> Table:
    """The paper's table of datasets, with our numbers of images and classes by dataset."""
    source = paper.table("table-11")
    rows = []
    for row in source.rows:
        ours = dict(zip(("images", "classes"), sizes.get(row.name, (None, None)), strict=True))
        cells = {column: Cell(ours[column], paper=row.values[column]) for column in source.columns}
        rows.append(TableRow(row.name, cells))
    columns = tuple(Column(name, digits=0, best="none") for name in source.columns)
    absent = [paper_title(row.name) for row in source.rows if row.name not in sizes]
    notes = (f"missing: {', '.join(absent)}",) if absent else ()
    return Table(f"Table 11: {source.caption}", columns, tuple(rows), "dataset", notes)


def _columns(item: PaperItem, source: paper.PaperTable, run: RunMetrics) -> tuple[Column, ...]:
    """The paper's columns, followed by datasets where it has only means that the run cannot fill."""
    columns: list[Column] = []
    for name in source.columns:
        if name in GROUPS:
            columns.append(run.mean_column(name, "top1", paper=True))
        elif name in item.datasets:
            present = name in run.datasets
            columns.append(run.column(name, "top1", paper=True) if present else Column(name, paper_title(name)))
        else:
            columns += [column for column in _EFFICIENCY if column.name == name]
    if item.kind == "std":
        return tuple(replace(column, best="none") for column in columns)
    means = [name for name in source.columns if name in GROUPS]
    filled = all(any(run.mean(method, name, "top1").value is not None for method in run.methods) for name in means)
    if not filled and not set(source.columns) & set(item.datasets):
        columns += [run.column(name, "top1", paper=True) for name in run.datasets]
    return tuple(columns)


def _cell(item: PaperItem, method: str | None, column: str, run: RunMetrics) -> Cell:
    """Our number, empty if there is none."""
    if method is None:
        return Cell()
    if column in item.datasets:
        cell = run.cell(method, column, "top1")
        return Cell(cell.std, notes=cell.notes if cell.std is not None else ()) if item.kind == "std" else cell
    if column in GROUPS:
        return run.mean(method, column, "top1")
    if column == "seconds":
        times = [run.cell(method, dataset, "seconds_per_image").value for dataset in run.datasets]
        known = [time for time in times if time is not None]
        return Cell(sum(known) / len(known) if known else None)
    if column == "gain" and method != "clip":
        ours, clip = (run.mean(name, "fgvc", "top1").value for name in (method, "clip"))
        return Cell(None if ours is None or clip is None else ours - clip)
    return Cell()


def _beside(row: TableRow, source: paper.PaperRow, table: paper.PaperTable, run: RunMetrics) -> TableRow:
    """The row with the paper's numbers."""
    cells = {}
    for column, cell in row.cells.items():
        number, doubt = _paper_number(source, table, column)
        cells[column] = replace(cell, paper=number, paper_notes=(doubt,) if doubt else ())
    return replace(row, cells=cells, paper_notes=other_model_note(table.model, run.model) if run.datasets else ())


def _paper_number(source: paper.PaperRow, table: paper.PaperTable, column: str) -> tuple[float | None, str | None]:
    """The number of this table, or of any other for a column that this one lacks; and a doubt about it."""
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
    return ["with tuning" if tunes else "without tuning" for tunes in tuned]


def _notes(item: PaperItem, run: RunMetrics) -> Iterator[str]:
    """What the table lacks, and how the run differs from the paper's as a whole."""
    yield from run.missing_notes(item.datasets, item.methods)
    if item.kind == "std" and run.datasets and len(run.seeds) < 2:
        yield "a standard deviation takes at least two seeds"
    if item.kind == "efficiency":
        yield "time: mean over the datasets of the run, on this machine, views included; the paper's on its own machine"
        yield "memory is not measured by method; CLIP-64 is no method here, but the cost of encoding 64 views"
    if run.datasets:
        yield from _prompt_notes(item, run.settings.get("prompt", {}))


def _prompt_notes(item: PaperItem, prompt: Mapping[str, object]) -> Iterator[str]:
    coop, templates = bool(prompt.get("context")), prompt.get("templates", ())
    ensemble = isinstance(templates, Iterable) and tuple(templates) == TEMPLATES["ensemble"]
    if coop != item.coop:
        yield f"made with{'' if coop else 'out'} a learned context, unlike the paper's"
    if ensemble != item.ensemble:
        yield f"made with{'' if ensemble else 'out'} the ensemble of seven templates, unlike the paper's"
