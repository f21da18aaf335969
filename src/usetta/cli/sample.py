"""The command that writes sample images, so that every other command can be tried at once."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import app, clear_errors

_IMAGES = {"cat.jpg": "tabby cat", "coffee.jpg": "espresso", "rocket.jpg": "space rocket"}
"""Images that come with the package, and what each shows."""


@app.command()
def sample(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", metavar="FOLDER")] = Path("sample"),
) -> None:
    """Write three sample images, their class names and a list with labels, to try the other commands on."""
    home = files("usetta") / "serve" / "page" / "examples"
    contents = {name: (home / name).read_bytes() for name in _IMAGES}
    labels = "".join(f"{label}\n" for label in _IMAGES.values())
    rows = "".join(f"{name},{label}\n" for name, label in _IMAGES.items())
    contents |= {"classes.txt": labels.encode(), "manifest.csv": f"path,label\n{rows}".encode()}
    with clear_errors():
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            path = folder / name
            if path.exists() and path.read_bytes() != content:
                raise ValueError(f"{path} already exists; choose another folder")
            path.write_bytes(content)
    typer.echo(f"{folder}: {', '.join(contents)}")
