"""The command that writes the report of a run."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import app, clear_errors, say


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: report.html in RUN.")] = None,
    baseline: Annotated[str, typer.Option(help="Method that the others are compared with.")] = "clip",
    shown: Annotated[
        int, typer.Option(help="How many images to show that became right, and as many that became wrong.", min=0)
    ] = 12,
) -> None:
    """Write a run as one HTML file: tables, figures, and the images whose answers changed the most."""
    from usetta.evaluate.store import Store
    from usetta.report.run import write_report

    with clear_errors(), Store(run, create=False) as store:
        path = write_report(store, out or run / "report.html", baseline=baseline, shown=shown, log=say)
    typer.echo(f"report: {path}")
