"""All tables and figures of the paper from runs on disk: Markdown and LaTeX files, figures, and one HTML page.

Everything is drawn from the runs each time, so a page shows the results so far, and a run that was continued ends with
the same files as one that was not interrupted.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from usetta.evaluate.store import FILE, Store
from usetta.files import write_atomically
from usetta.report import html
from usetta.report.measured import RunMetrics
from usetta.report.paper_figures import as_figures
from usetta.report.reproduce import ITEMS, PaperItem, PaperRun, as_table, sizes_table
from usetta.report.style import save
from usetta.report.tables import Cell, Column, Table, TableRow, latex, markdown


@dataclass(frozen=True)
class ReportPart:
    """A table or figure on the page."""

    name: str
    title: str
    table: Markup | None
    drawing: html.Illustration | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class WrittenReport:
    """What `write_paper_report` wrote."""

    page: Path
    shown: tuple[str, ...]
    """Names of the tables and figures."""
    missing: Mapping[str, str]
    """Why others could not be shown."""


class RunningTable:
    """The accuracies of a run so far, of the methods that the paper's first tables compare.

    A dataset is read from the run once, when it is added: to read all of them again after each would take minutes.
    """

    def __init__(self, run: PaperRun) -> None:
        self._title = f"So far ({run.model})"
        self._methods = run.item.methods
        self._columns: list[Column] = []
        self._cells: dict[str, dict[str, Cell]] = {method: {} for method in self._methods}

    def add(self, store: Store, dataset: str) -> None:
        """Add the results on a dataset."""
        metrics = RunMetrics(store, ("top1",), [dataset], self._methods)
        if dataset in metrics.datasets:
            self._columns.append(metrics.column(dataset, "top1", paper=False))
            for method in self._methods:
                self._cells[method][dataset] = metrics.cell(method, dataset, "top1")

    def table(self) -> Table:
        """The datasets that were added."""
        rows = tuple(TableRow(method, cells) for method, cells in self._cells.items() if cells)
        return Table(self._title, tuple(self._columns), rows)


def write_paper_report(
    out: Path, runs: Mapping[Path, PaperRun], sizes: Mapping[str, tuple[int, int]], remarks: Sequence[str] = ()
) -> WrittenReport:
    """Write everything that runs, by their folders, have results for into `out`.

    `sizes`: images and classes of the datasets on this disk. `remarks`: lines for the top of the page.
    """
    parts: list[ReportPart] = []
    missing: dict[str, str] = {}
    texts: list[Table] = []
    with ExitStack() as stack:
        stores = {
            folder: stack.enter_context(Store(folder, create=False)) for folder in runs if (folder / FILE).is_file()
        }
        for item in ITEMS.values():
            if item.kind == "size":
                tables = [sizes_table(sizes)]
            else:
                of_item = [stores[folder] for folder, run in runs.items() if item in run.items and folder in stores]
                if not of_item:
                    missing[item.name] = "needs CoOp's context" if item.coop else "has no results yet"
                    continue
                if item.kind == "figure":
                    drawn = [part for store in of_item for part in _figures(item, store, out)]
                    parts += drawn
                    if not drawn:
                        missing[item.name] = "has no results yet"
                    continue
                tables = [as_table(item, store) for store in of_item]
            for table in tables:
                texts.append(table)
                parts.append(ReportPart(item.name, table.title, html.table_html(table), None, ()))
                _write(out / "tables" / f"{item.name}.md", markdown(table))
                _write(out / "tables" / f"{item.name}.tex", latex(table))
    _write(out / "tables.md", "\n".join(markdown(table) for table in texts))
    _write(out / "tables.tex", "\n".join(latex(table) for table in texts))
    page = html.render("paper.html.j2", parts=parts, missing=missing, remarks=list(remarks))
    _write(out / "report.html", page)
    return WrittenReport(out / "report.html", tuple(dict.fromkeys(part.name for part in parts)), missing)


def _figures(item: PaperItem, store: Store, out: Path) -> list[ReportPart]:
    drawn = as_figures(item, store)
    parts = []
    for name, figure in drawn.figures.items():
        png, _ = save(figure, out / "figures" / name)
        model = name.removeprefix(f"{item.name}-") if name != item.name else ""
        title = f"{item.name.replace('-', ' ').capitalize()}{f' ({model})' if model else ''}: {item.shows}"
        illustration = html.illustration(figure, title, photos=item.name == "figure-5", saved=png)
        parts.append(ReportPart(item.name, title, None, illustration, drawn.notes))
    return parts


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode("utf-8", "replace"))
