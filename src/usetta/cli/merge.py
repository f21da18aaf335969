"""The command that puts the shards of a run together."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import app, clear_errors, say


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Merge the shards that are there, even if some are not.")
    ] = False,
) -> None:
    """Put together a run whose work was shared out with --rank and --world-size. Can be repeated at any time."""
    from usetta.evaluate.merge import merge_shards

    with clear_errors():
        done = merge_shards(run, say, allow_missing=allow_missing)
    if done.missing:
        say(f"usetta: without the missing shards {', '.join(done.missing)}")
    if done.failed:
        say(f"usetta: {done.failed} images could not be read and are left out")
    typer.echo(f"{done.shards} shards, {done.new_rows} new rows: {run}")
