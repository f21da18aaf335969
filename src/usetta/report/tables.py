"""Tables of results, with the paper's numbers below ours, for people and for programs.

A `Table` holds numbers and notes. `lay_out` turns them into text, once for the terminal, markdown, LaTeX and HTML: a
row has a second line with the paper's number and our difference from it, the best of our numbers in a column (of its
section, as in the paper) is bold, notes become footnotes, and what is missing is a dash. CSV and JSON carry the numbers
themselves. A table that is too wide for the terminal is continued below, with the names of its rows repeated.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from usetta.files import spreadsheet_safe

DASH = "–"
MINUS = "−"
_PAPER = "paper"
_LEGEND = f"{_PAPER}: its number, and by how much ours differs from it"


@dataclass(frozen=True)
class Cell:
    """A number of ours, the paper's, or both. NaN counts as missing."""

    value: float | None = None
    std: float | None = None
    paper: float | None = None
    notes: tuple[str, ...] = ()
    """About our number."""
    paper_notes: tuple[str, ...] = ()
    """About the paper's number."""

    def __post_init__(self) -> None:
        for name in ("value", "std", "paper"):
            number = getattr(self, name)
            object.__setattr__(self, name, None if number is None or math.isnan(number) else float(number))

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.value is None or self.paper is None else self.value - self.paper


@dataclass(frozen=True)
class Column:
    """A column, such as a dataset."""

    name: str
    title: str = ""
    """Its heading, if not its name."""
    digits: int = 2
    best: Literal["high", "low", "none"] = "high"
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        return self.title or self.name


@dataclass(frozen=True)
class TableRow:
    """A row, such as a method."""

    name: str
    cells: Mapping[str, Cell] = field(default_factory=dict)
    """By name of the column."""
    section: str = ""
    """Rows of a section are listed under its name, and have their own best numbers."""
    notes: tuple[str, ...] = ()
    paper_notes: tuple[str, ...] = ()
    """About the paper's numbers in this row."""


