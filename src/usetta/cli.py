"""The command line: one plain typed function per command.

Answers go to standard output, one line per picture as soon as it is known; everything else (which model, progress, bad
pictures) goes to standard error. Exit codes: 0 all well, 1 something failed, 2 wrong usage. Heavy imports happen inside
the commands, so that `--help` answers at once.
"""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from usetta import __version__
from usetta.progress import track

if TYPE_CHECKING:
    from usetta.classifier import Classifier, Prediction

app = typer.Typer(
    name="usetta",
    help="Classify images better with CLIP-like models at test time, without labels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ls_app = typer.Typer(help="List what there is.", no_args_is_help=True)
models_app = typer.Typer(help="Fetch models.", no_args_is_help=True)
app.add_typer(ls_app, name="ls")
app.add_typer(models_app, name="models")
data_app = typer.Typer(help="Check and fetch data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
coop_app = typer.Typer(help="Learn prompts from a few labelled pictures (CoOp).", no_args_is_help=True)
app.add_typer(coop_app, name="coop")

Classes = Annotated[
    str, typer.Option("--classes", "-c", help="Class names: 'cat,dog,red fox', or @FILE with one name per line.")
]
Method = Annotated[
    str, typer.Option("--method", "-m", help="A name from `usetta ls methods`, also as tpt+se or use:steps=2.")
]
ModelName = Annotated[str, typer.Option("--model", help="A name from `usetta ls models`, a hub id or a weights file.")]
Templates = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        "-t",
        help="Text with {} for the class name; several make an ensemble, and 'ensemble' is the paper's.",
    ),
]
Views = Annotated[int, typer.Option(help="Views per picture, the picture itself included.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of the views.", min=0)]
AugMix = Annotated[bool, typer.Option("--augmix", help="AugMix on the strong views, as on fine-grained sets.")]
DataRoot = Annotated[Path, typer.Argument(help="Folder of the data sets.", envvar="USETTA_DATA")]
ContextFile = Annotated[
    Path | None, typer.Option("--context", help="A learned context: of `usetta coop train`, or a checkpoint of CoOp.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"usetta {__version__}")
        raise typer.Exit


@app.command()
def classify(
    paths: Annotated[list[Path], typer.Argument(help="Pictures, or folders of pictures.", metavar="PATH")],
    classes: Classes,
    method: Method = "se",
    model: ModelName = "auto",
    template: Templates = None,
    context: ContextFile = None,
    views: Views = 64,
    seed: Seed = 0,
    augmix: AugMix = False,
    top: Annotated[int, typer.Option(help="How many classes to name per picture in JSON.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header.")] = False,
) -> None:
    """Classify pictures. A bad picture is reported and skipped; the exit code is then 1."""
    from usetta.images import ImageError, find_images

    if as_json and as_csv:
        raise typer.BadParameter("choose one of --json and --csv")
    with _clear_errors():
        try:
            pictures = find_images(paths)
        except ImageError as error:
            raise ValueError(str(error)) from error
        classifier = _classifier(classes, method, model, template, context, views, seed, augmix)
    write = _json_writer(top) if as_json else _csv_writer() if as_csv else _text_writer(pictures)
    failed = 0
    with _clear_errors():
        answers = track(classifier.stream(pictures), len(pictures), "Classifying")
        for picture, outcome in zip(pictures, answers, strict=True):
            write(picture, outcome)
            if isinstance(outcome, ImageError):
                failed += 1
                _say(f"usetta: {outcome}")
    if failed:
        _say(f"usetta: {failed} of {len(pictures)} pictures could not be read")
        raise typer.Exit(1)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="A picture.")],
    classes: Classes,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Figure to write (.png, .svg, .pdf).")] = None,
    method: Method = "se",
    model: ModelName = "auto",
    template: Templates = None,
    context: ContextFile = None,
    views: Views = 64,
    seed: Seed = 0,
    augmix: AugMix = False,
    shown: Annotated[int, typer.Option(help="How many strong views the figure shows.", min=1)] = 24,
    as_json: AsJson = False,
) -> None:
    """Show why a picture got its answer: its views by certainty, the chosen ones, zero-shot against the method."""
    from usetta.images import open_image

    target = out or path.with_name(f"{path.stem}-explained.png")
    with _clear_errors():
        image = open_image(path)  # first, so that a bad picture is told before a model is loaded
        if target.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg", ".jpeg"):
            raise ValueError(f"cannot write a figure as {target.name!r}: use .png, .svg, .pdf or .jpg")
        if not target.parent.is_dir():
            raise ValueError(f"no folder {str(target.parent)!r} to write the figure to")
        classifier = _classifier(classes, method, model, template, context, max(views, 2), seed, augmix)
        explanation = classifier.explain(image)
        explanation.save(target, shown)
    if as_json:
        typer.echo(json.dumps({**explanation.prediction.as_dict(), "source": str(path), "figure": str(target)}))
    else:
        typer.echo(_sentence(explanation.prediction))
        typer.echo(explanation.prediction.reason)
        typer.echo(f"figure: {target}")


