"""The command that makes adversarial images."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import Device, Limit, ModelName, Quiet, Templates, Verbose, app, clear_errors, counted, echo, note


@app.command()
def attack(
    dataset: Annotated[str, typer.Argument(help="Name, folder or list of images of a dataset.", metavar="DATASET")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write. Rerun the same command to resume.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of one or several datasets.", envvar="USETTA_DATA")
    ] = None,
    epsilon: Annotated[
        int, typer.Option(help="Grey levels, of 255, that a pixel may change by: 1 or 4 are usual.", min=1, max=255)
    ] = 1,
    steps: Annotated[int, typer.Option(help="Steps of projected gradients.", min=1)] = 7,
    seed: Annotated[int, typer.Option(help="Seed of the random start.", min=0)] = 0,
    model: ModelName = "auto",
    device: Device = "auto",
    template: Templates = None,
    limit: Limit = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Attack the images of a dataset (PGD) and write them as a dataset of their own, to evaluate methods on.

    The attack is on zero-shot CLIP, through the image tower.
    """
    from usetta.data import load_datasets
    from usetta.evaluate.attack import AttackSettings
    from usetta.evaluate.attack import attack as run
    from usetta.models import load_model
    from usetta.prompts import DEFAULT_TEMPLATE

    with clear_errors():
        (chosen,) = load_datasets([dataset], data)
        loaded = load_model(model, device=device, precision="fp32")
        settings = AttackSettings(epsilon, steps, seed)
        done = run(loaded, chosen, out, settings, limit=limit, templates=template or [DEFAULT_TEMPLATE], log=note)
    typer.echo(f"{counted(done.images, 'image')}: zero-shot accuracy {done.before:.1f} % -> {done.after:.1f} %")
    typer.echo(f"evaluate methods on them: usetta eval -d {out} -o RUN")
    if done.failed:
        echo(f"usetta: {counted(len(done.failed), 'image')} could not be read: left out")
        raise typer.Exit(1)
