"""What all commands share: the application, options, and how results, progress and errors are printed.

Answers go to standard output, one line per image as soon as it is known; everything else (which model, progress, bad
images) goes to standard error. Exit codes: 0 all well, 1 something failed, 2 wrong usage. Heavy imports happen inside
the commands, so that `--help` answers at once.
"""

import json
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from usetta import __version__

if TYPE_CHECKING:
    from usetta.adaptive import Views
    from usetta.models import Model

app = typer.Typer(
    name="usetta",
    help="Classify images better with CLIP-like models at test time, without labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ls_app = typer.Typer(help="List methods, models and datasets.", no_args_is_help=True)
models_app = typer.Typer(help="Fetch models.", no_args_is_help=True)
app.add_typer(ls_app, name="ls")
app.add_typer(models_app, name="models")
data_app = typer.Typer(help="Check and fetch datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
coop_app = typer.Typer(help="Learn prompts from a few labelled images (CoOp).", no_args_is_help=True)
app.add_typer(coop_app, name="coop")

Classes = Annotated[
    str, typer.Option("--classes", "-c", help="Class names: 'cat,dog,red fox', or @FILE with one name per line.")
]
Method = Annotated[
    str, typer.Option("--method", "-m", help="A name from `usetta ls methods`, also as tpt+se or use:steps=2.")
]
ModelName = Annotated[str, typer.Option("--model", help="A name from `usetta ls models`, a hub id or a weights file.")]
Precision = Annotated[
    str,
    typer.Option("--precision", help="Of the image encoder: auto, fp32, bf16, int8 (on a CPU) or fp16 (on a GPU)."),
]
Device = Annotated[str, typer.Option("--device", help="Where the model computes: auto, cpu, cuda or mps.")]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile the image encoder, which takes about a minute; not for int8.")
]
RewardModel = Annotated[
    str | None, typer.Option("--reward-model", help="Model that rewards, for rlcf; by default the model itself.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Folder that keeps features of views, so that they are encoded once.")
]
Limit = Annotated[int | None, typer.Option("--limit", help="Evaluate at most N images per dataset.", min=1)]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        "-t",
        help="Text with {} for the class name; several make an ensemble, and 'ensemble' is the paper's.",
    ),
]
ViewCount = Annotated[
    str, typer.Option("--views", help="Views per image, itself included; 'adaptive': up to 64, fewer if they agree.")
]
Seed = Annotated[int, typer.Option(help="Seed of the views.", min=0)]
AugMix = Annotated[bool, typer.Option("--augmix", help="AugMix on the strong views, as on fine-grained sets.")]
DataRoot = Annotated[Path, typer.Argument(help="Folder of the datasets.", envvar="USETTA_DATA")]
ContextFile = Annotated[
    Path | None, typer.Option("--context", help="A learned context: of `usetta coop train`, or a checkpoint of CoOp.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"usetta {__version__}")
        raise typer.Exit
    warnings.showwarning = partial(_show_warning, warnings.showwarning)


def _show_warning(plain: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """A warning about answers in one line, without the line of code that caused it; `plain` shows any other."""
    if category.__name__ == "AnswerWarning":  # by name: to import the class takes as long as to import torch
        warn(str(message))
    else:
        plain(message, category, *where)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Print what goes wrong in one line without a traceback: exit code 2 for wrong usage, 1 for the rest."""
    from usetta.data import DataError
    from usetta.images import ImageError
    from usetta.models import ModelError

    try:
        yield
    except BrokenPipeError:  # whoever read the answers has seen enough, which is no error
        raise
    except (DataError, ImageError, ModelError, OSError, ValueError, sqlite3.Error) as error:
        echo(f"usetta: {error}")
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def read_views(text: str, least: int = 1) -> "Views":
    """A number of views, or `adaptive`."""
    if text == "adaptive":
        return "adaptive"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--views is a number from 1 on, or 'adaptive', not {text!r}")
    return max(int(text), least)


def split(text: str) -> list[str]:
    """The parts of a list that is written with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_seeds(text: str) -> tuple[int, ...]:
    """Seeds that are written with commas."""
    parts = split(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"seeds are whole numbers from 0 on, such as 0,1,2, not {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


def echo(text: str) -> None:
    """One line to standard error; written so that it lands above a progress bar, which typer.echo does not."""
    sys.stderr.write(text + "\n")


def warn(text: str) -> None:
    """A warning that does not stop the command."""
    echo(f"usetta: warning: {text}")


def described(model: "Model") -> str:
    """A model with where and how it computes, which decides the last digits of its answers."""
    return f"{model.name} ({getattr(model, 'device', 'cpu')}, {getattr(model, 'precision', 'fp32')})"


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("yes" if v is True else "no" if v is False else str(v) for v in row.values()))
    Console().print(table)
