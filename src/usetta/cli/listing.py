"""Commands that list, check and fetch: methods, models and datasets."""

from dataclasses import asdict
from typing import Annotated

import typer

from usetta.cli.app import (
    AsJson,
    DataRoot,
    Quiet,
    Verbose,
    clear_errors,
    data_app,
    ls_app,
    models_app,
    note,
    print_rows,
)


@ls_app.command("methods")
def ls_methods(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """List the methods.

    NAME+READOUT combines a method with another readout (tpt+se); NAME:SETTING=VALUE changes its settings
    (use:steps=4:gamma=0.2).
    """
    from usetta import methods
    from usetta.methods.recipe import READOUTS

    def described(names: list[str]) -> list[dict[str, str]]:
        return [{"name": name, "description": methods.get(name).description} for name in names]

    streams = described(methods.stream_names())
    print_rows(described(methods.names()) + (streams if as_json else []), as_json)
    if not as_json:
        note("for streams, which learn from earlier images:")
        print_rows(streams, as_json)
        note("with another readout, such as tpt+se; readouts:")
        note(f"  {', '.join(READOUTS)}")
        note("with other settings, such as use:steps=4:gamma=0.2")


@ls_app.command("models")
def ls_models(as_json: AsJson = False) -> None:
    """List the models and whether their weights are on this machine."""
    from usetta.models import list_models

    print_rows([asdict(row) for row in list_models()], as_json)


@ls_app.command("datasets")
def ls_datasets(as_json: AsJson = False) -> None:
    """List the datasets that have a name."""
    from usetta.data import list_datasets

    columns = ("name", "title", "family", "images", "classes")
    print_rows([{column: getattr(dataset, column) for column in columns} for dataset in list_datasets()], as_json)


@models_app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(help="A model from `usetta ls models`.")],
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Download the weights of a model, so that it works offline afterwards."""
    from usetta.models import pull_model

    with clear_errors():
        where = pull_model(name, note)
    typer.echo(f"{name}: ready in {where}")


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
    name: Annotated[str, typer.Argument(help="A dataset from `usetta ls datasets`.")],
    root: DataRoot,
    keep_archive: Annotated[bool, typer.Option("--keep-archive", help="Keep the downloaded archive.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Download a dataset, or print the steps to take by hand. The exit code is 1 until it is complete."""
    from usetta.data import fetch

    with clear_errors():
        fetched = fetch(name, root, note, keep_archive=keep_archive)
    report = fetched.report
    typer.echo(f"{report.name}: {report.state}" + (f" in {report.where}" if report.where else ""))
    for number, step in enumerate(fetched.by_hand, 1):
        typer.echo(f"{number}. {step}")
    if report.state != "complete":
        if not fetched.by_hand:
            typer.echo(report.todo)
        raise typer.Exit(1)
