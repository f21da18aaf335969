"""The paper's numbers as data: `python tools/paper_tables.py PAPER.tex` rewrites src/usetta/report/paper_numbers.json.

Tables are numbered in the order of their captions, as LaTeX does; one without numbers (the text templates) keeps its
number and is left out. Every accuracy is checked on the way: means against the datasets they are means of, the same
method in different tables, rows that are the same for different methods. What does not fit is printed and becomes a
note on the numbers; nothing is corrected.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path

from usetta.evaluate.metrics import FINE_GRAINED, GROUPS, IMAGENET, group_means

TARGET = Path(__file__).parents[1] / "src" / "usetta" / "report" / "paper_numbers.json"
VIT, RN50 = "ViT-B-16", "RN50"
MODELS = {"ViT-B/16": VIT, r"(RN|ResNet)-?50": RN50}
ROUNDING = 0.0101
"""What rounding to two digits, of a mean and of what it is the mean of, can explain."""


@dataclass(frozen=True)
class Known:
    """What a table of the paper is about, by its LaTeX label."""

    caption: str
    model: str | None = VIT
    quantity: str = "accuracy"
    coop: bool = False
    ensemble: bool = False
    plug_in: bool = False
    """Whether a row called SE is the row above it with SE as its readout."""


KNOWN = {
    "tb:I_vit": Known("ImageNet and its variants"),
    "tb:Fg_vit": Known("fine-grained datasets"),
    "tb:I_rn": Known("ImageNet and its variants", RN50),
    "tb:Fg_rn": Known("fine-grained datasets", RN50),
    "tb:coop": Known("from CoOp's context, means", coop=True),
    "tb:ablation": Known("ablation of tuning and readout, means"),
    "tb:plug": Known("SE as the readout of other methods, means"),
    "tb:variants": Known("rescaling functions of SE, means"),
    "tb:text_ensemble": Known("seven text templates, means", ensemble=True),
    # No model is named here; the accuracies are those of ViT-B/16.
    "tb:computation": Known("time, memory and fine-grained accuracy", quantity="efficiency"),
    "tb:sp_dts": Known("the datasets", None, "size"),
    "sup:loss_I": Known("TPT's marginal entropy against reverse cross-entropy, ImageNet and its variants"),
    "sup:loss_fg": Known("TPT's marginal entropy against reverse cross-entropy, fine-grained datasets"),
    "tb:sup_error_I_vit": Known("standard deviations, ImageNet and its variants", quantity="std"),
    "tb:sup_error_I_rn": Known("standard deviations, ImageNet and its variants", RN50, "std"),
    "tb:sup_error_fg_vit": Known("standard deviations, fine-grained datasets", quantity="std"),
    "tb:sup_error_fg_rn": Known("standard deviations, fine-grained datasets", RN50, "std"),
    "tb:sup_coop_I_vit": Known("from CoOp's context, ImageNet and its variants", coop=True),
    "tb:sup_coop_fg_vit": Known("from CoOp's context, fine-grained datasets", coop=True),
    "tb:sup_ablation_I": Known("ablation of tuning and readout, ImageNet and its variants"),
    "tb:sup_ablation_fg": Known("ablation of tuning and readout, fine-grained datasets"),
    "tb:sup_plug_I": Known("SE as the readout of other methods, ImageNet and its variants", plug_in=True),
    "tb:sup_plug_fg": Known("SE as the readout of other methods, fine-grained datasets", plug_in=True),
}

DATASETS = {
    "ImageNet": "imagenet",
    **{
        f"{prefix}-{end}": f"imagenet-{end.lower()}"
        for prefix in ("", "ImageNet")
        for end in ("A", "V2", "R", "Sketch")
    },
    **{name: name.lower() for name in ("DTD", "Flowers102", "Caltech101", "Aircraft", "Pets", "UCF101", "Cars")},
    **{name: name.lower() for name in ("EuroSAT", "SUN397", "Food101")},
    "Flower102": "flowers102",
}
COLUMNS = DATASETS | {
    **{"IN&O": "in&o", "FGVC": "fgvc", "OOD Avg.": "ood"},
    **{"Time (s)": "seconds", "Mem (GB)": "gigabytes", "Acc (%)": "fgvc", "Gains (%)": "gain"},
    **{"Classes": "classes", "Testing": "images"},
}
ACCURACIES = {*IMAGENET, *FINE_GRAINED, *GROUPS}
TEXT_COLUMNS = {"", "Method", "Optim.", "Inference", "Loss", "Function", "Dataset", "Task"}
"""Titles of columns that hold text."""

METHODS = {
    **{name: name.lower() for name in ("CLIP", "MTA", "ZERO", "SE", "TPT", "C-TPT", "RLCF", "TTL", "TPS", "R-TPT")},
    **{"STS": "sts", "USE": "use", "CoOp": "clip", "CLIP-64": None},
}
PLUG_IN = "+ SE"
ABLATION = {
    **{("-", "standard"): "clip", ("-", "uniform"): "uniform", ("-", "SE"): "se"},
    **{("MEM", "standard"): "tpt", ("MEM", "uniform"): "tpt+uniform", ("MEM", "SE"): "tpt+se"},
    **{("RCE", "standard"): "rce", ("RCE", "uniform"): "rce+uniform", ("RCE", "SE"): "use"},
}
LOSSES = {"MEM": "tpt", "RCE": "tpt-rce"}
RESCALINGS = {r"\sqrt": ("square root", "se:rescaling=root"), "^2": ("square", "se:rescaling=square")}

SENTENCE = re.compile(
    r"\(\$\\gamma=1\$\), \\texttt\{USE\} still achieves an average accuracy of ([\d.]+)\\%.*?"
    r"standard baseline of ([\d.]+)\\% \(\$\\beta=1\$\)",
    re.DOTALL,
)
"""The only accuracies that stand in the text alone."""


@dataclass
class Row:
    method: str | None
    name: str
    values: dict[str, float]
    std: dict[str, float] = field(default_factory=dict)
    suspicious: list[str] = field(default_factory=list)
    """Columns that are not to be trusted."""
    notes: dict[str, str] = field(default_factory=dict)
    """What does not fit, by column."""

    def note(self, column: str, text: str) -> None:
        self.notes[column] = f"{self.notes[column]}; {text}" if column in self.notes else text


@dataclass
class Table:
    id: str
    label: str
    known: Known
    columns: list[str]
    rows: list[Row]


def read(latex: str) -> list[Table]:
    """All tables with numbers, in the order of the paper."""
    latex = re.sub(r"(?<!\\)%.*", "", latex)
    tables = []
    captioned = (body for body in _environments(latex, r"table\*?") if r"\caption" in body)
    for number, body in enumerate(captioned, start=1):
        lines = _lines(next(_environments(body, "tabular")))
        if not any(_number(cell) is not None for line in lines for cell in line.cells):
            continue
        label = re.findall(r"\\label\{(.*?)\}", body)[0]
        if label not in KNOWN:
            raise ValueError(f"table {number} has the unknown label {label!r}; describe it in KNOWN")
        named = {model for pattern, model in MODELS.items() if re.search(pattern, body)}
        if named - {KNOWN[label].model}:
            raise ValueError(f"table {label!r} names {', '.join(named)}, KNOWN says {KNOWN[label].model}")
        tables.append(_table(f"table-{number}", label, KNOWN[label], lines))
    sentence = SENTENCE.search(latex)
    if sentence is None:
        raise ValueError("the sentence with USE's accuracies for γ = 1 and β = 1 is not there; see SENTENCE")
    rows = [
        Row(f"use:{setting}=1.0", f"USE, {letter} = 1", {"avg": float(value)})
        for setting, letter, value in zip(("gamma", "beta"), "γβ", sentence.groups(), strict=True)
    ]
    tables.append(Table("text", "beta_discussion", Known("in the text on γ alone, means"), ["avg"], rows))
    return tables


def _environments(latex: str, name: str) -> Iterator[str]:
    for match in re.finditer(rf"\\begin\{{({name})\}}(.*?)\\end\{{\1\}}", latex, re.DOTALL):
        yield match[2]


@dataclass(frozen=True)
class Line:
    cells: list[str]
    head: bool


def _lines(tabular: str) -> list[Line]:
    """The lines of a tabular in plain text, without what describes its columns."""
    body = re.sub(r"^\s*\{[^}]*\}", "", tabular)
    head, _, rest = body.partition(r"\midrule")
    parts = [(text, part is head) for part in (head, rest) for text in re.split(r"\\\\", part)]
    lines = [Line([plain(cell) for cell in re.split(r"(?<!\\)&", text)], is_head) for text, is_head in parts]
    return [line for line in lines if any(line.cells)]


def plain(latex: str) -> str:
    """The text of a cell, without rules, colours, citations and fonts."""
    text = re.sub(r"\\(top|mid|bottom)rule|~?\s*\\(cite|rowcolor|label)\s*\{.*?\}", " ", latex)
    text = re.sub(r"\\multirow\{.*?\}\{.*?\}", "", text)
    while (bare := re.sub(r"\\(?:textbf|texttt|textsc|text|emph)\{([^{}]*)\}", r"\1", text)) != text:
        text = bare
    for command, word in ((r"$\pm$", "±"), (r"$\times$", "×"), (r"$\checkmark$", "✓"), (r"\&", "&"), (r"\%", "%")):
        text = text.replace(command, word)
    text = re.sub(r"^\{(.*)\}$", r"\1", text.strip())
    return " ".join(text.split())


def _number(text: str) -> float | None:
    match = re.fullmatch(r"±?\s*(\d[\d,]*(?:\.\d+)?)", text)
    return float(match[1].replace(",", "")) if match else None


def _table(id_: str, label: str, known: Known, lines: list[Line]) -> Table:
    heads = [line.cells for line in lines if line.head]
    width = max(map(len, heads))
    titles = [" ".join(filter(None, column)) for column in zip(*(_padded(head, width) for head in heads), strict=True)]
    columns = _columns(titles)
    rows: list[Row] = []
    base = ""
    for line in lines:
        if line.head:
            continue
        texts = {title: cell for title, cell in zip(titles, line.cells, strict=False) if title in TEXT_COLUMNS}
        name, method = _method(texts, base, known)
        if name != PLUG_IN:
            base = method or ""
        numbers = ((column, _number(cell)) for column, cell in zip(columns, line.cells, strict=False) if column)
        rows.append(Row(method, name, {column: number for column, number in numbers if number is not None}))
    return Table(id_, label, known, [column for column in columns if column], rows)


def _padded(cells: list[str], width: int) -> list[str]:
    return cells + [""] * (width - len(cells))


def _columns(titles: list[str]) -> list[str | None]:
    """Names of the columns with numbers, None for those with text; `Avg.` is the mean of the columns beside it."""
    columns: list[str | None] = []
    for title in titles:
        if title == "Avg.":
            columns.append(next(group for group, of in GROUPS.items() if set(of) <= set(columns)))
        elif title in TEXT_COLUMNS:
            columns.append(None)
        elif title in COLUMNS:
            columns.append(COLUMNS[title])
        else:
            raise ValueError(f"unknown column {title!r}; known are {', '.join(COLUMNS)}")
    return columns


def _method(texts: dict[str, str], base: str, known: Known) -> tuple[str, str | None]:
    """What the paper calls a row and its name in our grammar, if it has one."""
    if "Inference" in texts:
        return f"{texts['Optim.']} / {texts['Inference']}", ABLATION[texts["Optim."], texts["Inference"]]
    if "Loss" in texts:
        return texts["Loss"], LOSSES[texts["Loss"]]
    if "Function" in texts:
        return next((names for mark, names in RESCALINGS.items() if mark in texts["Function"]), ("linear", "se"))
    if "Dataset" in texts:
        return DATASETS[texts["Dataset"]], None
    name = texts.get("Method", texts.get("", ""))
    if name == PLUG_IN or (name == "SE" and known.plug_in):
        return PLUG_IN, f"{base}+se"
    return name, METHODS[name]


def add_deviations(tables: list[Table]) -> None:
    """Standard deviations beside the accuracies that they belong to."""
    for spread in tables:
        if spread.known.quantity == "std":
            (home,) = (
                table
                for table in tables
                if table.known == Known(table.known.caption, spread.known.model)
                and set(spread.columns) <= set(table.columns)
                and {row.method for row in spread.rows} <= {row.method for row in table.rows}
            )
            for row in spread.rows:
                next(other for other in home.rows if other.method == row.method).std = row.values


Settings = tuple[str | None, bool, bool]
Cells = dict[tuple[Settings, str, str], list[tuple[Table, Row]]]
"""Where each accuracy stands, by (model, CoOp, ensemble), method and column."""


def _settings(table: Table) -> Settings:
    return table.known.model, table.known.coop, table.known.ensemble


def check(tables: list[Table], log: Callable[[str], None]) -> None:
    """Attach a note to every number that does not fit another, and log it."""
    compared = [table for table in tables if table.known.quantity in ("accuracy", "efficiency")]
    cells: Cells = defaultdict(list)
    for table in compared:
        for row in table.rows:
            for column in row.values:
                if row.method and column in ACCURACIES:
                    cells[_settings(table), row.method, column].append((table, row))
    _check_means(cells, log)
    _check_gains(compared, log)
    _check_repetitions(cells, log)
    _check_identical_rows(compared, cells, log)


def _check_means(cells: Cells, log: Callable[[str], None]) -> None:
    checked = 0
    for (settings, method, column), places in cells.items():
        for table, row in places if column in GROUPS else []:
            parts = {}
            for part in GROUPS[column]:  # it stands in the same row, or else in another table
                homes = [row, *(home for _, home in cells.get((settings, method, part), []))]
                parts[part] = next((home.values[part] for home in homes if part in home.values), None)
            mean = group_means(parts)[column]
            if mean is None:
                continue
            checked += 1
            given = row.values[column]
            if abs(mean - given) > ROUNDING:
                row.note(column, f"the paper's mean is {given:.2f}, that of its parts {mean:.2f}")
                log(f"{table.id} {method} {column}: {row.notes[column]}")
    log(f"{checked} means checked")


def _check_gains(tables: list[Table], log: Callable[[str], None]) -> None:
    for table in tables:
        for row in table.rows:
            if "gain" in row.values:
                gain = row.values["fgvc"] - table.rows[0].values["fgvc"]
                if abs(gain - row.values["gain"]) > ROUNDING:
                    row.note("gain", f"the paper's gain is {row.values['gain']:.2f}, by its accuracies {gain:.2f}")
                    log(f"{table.id} {row.name}: {row.notes['gain']}")


def _check_repetitions(cells: Cells, log: Callable[[str], None]) -> None:
    for (_, method, column), places in cells.items():
        homes: dict[float, list[str]] = defaultdict(list)
        for table, row in places:
            homes[row.values[column]].append(table.id)
        if len(homes) > 1:
            text = "the paper has " + " but ".join(f"{value:.2f} in {', '.join(ids)}" for value, ids in homes.items())
            for _, row in places:
                row.note(column, text)
            log(f"{method} {column}: {text}")


def _check_identical_rows(tables: list[Table], cells: Cells, log: Callable[[str], None]) -> None:
    rows = [(table, row) for table in tables for row in table.rows if row.method and len(row.values) >= len(IMAGENET)]
    for (table, row), (other_table, other) in combinations(rows, 2):
        whose, others = (_settings(table), row.method or ""), (_settings(other_table), other.method or "")
        if row.values == other.values and whose != others:
            log(f"{row.method} ({table.id}) and {other.method} ({other_table.id}) have the same numbers")
            _suspect(cells, *whose, list(row.values), f"the paper has the same numbers for {other.method}")
            _suspect(cells, *others, list(row.values), f"the paper has the same numbers for {row.method}")


def _suspect(cells: Cells, settings: Settings, method: str, columns: list[str], text: str) -> None:
    """Mark these numbers of a method, and the means made of them, wherever they stand."""
    for group, members in GROUPS.items():
        if group not in columns and set(columns) & set(members):
            columns = [*columns, group]
    for column in columns:
        for _, row in cells.get((settings, method, column), []):
            row.suspicious.append(column)
            row.note(column, text)


def as_json(tables: list[Table]) -> str:
    """One row a line, so that a change of one number is a change of one line."""
    blocks = []
    for table in tables:
        known = table.known
        head: dict[str, object] = {
            "id": table.id,
            "label": table.label,
            "caption": known.caption,
            "quantity": known.quantity,
        }
        head |= {"model": known.model, "coop": known.coop, "ensemble": known.ensemble, "columns": table.columns}
        rows = [{key: value for key, value in asdict(row).items() if value or key == "method"} for row in table.rows]
        opening = ",\n".join(f"   {_dump(key)}: {_dump(value)}" for key, value in head.items())
        lines = ",\n".join(f"    {_dump(row)}" for row in rows)
        blocks.append(f'  {{\n{opening},\n   "rows": [\n{lines}\n   ]\n  }}')
    return '{\n "tables": [\n' + ",\n".join(blocks) + "\n ]\n}\n"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paper", type=Path, help="the paper's LaTeX source")
    parser.add_argument("--out", type=Path, default=TARGET)
    options = parser.parse_args()
    tables = read(options.paper.read_text(encoding="utf-8"))
    add_deviations(tables)
    check(tables, print)
    options.out.write_text(as_json(tables), encoding="utf-8")
    numbers = sum(len(row.values) for table in tables for row in table.rows)
    print(f"{len(tables)} tables, {numbers} numbers: {options.out}")


if __name__ == "__main__":
    main()
