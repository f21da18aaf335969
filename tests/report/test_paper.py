import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from usetta import methods
from usetta.evaluate.metrics import FINE_GRAINED, GROUPS, IMAGENET, group_means
from usetta.report import paper

DATASETS = (*IMAGENET, *FINE_GRAINED)
VIT = "ViT-B-16"


def test_tables_have_the_numbers_of_the_compiled_paper() -> None:
    ids = [table.id for table in paper.tables()]
    assert ids == [*(f"table-{i}" for i in range(1, 25) if i != 14), "text"]  # table 14 lists templates
    assert [paper.table(f"table-{i}").label for i in (1, 6, 10, 11, 16, 24)] == [
        "tb:I_vit",
        "tb:ablation",
        "tb:computation",
        "tb:sp_dts",
        "tb:sup_error_I_rn",
        "tb:sup_plug_fg",
    ]


@pytest.mark.parametrize(
    ("table", "method", "column", "model", "value", "std"),
    [
        ("table-1", "ttl", "imagenet-a", VIT, 58.84, 0.16),
        ("table-2", "rlcf", "caltech101", VIT, 94.56, 0.12),
        ("table-3", "sts", "imagenet-v2", "RN50", 53.88, 0.28),
        ("table-4", "mta", "pets", "RN50", 84.79, 0.14),
        ("table-5", "clip", "avg", VIT, 62.73, None),
        ("table-6", "tpt+uniform", "fgvc", VIT, 64.03, None),
        ("table-7", "c-tpt+se", "in&o", VIT, 64.27, None),
        ("table-8", "se:rescaling=root", "in&o", VIT, 63.38, None),
        ("table-9", "tps", "avg", VIT, 65.26, None),
        ("table-10", "rlcf", "seconds", VIT, 2.697, None),
        ("table-18", "zero", "dtd", "RN50", 0.68, None),
        ("table-19", "rlcf", "imagenet", VIT, 72.43, None),
        ("table-22", "rce+uniform", "eurosat", VIT, 40.19, None),
        ("table-23", "r-tpt+se", "imagenet-a", VIT, 62.01, None),
        ("text", "use:gamma=1.0", "avg", VIT, 64.64, None),
        ("text", "use:beta=1.0", "avg", VIT, 63.15, None),
    ],
)
def test_numbers_read_from_the_paper_by_eye(
    table: str, method: str, column: str, model: str, value: float, std: float | None
) -> None:
    result = paper.number(table, method, column, model)
    assert (result.value, result.std, result.table) == (value, std, table)


def test_sizes_of_the_datasets() -> None:
    sizes = {row.name: row.values for row in paper.table("table-11").rows}
    assert tuple(sizes) == DATASETS
    assert sizes["imagenet-sketch"] == {"classes": 1000, "images": 50889}
    assert sum(values["images"] for values in sizes.values()) == 232_085


def test_find_takes_the_first_table_that_reports_an_accuracy() -> None:
    def value(*args: str, **settings: bool) -> tuple[float, str] | None:
        result = paper.find(*args, **settings)  # type: ignore[arg-type]
        return result and (result.value, result.table)

    assert value("tpt", "ucf101") == (68.38, "table-2")
    assert value("tpt", "ucf101", "RN50") == (60.59, "table-4")
    assert value("se", "avg") == (64.34, "table-6")
    assert value("se", "avg", coop=True) == (65.45, "table-5")
    assert value("se", "dtd", coop=True) == (40.78, "table-20")
    assert value("se", "avg", ensemble=True) == (65.61, "table-9")
    assert value("ttl", "dtd", "RN50") is None
    assert value("se", "seconds") is None
    assert value("se", "dtd", coop=True, ensemble=True) is None


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"no numbers in 'table1'; did you mean 'table-1'\?"):
        paper.table("table1")
    with pytest.raises(ValueError, match="table-1 is about ViT-B-16, not RN50"):
        paper.number("table-1", "se", "imagenet", "RN50")
    with pytest.raises(ValueError, match=r"no column 'imagenet-sketches'; did you mean 'imagenet-sketch'\?"):
        paper.number("table-1", "se", "imagenet-sketches", VIT)
    with pytest.raises(ValueError, match=r"no imagenet of method 'uses'; did you mean 'use'\?"):
        paper.number("table-1", "uses", "imagenet", VIT)
    with pytest.raises(ValueError, match="no gain of method 'clip'"):
        paper.number("table-10", "clip", "gain", VIT)


