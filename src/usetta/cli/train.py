"""Commands that learn."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import Device, ModelName, Quiet, Verbose, clear_errors, coop_app, note


@coop_app.command("train")
def coop_train(
    folder: Annotated[Path, typer.Argument(help="Folder with a folder of images for each class.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write. Rerun the same command to resume.")],
    model: ModelName = "auto",
    device: Device = "auto",
    template: Annotated[
        str,
        typer.Option("--template", "-t", help="Prompt with {} for the class name; the words before {} are learned."),
    ] = "a photo of a {}.",
    shots: Annotated[int, typer.Option(help="Images per class.", min=1)] = 16,
    epochs: Annotated[int, typer.Option(help="Number of epochs.", min=1)] = 50,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.002,
    batch_size: Annotated[int, typer.Option(help="Images per training step.", min=1)] = 32,
    views: Annotated[int, typer.Option(help="Views per image: the image and random crops.", min=1)] = 9,
    init: Annotated[str, typer.Option(help="Initial context: 'random', or the 'words' of the template.")] = "random",
    seed: Annotated[int, typer.Option(help="Seed of images, views and batches.", min=0)] = 0,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Learn a prompt from a few labelled images (CoOp). Rerun the same command to resume."""
    from usetta.coop import CoOpRecipe, train_context
    from usetta.coop.context import LOSSES, read_context_file
    from usetta.data import load_dataset
    from usetta.feature_cache import FeatureCache
    from usetta.files import cache_dir
    from usetta.models import load_model

    with clear_errors():
        recipe = CoOpRecipe(
            shots=shots,
            epochs=epochs,
            lr=lr,
            batch_size=batch_size,
            views=views,
            seed=seed,
            template=template,
            init=init,
        )
        shown = load_dataset(folder.expanduser().absolute())
        if shown.labels is None:
            raise ValueError(f"the images of {folder} have no labels to learn from")
        loaded = load_model(model, device=device, precision="fp32")
        note(f"model: {loaded.name}, up to {shots} images of each of {len(shown.classes)} classes")
        paths = [item.path for item in shown]
        with FeatureCache(cache_dir() / "coop" / "features") as cache:
            train_context(loaded, paths, shown.labels, shown.classes, recipe, out=out, log=note, cache=cache)
        losses = read_context_file(out)[0][LOSSES].tolist()
    note(f"loss: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    typer.echo(f"context: {out}")