@ls_app.command("methods")
def ls_methods(as_json: AsJson = False) -> None:
    """List the methods.

    NAME+READOUT reads a method's answer out in another way (tpt+se), NAME:SETTING=VALUE changes settings of it
    (use:steps=4:gamma=0.2).
    """
    from usetta import methods
    from usetta.recipe import READOUTS

    rows = [{"name": name, "description": methods.get(name).description} for name in methods.names()]
    _print_rows(rows, as_json)
    if not as_json:
        _say("another read-out: tpt+se, of")
        _say(f"  {', '.join(READOUTS)}")
        _say("other settings: use:steps=4:gamma=0.2")


@ls_app.command("models")
def ls_models(as_json: AsJson = False) -> None:
    """List the models, and whether their weights are on this machine."""
    from usetta.models import list_models

    _print_rows([asdict(row) for row in list_models()], as_json)


@ls_app.command("datasets")
def ls_datasets(as_json: AsJson = False) -> None:
    """List the data sets that are known by name."""
    from usetta.data import list_datasets

    columns = ("name", "title", "family", "pictures", "classes")
    _print_rows([{column: getattr(each, column) for column in columns} for each in list_datasets()], as_json)


@models_app.command("pull")
def pull(name: Annotated[str, typer.Argument(help="A name from `usetta ls models`.")]) -> None:
    """Fetch a model's weights into the cache, so that it works offline afterwards."""
    from usetta.models import pull_model

    with _clear_errors():
        where = pull_model(name, _say)
    typer.echo(f"{name}: ready in {where}")


