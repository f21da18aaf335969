"""Commands about the results of runs: tables, rows for other programs, reports, and the paper's tables and figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from usetta.cli.app import (
    Quiet,
    Verbose,
    app,
    clear_errors,
    counted,
    note,
)

if TYPE_CHECKING:
    from usetta.report.tables import Table

Run = Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")]
Format = Annotated[str, typer.Option("--format", "-f", help="terminal, markdown, latex, csv or json.")]


@app.command()
def table(
    run: Run,
    shape: Format = "terminal",
    metric: Annotated[
        str | None,
        typer.Option(
            help="top1 (the default), top5, ece, ece20, aece, aurc, nll, brier, skip_ratio, seconds_per_image."
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Show all metrics on this dataset.")] = None,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics", help="Show calibration, selective accuracy, out-of-distribution detection and stability."
        ),
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(help="Show differences from this method, with confidence intervals: in accuracy, or --metrics."),
    ] = None,
    no_paper: Annotated[bool, typer.Option("--no-paper", help="Leave out the paper's numbers.")] = False,
) -> None:
    """Show the results of a run as a table."""
    from usetta.evaluate.store import Store
    from usetta.report.results import accuracy_table, differences_table, metrics_table
    from usetta.report.trust import trust_table

    with clear_errors():
        check_format(shape)
        if sum(option is not None for option in (metric, dataset, baseline)) > 1:
            raise ValueError("choose one of --metric, --dataset and --baseline")
        with Store(run, create=False) as store:
            if metrics:
                if metric is not None or dataset is not None:
                    raise ValueError("--metrics shows all metrics on all datasets: leave out --metric and --dataset")
                shown = trust_table(store, baseline)
            elif dataset is not None:
                shown = metrics_table(store, dataset)
            elif baseline is not None:
                shown = differences_table(store, baseline)
            else:
                shown = accuracy_table(store, metric=metric or "top1", paper=not no_paper)
        print_table(shown, shape)


@app.command()
def export(
    run: Run,
    file: Annotated[Path, typer.Argument(help="File to write: .parquet, .csv, .json or .jsonl.", metavar="FILE")],
) -> None:
    """Export a run to a file with one row for each image, seed and method."""
    from usetta.evaluate.export import export as write
    from usetta.evaluate.store import Store

    with clear_errors(), Store(run, create=False) as store:
        count = write(store, file)
    typer.echo(f"{count} rows: {file}")


@app.command()
def repair(run: Run) -> None:
    """Save every intact row of a run whose database is damaged; the same `usetta eval` computes the rest."""
    from usetta.evaluate.repair import repair as save_intact

    with clear_errors():
        done = save_intact(run)
    wrong = f", {done.wrong} that are no answers were left out" if done.wrong else ""
    typer.echo(f"{done.rows} rows kept{wrong}; the old database is {done.old}")


@app.command()
def calibrate(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("calibration.json"),
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="Method of the run. Default: the only one that it has.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", "-d", help="Use only this dataset of the run. Default: all.")
    ] = None,
    accuracy: Annotated[
        float, typer.Option(help="Share of the answers that are kept that must be right.", min=0, max=1)
    ] = 0.9,
) -> None:
    """Fit when to trust an answer: a temperature, and a threshold below which answers are rejected.

    The run is one of `usetta eval`, whose labels are known. `usetta classify --calibration FILE` uses what is written.
    """
    from usetta.evaluate.calibrate import calibrate as fit
    from usetta.evaluate.store import Store

    with clear_errors():
        with Store(run, create=False) as store:
            fitted = fit(store, method, dataset, accuracy)
        fitted.calibration.save(out)
    known = fitted.calibration
    typer.echo(f"{known.method} by {known.model}, {counted(known.images, 'answer')}")
    typer.echo(
        f"temperature {known.temperature:.3f}: calibration error {fitted.ece_before:.1f} -> {fitted.ece_after:.1f}"
    )
    typer.echo(
        f"threshold {known.reject_below:.3f}: {known.kept:.1%} of the answers are kept, and {known.accuracy:.1%} of "
        f"these are right; of all, {fitted.accuracy_of_all:.1%}"
    )
    typer.echo(f"written: {out}")


@app.command()
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: RUN/report.html.")] = None,
    baseline: Annotated[str, typer.Option(help="Method to compare the others with.")] = "clip",
    shown: Annotated[
        int, typer.Option(help="How many corrected images to show, and how many spoiled ones.", min=0)
    ] = 12,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a report of a run in one HTML file: tables, figures, and the images whose answers changed most."""
    from usetta.evaluate.store import Store
    from usetta.report.run import write_report

    with clear_errors(), Store(run, create=False) as store:
        path = write_report(store, out or run / "report.html", baseline=baseline, shown=shown, log=note)
    typer.echo(f"report: {path}")


def check_format(shape: str) -> None:
    from usetta.report.tables import FORMATS

    known = ("terminal", *FORMATS)
    if shape not in known:
        raise ValueError(f"unknown format {shape!r}; known: {', '.join(known)}")


def print_table(table: "Table", shape: str) -> None:
    from usetta.report.tables import FORMATS, terminal

    if shape == "terminal":
        from rich.console import Console

        Console().print(terminal(table))
    else:
        typer.echo(FORMATS[shape](table), nl=False)