def test_methods_are_written_as_in_our_grammar() -> None:
    written = {row.method for table in paper.tables() for row in table.rows if row.method}
    assert {methods.get(name).name for name in written} == written
    assert len(written) == 25


def test_columns_are_datasets_and_their_means() -> None:
    for table in paper.tables():
        assert all(set(row.values) <= set(table.columns) for row in table.rows)
        if table.quantity in ("accuracy", "std"):
            assert set(table.columns) <= {*DATASETS, *GROUPS}
            assert all(set(row.values) == set(table.columns) for row in table.rows)
            assert all(
                0 < value < 100 or table.quantity == "std" for row in table.rows for value in row.values.values()
            )


@pytest.mark.parametrize(
    ("model", "coop"), [(VIT, False), ("RN50", False), (VIT, True)], ids=["ViT-B-16", "RN50", "CoOp"]
)
def test_means_are_those_of_the_datasets_up_to_rounding(model: str, coop: bool) -> None:
    checked = 0
    for method in {row.method for table in paper.tables() for row in table.rows if row.method}:
        numbers = {name: paper.find(method, name, model, coop=coop) for name in (*DATASETS, *GROUPS)}
        values = {name: number.value for name, number in numbers.items() if number and name in DATASETS}
        for group, mean in group_means(values).items():
            if mean is not None and (given := numbers[group]) is not None:
                checked += 1
                assert given.value == pytest.approx(mean, abs=0.0101), (method, group)
    assert checked >= 33


def test_standard_deviations_stand_beside_their_accuracies() -> None:
    pairs = {"table-1": "table-15", "table-3": "table-16", "table-2": "table-17", "table-4": "table-18"}
    for accuracies, deviations in pairs.items():
        spread = {row.method: row.values for row in paper.table(deviations).rows}
        for row in paper.table(accuracies).rows:
            assert row.std == spread.get(row.method, {})
        assert "clip" not in spread  # it has no randomness


def test_only_the_rows_that_are_probably_copied_are_suspicious() -> None:
    result = {
        (table.id, row.method): row.suspicious for table in paper.tables() for row in table.rows if row.suspicious
    }
    assert result == {
        ("table-21", "uniform"): IMAGENET,
        ("table-21", "rce+uniform"): IMAGENET,
        ("table-6", "uniform"): ("in&o", "avg"),
        ("table-6", "rce+uniform"): ("in&o", "avg"),
    }
    uniform = paper.find("uniform", "imagenet")
    assert uniform is not None
    assert uniform.suspicious
    assert uniform.note == "the paper has the same numbers for rce+uniform"


def test_contradictions_between_tables_are_noted_on_both_sides() -> None:
    text = "the paper has 68.38 in table-2, table-13, table-22 but 68.39 in table-24"
    assert [paper.number(f"table-{i}", "tpt", "ucf101", VIT).note for i in (2, 13, 22, 24)] == [text] * 4
    assert paper.number("table-2", "tpt", "cars", VIT).note is None
    noted = {
        (row.method, column)
        for table in paper.tables()
        for row in table.rows
        for column in row.notes
        if column not in row.suspicious
    }
    assert len(noted) == 7


def test_the_numbers_need_neither_torch_nor_numpy() -> None:
    code = "import sys; from usetta.report import paper; paper.tables(); print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"set()"


