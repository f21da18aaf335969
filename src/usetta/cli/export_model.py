"""The command that writes a model for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import Classes, ModelName, Quiet, Templates, Verbose, app, clear_errors, counted, note, read_classes
from usetta.cli.engines import loader


@app.command("export-model")
def export_model(
    folder: Annotated[Path, typer.Argument(help="Folder to write.", metavar="FOLDER")],
    classes: Classes,
    model: ModelName = "auto",
    template: Templates = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Export a model for onnxruntime: the image encoder as ONNX, and the text features of the classes."""
    with clear_errors():
        names = read_classes(classes)
        from usetta.models.export import CONFIG_FILE, IMAGE_FILE, OPSET, TEXT_FILE
        from usetta.models.export import export_model as write
        from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts

        loaded = loader(model, precision="fp32", device="cpu")()
        features = ClassPrompts(loaded.text, names, template or DEFAULT_TEMPLATE).features()
        note(f"exporting {loaded.name}")
        write(loaded, names, features, folder)
    typer.echo(f"{folder / IMAGE_FILE}: the image encoder of {loaded.name}, ONNX opset {OPSET}, any number of images")
    typer.echo(f"{folder / TEXT_FILE}: features of {counted(len(names), 'text')}")
    typer.echo(f"{folder / CONFIG_FILE}: names, input size, logit scale")
