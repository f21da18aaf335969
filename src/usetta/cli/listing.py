"""Commands that list methods, models and datasets, and download models."""

from dataclasses import asdict
from typing import Annotated

import typer

from usetta.cli.app import (
    AsJson,
    Quiet,
    Verbose,
    clear_errors,
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