@dataclass(frozen=True)
class Table:
    """Rows by columns; a cell that a row does not have is missing."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    corner: str = "method"
    """What the rows are."""
    notes: tuple[str, ...] = ()
    """Footnotes on the table as a whole."""


def terminal(table: Table) -> RenderableType:
    """Something that rich prints, in parts that fit the width of the console."""
    return _Terminal(lay_out(table))


def markdown(table: Table) -> str:
    """GitHub's markdown; the source is aligned as well."""
    layout = lay_out(table)
    head = [_markdown_text(layout.corner), *(_markdown_text(text.head) + _sup(text.marks) for text in layout.headings)]
    body: list[list[str]] = []
    for line in layout.lines:
        name = _markdown_text(line.name) + _sup(line.marks)
        name = {"section": f"*{name}*", "ours": name, "paper": f"&emsp;{name}"}[line.kind]
        body.append([name, *map(_markdown_cell, line.texts)])
    widths = [max(3, *map(len, column)) for column in zip(head, *body, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    justified = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in (head, rule, *body)
    ]
    lines = [f"**{_markdown_text(layout.title)}**", "", *(f"| {' | '.join(row)} |" for row in justified)]
    for marks, text in layout.footnotes:
        lines += ["", " ".join(filter(None, (_sup(marks), _markdown_text(text))))]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A LaTeX table; it needs the package booktabs."""
    layout = lay_out(table)
    width = 1 + len(layout.headings)
    head = [
        _latex_text(layout.corner),
        *(_latex_text(text.head) + _superscript(text.marks) for text in layout.headings),
    ]
    lines = [
        r"\begin{table}",
        rf"\caption{{{_latex_text(layout.title)}}}",
        r"\centering",
        rf"\begin{{tabular}}{{l{'r' * len(layout.headings)}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
    ]
    for line in layout.lines:
        if line.opens:
            lines.append(r"\midrule")
        name = _latex_text(line.name) + _superscript(line.marks)
        if line.kind == "section":
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\emph{{{name}}}}} \\")
        else:
            name = rf"\quad {name}" if line.kind == "paper" else name
            lines.append(" & ".join([name, *map(_latex_cell, line.texts)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    for i, (marks, text) in enumerate(layout.footnotes):
        opening = r"\par\smallskip\footnotesize" if i == 0 else r"\par"
        lines.append(" ".join(filter(None, (opening, _superscript(marks), _latex_text(text)))))
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def as_csv(table: Table) -> str:
    """One line per cell, to six decimals, without the notes on the table as a whole."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["section", table.corner, "column", "value", "std", "paper", "difference", "notes"])
    for row in table.rows:
        for column in table.columns:
            cell = row.cells.get(column.name, Cell())
            numbers = [_rounded(value) for value in (cell.value, cell.std, cell.paper, cell.difference)]
            notes = (*column.notes, *row.notes, *cell.notes)
            if cell.paper is not None:
                notes += (*row.paper_notes, *cell.paper_notes)
            cells = [row.section, row.name, column.name, *numbers, "; ".join(dict.fromkeys(notes))]
            writer.writerow(map(spreadsheet_safe, cells))
    return out.getvalue()


def as_json(table: Table) -> str:
    """All that the table holds, to six decimals."""
    stored = asdict(table)
    for row, kept in zip(table.rows, stored["rows"], strict=True):
        kept["cells"] = {column.name: _stored(row.cells.get(column.name, Cell())) for column in table.columns}
    return json.dumps(stored, ensure_ascii=False, indent=1) + "\n"


def _stored(cell: Cell) -> dict[str, Any]:
    names = ("value", "std", "paper", "difference")
    return asdict(cell) | {name: _rounded(getattr(cell, name)) for name in names}


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": markdown, "latex": latex, "csv": as_csv, "json": as_json}


@dataclass(frozen=True)
class CellText:
    """The text of a cell or a heading."""

    head: str
    tail: str = ""
    """The standard deviation, or the difference from the paper."""
    marks: tuple[str, ...] = ()
    bold: bool = False


@dataclass(frozen=True)
class LayoutLine:
    """A line of a table: the name of a section, a row, or the paper's numbers for the row above."""

    name: str
    marks: tuple[str, ...] = ()
    texts: tuple[CellText, ...] = ()
    kind: Literal["section", "ours", "paper"] = "ours"
    opens: bool = False
    """Whether a section begins here."""


@dataclass(frozen=True)
class TableLayout:
    """A table as text, before it is escaped for a format."""

    title: str
    corner: str
    headings: tuple[CellText, ...]
    lines: tuple[LayoutLine, ...]
    footnotes: tuple[tuple[tuple[str, ...], str], ...]
    """Mark and text; no mark where the whole table is meant."""


class _NoteMarks:
    """Letters for notes, in order of appearance; equal notes share one."""

    letters = "abcdefghijklmnoprstuvwxyz"  # Unicode has no superscript q

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def __call__(self, notes: Sequence[str]) -> tuple[str, ...]:
        for note in notes:
            rounds, place = divmod(len(self.of), len(self.letters))
            self.of.setdefault(note, self.letters[place] * (rounds + 1))
        return tuple(self.of[note] for note in notes)


def lay_out(table: Table) -> TableLayout:
    """The texts of a table, for a format to escape and arrange."""
    marks = _NoteMarks()
    headings = tuple(CellText(_one_line(column.heading), marks=marks(column.notes)) for column in table.columns)
    lines: list[LayoutLine] = []
    for section, members in groupby(table.rows, key=lambda row: row.section):
        rows = list(members)
        best = {column.name: _best(column, rows) for column in table.columns}
        blank = tuple(CellText("") for _ in headings)
        of_section = [LayoutLine(_one_line(section), texts=blank, kind="section")] if section else []
        for row in rows:
            of_section += _lines(table.columns, row, best, marks)
        lines += [replace(of_section[0], opens=True), *of_section[1:]]
    legend = (_LEGEND,) if any(line.kind == "paper" for line in lines) else ()
    notes = [((mark,), note) for note, mark in marks.of.items()] + [((), note) for note in (*legend, *table.notes)]
    footnotes = tuple((mark, _one_line(note)) for mark, note in notes)
    return TableLayout(_one_line(table.title), _one_line(table.corner), headings, tuple(lines), footnotes)


def _lines(
    columns: Sequence[Column], row: TableRow, best: Mapping[str, float | None], marks: _NoteMarks
) -> Iterator[LayoutLine]:
    cells = [row.cells.get(column.name, Cell()) for column in columns]
    name_marks = marks(row.notes)
    texts = []
    for column, cell in zip(columns, cells, strict=True):
        tail = "" if cell.value is None or cell.std is None else f"±{cell.std:.{column.digits}f}"
        bold = cell.value is not None and round(cell.value, column.digits) == best[column.name]
        texts.append(CellText(format_number(cell.value, column.digits), tail, marks(cell.notes), bold))
    yield LayoutLine(_one_line(row.name), name_marks, tuple(texts))
    if any(cell.paper is not None for cell in cells):
        name_marks = marks(row.paper_notes)
        texts = []
        for column, cell in zip(columns, cells, strict=True):
            tail = "" if cell.difference is None else f" {_difference(cell, column.digits)}"
            texts.append(CellText(format_number(cell.paper, column.digits), tail, marks(cell.paper_notes)))
        yield LayoutLine(_PAPER, name_marks, tuple(texts), kind="paper")


def _best(column: Column, rows: Sequence[TableRow]) -> float | None:
    """The best number of a column as it is shown, if there is more than one to choose from."""
    values = [row.cells.get(column.name, Cell()).value for row in rows]
    shown = [round(value, column.digits) for value in values if value is not None]
    if len(shown) < 2 or column.best == "none":
        return None
    return max(shown) if column.best == "high" else min(shown)


def _one_line(text: str) -> str:
    """A line break would end a row in most formats."""
    return " ".join(text.split())


def _rounded(value: float | None) -> float | None:
    """Without the noise of floating point."""
    return None if value is None else round(value, 6)


def format_number(value: float | None, digits: int) -> str:
    """A number for people, with a real minus sign; a dash if it is missing."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", MINUS)  # adding 0.0 turns −0 into 0


def format_difference(value: float, digits: int) -> str:
    """A difference for people, always with its sign."""
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", MINUS)


def _difference(cell: Cell, digits: int) -> str:
    """Between the numbers as they are shown, so that a reader who subtracts them gets the same."""
    return format_difference(round(cell.value or 0.0, digits) - round(cell.paper or 0.0, digits), digits)


_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_|<>[]~#"})


def _markdown_text(text: str) -> str:
    return text.translate(_MARKDOWN)


def _markdown_cell(text: CellText) -> str:
    number = f"**{text.head}**" if text.bold else text.head
    return " ".join(filter(None, (number, text.tail.strip()))) + _sup(text.marks)


def _sup(marks: Sequence[str]) -> str:
    return f"<sup>{','.join(marks)}</sup>" if marks else ""


_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {character: f"{{{character}}}" for character in "[]*"}  # first in a row, they would be taken for options of \\
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", DASH: "--", "—": "---", "…": r"\dots{}"}
    | {MINUS: "$-$", "±": r"$\pm$", "×": r"$\times$", "α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$"}
    | {"δ": r"$\delta$", "λ": r"$\lambda$", "ρ": r"$\rho$"}
)


def _latex_text(text: str) -> str:
    return text.translate(_LATEX)


def _latex_cell(text: CellText) -> str:
    number = rf"\textbf{{{_latex_text(text.head)}}}" if text.bold else _latex_text(text.head)
    tail = rf"{{\scriptsize {_latex_text(text.tail.strip())}}}" if text.tail else ""
    return " ".join(filter(None, (number, tail))) + _superscript(text.marks)


def _superscript(marks: Sequence[str]) -> str:
    return rf"\textsuperscript{{{','.join(marks)}}}" if marks else ""


_RAISED = str.maketrans(_NoteMarks.letters, "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ")


def _raised(marks: Sequence[str]) -> str:
    return ",".join(marks).translate(_RAISED)


_GAP = 2


@dataclass(frozen=True)
class _ColumnWidth:
    """Width of a column, and of its numbers, which are aligned at the right."""

    head: int
    whole: int

    def text(self, text: CellText) -> str:
        return text.head.rjust(self.head) + text.tail + _raised(text.marks)


def _column_width(heading: CellText, texts: Sequence[CellText]) -> _ColumnWidth:
    head = max((len(text.head) for text in texts), default=0)
    tail = max((len(text.tail + _raised(text.marks)) for text in texts), default=0)
    return _ColumnWidth(head, max(head + tail, cell_len(heading.head + _raised(heading.marks))))


def _parts(widths: Sequence[int], width: int) -> list[range]:
    """Columns in as few parts as fit into the width, all with about as many columns."""
    for count in range(1, len(widths) + 1):
        edges = [round(i * len(widths) / count) for i in range(count + 1)]
        parts = [range(start, end) for start, end in pairwise(edges)]
        if count == len(widths) or all(sum(widths[i] for i in part) <= width for part in parts):
            return parts
    return []


class _Terminal:
    """Prints a layout in as many parts, one below the other, as the width of the console requires."""

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        headings, lines = self.layout.headings, self.layout.lines
        names = [f"{'  ' if line.kind == 'paper' else ''}{line.name}{_raised(line.marks)}" for line in lines]
        name_width = min(max(map(cell_len, (self.layout.corner, *names))), options.max_width // 2)
        widths = [_column_width(heading, [line.texts[i] for line in lines]) for i, heading in enumerate(headings)]
        yield Text(self.layout.title, style="bold")
        for part in _parts([_GAP + width.whole for width in widths], options.max_width - name_width):
            yield Text()
            grid = _ruled_grid()
            grid.add_column(Text(self.layout.corner), width=name_width, overflow="fold")
            for i in part:
                title = headings[i].head + _raised(headings[i].marks)
                grid.add_column(Text(title), width=widths[i].whole, no_wrap=True)
            for name, line in zip(names, lines, strict=True):
                if line.opens:
                    grid.add_section()
                cells = [Text(widths[i].text(line.texts[i])) for i in part]
                for i, cell in zip(part, cells, strict=True):
                    cell.stylize("bold" if line.texts[i].bold else "", 0, widths[i].head)
                grid.add_row(Text(name), *cells, style={"paper": "dim", "section": "italic"}.get(line.kind))
            yield grid
        if self.layout.footnotes:
            notes = Grid.grid(padding=(0, 1))
            for marks, text in self.layout.footnotes:
                notes.add_row(Text(_raised(marks) or " "), Text(text))
            yield Text()
            yield notes


def _ruled_grid() -> Grid:
    """An empty table with rules below its heading and between its sections, and nothing else drawn."""
    nothing, rule = "    ", " ── "
    box = Box("\n".join([nothing, nothing, rule, nothing, rule, nothing, nothing, nothing]) + "\n")
    # The box itself puts one space between two cells.
    return Grid(box=box, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold")