@data_app.command("check")
def data_check(
    root: DataRoot,
    only: Annotated[list[str] | None, typer.Option("--only", help="A data set to look for; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell which of the paper's data sets are there and complete, and what to do next."""
    from usetta.data import check

    with _clear_errors():
        reports = check(root, only or ())
    _print_rows(
        [
            asdict(report)
            if as_json
            else {
                "name": report.name,
                "state": report.state,
                "pictures": f"{report.pictures:,} of {report.expected:,}",
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
    name: Annotated[str, typer.Argument(help="A name from `usetta ls datasets`.")],
    root: DataRoot,
    keep_archive: Annotated[bool, typer.Option("--keep-archive", help="Keep what was downloaded.")] = False,
) -> None:
    """Download a data set, or tell the steps to take by hand. The exit code is 1 until it is complete."""
    from usetta.data import fetch

    with _clear_errors():
        fetched = fetch(name, root, _say, keep_archive=keep_archive)
    report = fetched.report
    typer.echo(f"{report.name}: {report.state}" + (f" in {report.where}" if report.where else ""))
    for number, step in enumerate(fetched.by_hand, 1):
        typer.echo(f"{number}. {step}")
    if report.state != "complete":
        if not fetched.by_hand:
            typer.echo(report.todo)
        raise typer.Exit(1)


@coop_app.command("train")
def coop_train(
    folder: Annotated[Path, typer.Argument(help="Holds a folder of pictures for each class.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the context; an unfinished one is continued.")],
    model: ModelName = "auto",
    template: Annotated[
        str, typer.Option("--template", "-t", help="Its words before {} give the context its length.")
    ] = "a photo of a {}.",
    shots: Annotated[int, typer.Option(help="Pictures of each class.", min=1)] = 16,
    epochs: Annotated[int, typer.Option(min=1)] = 50,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.002,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    views: Annotated[int, typer.Option(help="Views per picture: itself and random crops.", min=1)] = 9,
    init: Annotated[str, typer.Option(help="Start 'random' or from the 'words' of the template.")] = "random",
    seed: Annotated[int, typer.Option(help="Seed of shots, views and batches.", min=0)] = 0,
) -> None:
    """Learn a context for the prompts from a few labelled pictures. Stopped, the same command goes on."""
    from usetta.coop import CoOpRecipe, train_context
    from usetta.coop.context import LOSSES, read_context_file
    from usetta.data import load_dataset
    from usetta.models import load_model
    from usetta.models.cached import CachedImages
    from usetta.models.wheels import cache_dir

    with _clear_errors():
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
        shown = load_dataset(folder)
        if shown.labels is None:
            raise ValueError(f"the pictures of {folder} have no labels to learn from")
        loaded = CachedImages(load_model(model), cache_dir() / "coop" / "features")
        _say(f"model: {loaded.name}, up to {shots} pictures of each of {len(shown.classes)} classes")
        paths = [item.path for item in shown]
        train_context(loaded, paths, shown.labels, shown.classes, recipe, out=out, say=_say)
        losses = read_context_file(out)[0][LOSSES].tolist()
    _say(f"loss: {losses[0]:.3f} in the first epoch, {losses[-1]:.3f} in the last")
    typer.echo(f"context: {out}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report.")] = Path("demo-report"),
    methods: Annotated[str, typer.Option(help="Methods to compare.")] = "clip,se,tpt,use",
    model: ModelName = "embedded",
    views: Annotated[int, typer.Option(help="Views per photograph; the paper uses 64.", min=2)] = 32,
) -> None:
    """Classify a dozen real photographs with every method and write a report with pictures."""
    from usetta import demo as demonstration
    from usetta import methods as known_methods
    from usetta.models import load_model
    from usetta.models.cached import CachedImages
    from usetta.models.wheels import cache_dir

    with _clear_errors():
        names = list(dict.fromkeys(known_methods.get(name).name for name in methods.split(",")))
        photographs = demonstration.photographs(_say)
        loaded = CachedImages(load_model(model), cache_dir() / "demo" / "features")
        _say(f"model: {loaded.name}, {views} views of each of {len(photographs)} photographs")
        answers = demonstration.answers(loaded, photographs, names, views)
        found = list(track(answers, len(photographs), "Classifying"))
        page = demonstration.write_report(found, out, loaded, views)
    _print_rows(
        [
            {"photograph": each.photograph.shows}
            | {
                name: ("✓" if each.is_right(name) else f"✗ {explanation.prediction.label}")
                + f" {explanation.prediction.confidence:.0%}"
                for name, explanation in each.by_method.items()
            }
            for each in found
        ],
        as_json=False,
    )
    for name in names:
        skipped = sum(each.by_method[name].prediction.skipped is True for each in found)
        left = f", {skipped} skipped because the views already agree" if skipped else ""
        typer.echo(f"{name}: {sum(each.is_right(name) for each in found)} of {len(found)} right{left}")
    typer.echo(f"report: {page}")


def _classifier(
    classes: str,
    method: str,
    model: str,
    template: list[str] | None,
    context: Path | None,
    views: int,
    seed: int,
    augmix: bool,
) -> "Classifier":
    from usetta import methods
    from usetta.classifier import Classifier
    from usetta.coop import template_of
    from usetta.models import load_model
    from usetta.prompts import DEFAULT_TEMPLATE

    names, recipe = _read_classes(classes), methods.get(method)  # before the slow part, so that a typo is told at once
    templates = template or (template_of(context) if context else DEFAULT_TEMPLATE)
    loaded = load_model(model)
    _say(f"model: {loaded.name}")
    return Classifier(
        names, loaded, recipe, templates=templates, context=context, views=views, seed=seed, augmix=augmix
    )


def _read_classes(classes: str) -> list[str]:
    if classes.startswith("@"):
        try:
            found = Path(classes[1:]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read class names from {classes[1:]!r}: {error}") from error
    else:
        found = classes.split(",")
    names = [name.strip() for name in found if name.strip()]
    if not names:
        raise ValueError("there must be at least one class name")
    return names


@contextmanager
def _clear_errors() -> Iterator[None]:
    """What goes wrong is told in one line without a traceback: exit code 2 for wrong usage, 1 for the rest."""
    from usetta.data import DataError
    from usetta.images import ImageError
    from usetta.models import ModelError

    try:
        yield
    except BrokenPipeError:  # whoever read the answers has seen enough, which is no error to tell
        raise
    except (DataError, ImageError, ModelError, OSError, ValueError) as error:
        _say(f"usetta: {error}")
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from error


def _sentence(answer: "Prediction") -> str:
    text = f"{answer.label}  {answer.confidence:.1%}"
    weak = answer.classes[int(answer.zero_shot.argmax())]
    return text if weak == answer.label else f"{text}  (zero-shot: {weak}  {float(answer.zero_shot.max()):.1%})"


def _text_writer(pictures: list[Path]) -> Any:
    width = max(len(str(picture)) for picture in pictures)

    def write(picture: Path, outcome: Any) -> None:
        if not isinstance(outcome, Exception):
            _line(f"{picture!s:<{width}}  {_sentence(outcome)}")

    return write


def _json_writer(top: int) -> Any:
    def write(picture: Path, outcome: Any) -> None:
        bad = isinstance(outcome, Exception)
        _line(json.dumps({"source": str(picture), "error": outcome.reason} if bad else outcome.as_dict(top)))

    return write


def _csv_writer() -> Any:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["source", "label", "probability", "zero_shot_label", "zero_shot_probability", "error"])

    def write(picture: Path, outcome: Any) -> None:
        if isinstance(outcome, Exception):
            table.writerow([picture, "", "", "", "", outcome.reason])  # type: ignore[attr-defined]
        else:
            row = outcome.as_dict()
            zero_shot = row["zero_shot"]
            table.writerow(
                [picture, row["label"], row["probability"], zero_shot["label"], zero_shot["probability"], ""]
            )
        sys.stdout.flush()

    return write


def _line(text: str) -> None:
    """One line to standard output, at once: what has been computed survives whatever comes next."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    """One line to standard error; written so that it lands above a progress bar, which typer.echo does not."""
    sys.stderr.write(text + "\n")


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
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
