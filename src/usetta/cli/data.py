"""Commands about the datasets on a disk: `data check`, `data fetch` and `data import`."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from usetta.cli.app import (
    AsJson,
    DataRoot,
    Quiet,
    Verbose,
    clear_errors,
    data_app,
    echo,
    note,
    print_rows,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from usetta.data import DataError, Fetched, PlannedFetch, Report

Unpacked = Annotated[
    bool, typer.Option("--unpack", help="Write a file for each image instead of reading Parquet files and tars.")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Downloads at the same time.", min=1)]


@data_app.command("check")
def data_check(
    root: DataRoot,
    only: Annotated[list[str] | None, typer.Option("--only", help="Check this dataset only; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which of the paper's datasets are present and complete, and what to do next."""
    from usetta.data import check

    with clear_errors():
        reports = check(root, only or ())
    print_rows(
        [
            asdict(report)
            if as_json
            else {
                "name": report.name,
                "state": report.state,
                "images": f"{report.images:,} of {report.expected:,}",
                "where": report.where or "-",
                "next": report.todo if report.state in ("complete", "absent") else f"{report.problem}. {report.todo}",
            }
            for report in reports
        ],
        as_json,
    )
    if only and any(report.state != "complete" for report in reports):
        raise typer.Exit(1)


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="Datasets from `usetta ls datasets`, such as 'dtd,pets', or 'all'.")],
    root: DataRoot,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be fetched, and stop.")] = False,
    unpacked: Unpacked = False,
    jobs: Jobs = 4,
    keep_archive: Annotated[bool, typer.Option("--keep-archive", help="Keep the downloaded archive.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Download datasets with their lists, from the first source that works. Rerun the same command to resume.

    What cannot be downloaded is printed as steps to take by hand; the exit code is 1 until all is complete. A token for
    gated datasets is taken from HF_TOKEN, or from `hf auth login`.
    """
    from usetta.data import plan_fetch

    with clear_errors():
        plan = plan_fetch([] if name == "all" else split(name), root, unpacked=unpacked)
        if dry_run or not quiet:
            print_plan(plan, root, to_stdout=dry_run)
        if dry_run:
            return
        results = fetch_planned(plan, root, unpacked=unpacked, jobs=jobs, keep_archive=keep_archive)
    if not print_fetched(results):
        raise typer.Exit(1)


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="A dataset from `usetta ls datasets`.")],
    sources: Annotated[
        list[Path], typer.Argument(help="Folders of images, Parquet files or WebDataset tars.", metavar="SOURCE...")
    ],
    root: Annotated[Path, typer.Option("--data", help="Folder that contains the datasets.", envvar="USETTA_DATA")],
    unpacked: Unpacked = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Use images that you already have in another layout. They stay where they are; ids and names are the list's."""
    from usetta.data import import_dataset

    with clear_errors():
        report = import_dataset(name, sources, root, note, unpacked=unpacked)
    _print_state(report)
    if report.state != "complete":
        echo(f"usetta: {report.problem}")
        raise typer.Exit(1)


def print_plan(plan: "Sequence[PlannedFetch]", root: Path, *, to_stdout: bool = False) -> None:
    """Print a plan of downloads: what, from where, under which licence, and what it takes altogether."""
    import shutil

    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=not to_stdout)
    table = Table(box=None, pad_edge=False)
    for column in ("name", "now", "GB"):
        table.add_column(column, no_wrap=True, justify="right" if column == "GB" else "left")
    # Names of mirrors stay whole, also on a narrow terminal.
    table.add_column("from", overflow="fold", width=34 if console.width < 120 else None)
    table.add_column("licence", overflow="fold")
    for step in plan:
        sources = "\nor ".join(step.sources) or ("by hand" if step.state == "absent" else "-")
        size = f"{step.bytes / 1e9:.2f}" if step.sources else "-"
        listed = "\nlist: GitHub" if step.list_file else ""
        table.add_row(step.name, step.state, size, sources + listed, step.licence)
    console.print(table)
    existing = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    total, space = sum(step.bytes for step in plan), sum(step.space for step in plan)
    free = shutil.disk_usage(existing).free
    summary = (
        f"{total / 1e9:.1f} GB to download, {space / 1e9:.1f} GB of space while it works, {free / 1e9:.1f} GB are free"
    )
    (typer.echo if to_stdout else note)(summary)


def fetch_planned(
    plan: "Sequence[PlannedFetch]", root: Path, *, unpacked: bool = False, jobs: int = 4, keep_archive: bool = False
) -> "dict[str, Fetched | DataError]":
    """Fetch what is planned, behind a progress bar; Ctrl-C ends it at once, and the next call resumes."""
    from usetta.data import fetch_all

    try:
        return fetch_all(plan, root, note, keep_archive=keep_archive, unpacked=unpacked, jobs=jobs)
    except KeyboardInterrupt:
        echo("usetta: stopped; rerun the same command to resume")
        sys.stderr.flush()
        os._exit(130)  # threads that download would be waited for


def print_fetched(results: "dict[str, Fetched | DataError]") -> bool:
    """Print what became of each dataset, and the steps to take by hand; whether all are complete."""
    from usetta.data import DataError

    complete = True
    for name, result in results.items():
        if isinstance(result, DataError):
            complete = False
            echo(f"usetta: {name}: {result}" if len(results) > 1 else f"usetta: {result}")
            continue
        _print_state(result.report)
        for number, step in enumerate(result.by_hand, 1):
            typer.echo(f"{number}. {step}")
        if result.report.state != "complete":
            complete = False
            if not result.by_hand:
                typer.echo(result.report.todo)
    return complete


def _print_state(report: "Report") -> None:
    typer.echo(f"{report.name}: {report.state}" + (f" in {report.where}" if report.where else ""))