@pytest.fixture(scope="module")
def extractor() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "paper_tables.py"
    if not path.is_file():
        pytest.skip("the extractor is part of the repository only")
    spec = importlib.util.spec_from_file_location("paper_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_tables"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PROSE = (
    r"($\gamma=1$), \texttt{USE} still achieves an average accuracy of 60.5\%,"
    "\n"
    r"standard baseline of 60\% ($\beta=1$)"
)
SMALL = r"""
\begin{table*}[t] % \caption{not this one}
\caption{Templates}
\begin{tabular}{c} \toprule Text Templates\\ \midrule ``a \{ \}." \\ \bottomrule \end{tabular}
\end{table*}
\begin{table}
\caption{Accuracy (\%) on the ViT-B/16 backbone}
\label{tb:ablation}
\begin{tabular}{cccccc}
\toprule
Optim. & Inference & IN\&O & FGVC & Avg. \\
\midrule
- & standard & 60.00 & 70.00 & 65.00\\
\rowcolor{gray!10} \text{MEM} & \texttt{\textbf{SE}} &\textbf{ 61.00 }& \textbf{71.00}& 66.50 \\
\bottomrule
\end{tabular}
\end{table}
\begin{table}
\caption{On the ViT-B/16 backbone}
\label{tb:plug}
\begin{tabular}{lccc}
\toprule
Method & IN\&O & FGVC & Avg. \\
\midrule
TPT~\cite{shu2022test} & 60.00 & 71.00 & 65.50 \\
\rowcolor{gray!10} + \texttt{\textbf{SE}} & 61.01 & 71.00 & 66.00\\
% + \texttt{SE} & 1 & 2 & 3 \\
\bottomrule
\end{tabular}
\end{table}
"""


def test_the_extractor_reads_latex_and_notes_what_does_not_fit(extractor: ModuleType) -> None:
    tables = extractor.read(SMALL + PROSE)
    assert [table.id for table in tables] == ["table-2", "table-3", "text"]
    ablation, plug, text = tables
    assert [(row.method, row.values) for row in ablation.rows] == [
        ("clip", {"in&o": 60.0, "fgvc": 70.0, "avg": 65.0}),
        ("tpt+se", {"in&o": 61.0, "fgvc": 71.0, "avg": 66.5}),
    ]
    assert [row.method for row in plug.rows] == ["tpt", "tpt+se"]
    assert [(row.method, row.values) for row in text.rows] == [
        ("use:gamma=1.0", {"avg": 60.5}),
        ("use:beta=1.0", {"avg": 60.0}),
    ]
    said: list[str] = []
    extractor.check(tables, said.append)
    assert said == [
        "table-2 tpt+se avg: the paper's mean is 66.50, that of its parts 66.00",
        "4 means checked",
        "tpt+se in&o: the paper has 61.00 in table-2 but 61.01 in table-3",
        "tpt+se avg: the paper has 66.50 in table-2 but 66.00 in table-3",
    ]
    assert ablation.rows[1].notes["avg"] == (
        "the paper's mean is 66.50, that of its parts 66.00; the paper has 66.50 in table-2 but 66.00 in table-3"
    )


def test_the_extractor_refuses_what_it_does_not_know(extractor: ModuleType) -> None:
    with pytest.raises(ValueError, match="table 2 has the unknown label 'tb:new'"):
        extractor.read(SMALL.replace("tb:ablation", "tb:new") + PROSE)
    with pytest.raises(ValueError, match="unknown column 'CUB200'"):
        extractor.read(SMALL.replace("FGVC", "CUB200") + PROSE)
    with pytest.raises(ValueError, match="table 'tb:ablation' names RN50, KNOWN says ViT-B-16"):
        extractor.read(SMALL.replace("ViT-B/16", "ResNet50", 1) + PROSE)
    with pytest.raises(ValueError, match="γ = 1 and β = 1 is not there"):
        extractor.read(SMALL)


def test_the_data_file_is_what_the_extractor_makes_of_the_paper(
    extractor: ModuleType, reference_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source,) = (reference_files / "paper").glob("*.txt")
    tables = extractor.read(source.read_text(encoding="utf-8"))
    extractor.add_deviations(tables)
    extractor.check(tables, print)
    assert "181 means checked" in capsys.readouterr().out
    assert extractor.as_json(tables) == extractor.TARGET.read_text(encoding="utf-8")
