"""What all commands share: the application, options, and how results, progress and errors are printed.

Answers go to standard output, one line per image as soon as it is known; everything else (which model, progress, bad
images) goes to standard error. Errors and warnings are always printed, notes and progress unless `--quiet`, details
with `--verbose`. Exit codes: 0 all well, 1 something failed, 2 wrong usage. Heavy imports happen inside the commands,
so that `--help` answers at once.
"""

import json
import re
import sqlite3
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from usetta import __version__, progress

if TYPE_CHECKING:
    from usetta.adaptive import Views
    from usetta.models import Model

app = typer.Typer(
    name="usetta",
    help="Classify images better with CLIP-like models at test time, without labels.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ls_app = typer.Typer(help="List methods, models and datasets.", no_args_is_help=True)
models_app = typer.Typer(help="Download models.", no_args_is_help=True)
app.add_typer(ls_app, name="ls")
app.add_typer(models_app, name="models")
data_app = typer.Typer(help="Check and download datasets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
coop_app = typer.Typer(help="Learn prompts from a few labelled images (CoOp).", no_args_is_help=True)
app.add_typer(coop_app, name="coop")

Classes = Annotated[
    str, typer.Option("--classes", "-c", help="Class names: 'cat,dog,red fox', or @FILE with one name per line.")
]
Method = Annotated[
    str, typer.Option("--method", "-m", help="A method from `usetta ls methods`, or a variant: tpt+se, use:steps=2.")
]
ModelName = Annotated[
    str, typer.Option("--model", help="A model from `usetta ls models`, a Hugging Face id or a weights file.")
]
Precision = Annotated[
    str,
    typer.Option("--precision", help="Precision of the image encoder: auto, fp32, bf16, int8 (CPU) or fp16 (GPU)."),
]
Device = Annotated[str, typer.Option("--device", help="Where the model runs: auto, cpu, cuda or mps.")]
Compiled = Annotated[
    bool, typer.Option("--compile", help="Compile the image encoder (takes about a minute; not for int8).")
]
RewardModel = Annotated[
    str | None, typer.Option("--reward-model", help="Reward model for the method rlcf. Default: the model itself.")
]
Cache = Annotated[
    Path | None, typer.Option("--cache", help="Folder for image features, so that images are encoded only once.")
]
MaxPixels = Annotated[
    int | None, typer.Option("--max-pixels", help="Refuse larger images. Default: 100 million.", min=1)
]
Limit = Annotated[int | None, typer.Option("--limit", help="Evaluate at most N images per dataset.", min=1)]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        "-t",
        help="Prompt with {} for the class name. Repeat it for an ensemble; 'ensemble' is the paper's.",
    ),
]
ViewCount = Annotated[
    str,
    typer.Option(
        "--views", help="Views per image, or 'adaptive': up to 64, fewer where more would hardly change the answer."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the random views.", min=0)]
AugMix = Annotated[bool, typer.Option("--augmix", help="Apply AugMix to the views (the paper: fine-grained datasets).")]
DataRoot = Annotated[Path, typer.Argument(help="Folder that contains the datasets.", envvar="USETTA_DATA")]
ContextFile = Annotated[
    Path | None, typer.Option("--context", help="Learned prompt: from `usetta coop train`, or a CoOp checkpoint.")
]
Protocol = Annotated[
    str, typer.Option("--protocol", help="Class names: of the 'lists', or as the benchmark 'tta-vlm' has them.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class _Output:
    """How much is printed."""

    quiet = False
    verbose = False


def _set_quiet(value: bool) -> bool:
    _Output.quiet = value
    progress.be_quiet(value)
    return value


def _set_verbose(value: bool) -> bool:
    _Output.verbose = value
    return value


Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print results, warnings and errors only.", callback=_set_quiet)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print more: details, and tracebacks of errors.", callback=_set_verbose)
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    _set_quiet(False)  # for commands without the flag, which must not inherit it from an earlier call
    _set_verbose(False)
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
        if _Output.verbose:
            echo(traceback.format_exc().rstrip())
        hint = ": `usetta repair RUN` keeps what is intact" if "malformed" in str(error) else ""
        echo(f"usetta: {error}{hint}")
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def read_classes(classes: str) -> list[str]:
    """The names in the value of --classes."""
    if classes.startswith("@"):
        file = classes[1:]
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise ValueError(f"cannot read class names from {file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"cannot read class names from {file}: it is not UTF-8 text") from error
    else:
        lines = classes.split(",")
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError("no class names given: use --classes 'cat,dog' or --classes @FILE")
    return names


def read_views(text: str, least: int = 1) -> "Views":
    """A number of views, or `adaptive`, which may state what it may change."""
    from usetta.adaptive import accepted_changes
    from usetta.views import MAX_VIEWS

    if text.startswith("adaptive"):
        accepted_changes(text)
        return text
    if not text.isdecimal() or not 1 <= int(text) <= MAX_VIEWS:
        raise ValueError(f"--views must be a number from 1 to {MAX_VIEWS} or 'adaptive', not {text!r}")
    return max(int(text), least)


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 image` or `5 images`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def split(text: str) -> list[str]:
    """The parts of a list that is written with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """Seeds that are written with commas."""
    parts = split(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} must be whole numbers separated by commas, such as 0,1,2, not {text!r}")
    return tuple(dict.fromkeys(map(int, parts)))


def echo(text: str) -> None:
    """An error or a warning to standard error; written so that it lands above a progress bar, unlike typer.echo."""
    sys.stderr.write("\n".join(map(printable, text.split("\n"))) + "\n")


def warn(text: str) -> None:
    """A warning that does not stop the command."""
    echo(f"usetta: warning: {text}")


def note(text: str) -> None:
    """What is good to know, unless the user wants it quiet."""
    if not _Output.quiet:
        echo(text)


def is_quiet() -> bool:
    """Whether only results, warnings and errors are printed."""
    return _Output.quiet


def detail(text: str) -> None:
    """What only those want to know who ask for it."""
    if _Output.verbose:
        echo(text)


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text with what could move the cursor, break the line or reverse its direction written as an escape sequence."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
