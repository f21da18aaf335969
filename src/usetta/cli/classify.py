"""Commands that classify images."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from usetta.cli.app import (
    AsJson,
    AugMix,
    Cache,
    Classes,
    Compiled,
    ContextFile,
    Device,
    Method,
    ModelName,
    Precision,
    RewardModel,
    Seed,
    Templates,
    ViewCount,
    app,
    clear_errors,
    described,
    echo,
    print_rows,
    read_views,
    warn,
)
from usetta.cli.engines import (
    Address,
    CpusPerWorker,
    EngineName,
    GpusPerWorker,
    Rank,
    Workers,
    WorldSize,
    answers_alone,
    for_driver,
    for_workers,
    loader,
    read_engine,
    read_shard,
)
from usetta.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from usetta.batch.runner import BatchSettings
    from usetta.classifier import Classifier
    from usetta.distributed import RayEngine, Shard
    from usetta.models import Model
    from usetta.prediction import Prediction


_ENDINGS = (".txt", ".parquet", ".pq", ".tar", ".tar.gz", ".tgz")
"""Sources that may be large: standard output cannot be resumed, so these need --out."""


@app.command()
def classify(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Images, or folders of images. With --out also patterns, lists (@FILE), Parquet, tars and URLs.",
            metavar="PATH",
        ),
    ],
    classes: Classes,
    method: Method = "se",
    model: ModelName = "auto",
    precision: Precision = "auto",
    device: Device = "auto",
    compiled: Compiled = False,
    template: Templates = None,
    context: ContextFile = None,
    reward_model: RewardModel = None,
    views: ViewCount = "adaptive",
    seed: Seed = 0,
    augmix: AugMix = False,
    top: Annotated[int, typer.Option(help="How many classes to name per image in JSON.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Directory of Parquet files; the same command continues it.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of Parquet files that holds paths or bytes.")] = None,
    cache: Cache = None,
    engine: EngineName = "local",
    address: Address = "auto",
    workers: Workers = None,
    cpus_per_worker: CpusPerWorker = 1,
    gpus_per_worker: GpusPerWorker = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
) -> None:
    """Classify images. Unreadable images are reported and skipped; the exit code is then 1.

    With --out, answers go to Parquet files instead of standard output, and work may be done on a cluster.
    """
    from usetta.answer_warnings import chance_warning, is_near_chance
    from usetta.images import ImageError, find_images

    if as_json and as_csv:
        raise typer.BadParameter("choose one of --json and --csv")
    if out is not None and (as_json or as_csv):
        raise typer.BadParameter("--out writes Parquet; leave --json and --csv out")
    with clear_errors():
        where = read_engine(engine, address, workers, cpus_per_worker, gpus_per_worker)
        computing = {"precision": precision, "device": device, "compiled": compiled}
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        asked = _settings(
            classes, method, template, context, views=read_views(views), augmix=augmix, seed=seed, top=top, cache=cache
        )
        if out is not None:
            _classify_to(
                out, paths, asked, context, load, load_reward, where, read_shard(rank, world_size, where), column
            )
            return
        if where is not None:
            raise ValueError("answers from a cluster go to files: say where with --out DIR")
        _refuse_without_out(paths)
        try:
            images = find_images(paths)
        except ImageError as error:
            raise ValueError(str(error)) from error
        classifier = _classifier(asked, context, load, load_reward)
    write = _json_writer(top) if as_json else _csv_writer() if as_csv else _text_writer(images)
    failed = near_chance = 0
    with clear_errors():
        answers = track(classifier.stream(images), len(images), "Classifying")
        for image, outcome in zip(images, answers, strict=True):
            write(image, outcome)
            if isinstance(outcome, ImageError):
                failed += 1
                echo(f"usetta: {outcome}")
            else:
                near_chance += is_near_chance(outcome.confidence, len(outcome.classes))
    if near_chance:
        warn(chance_warning(len(asked.classes), near_chance, len(images)))
    if failed:
        echo(f"usetta: {failed} of {len(images)} images could not be read")
        raise typer.Exit(1)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="An image.")],
    classes: Classes,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Figure to write (.png, .svg, .pdf).")] = None,
    method: Method = "se",
    model: ModelName = "auto",
    precision: Precision = "auto",
    device: Device = "auto",
    template: Templates = None,
    context: ContextFile = None,
    reward_model: RewardModel = None,
    views: ViewCount = "adaptive",
    seed: Seed = 0,
    augmix: AugMix = False,
    cache: Cache = None,
    shown: Annotated[int, typer.Option(help="How many strong views the figure shows.", min=1)] = 24,
    as_json: AsJson = False,
) -> None:
    """Show why an image got its answer: its views by confidence, the chosen ones, zero-shot against the method."""
    from usetta.images import open_image

    target = out or path.with_name(f"{path.stem}-explained.png")
    with clear_errors():
        image = open_image(path)  # first, so that an unreadable image is reported before a model is loaded
        if target.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg", ".jpeg"):
            raise ValueError(f"cannot write a figure as {target.name!r}: use .png, .svg, .pdf or .jpg")
        if not target.parent.is_dir():
            raise ValueError(f"no folder {str(target.parent)!r} to write the figure to")
        computing = {"precision": precision, "device": device}
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        asked = _settings(
            classes, method, template, context, views=read_views(views, least=2), augmix=augmix, seed=seed, cache=cache
        )
        classifier = _classifier(asked, context, load, load_reward)
        explanation = classifier.explain(image)
        explanation.save(target, shown)
    if as_json:
        typer.echo(json.dumps({**explanation.prediction.to_dict(), "source": str(path), "figure": str(target)}))
    else:
        typer.echo(_sentence(explanation.prediction))
        typer.echo(explanation.prediction.reason)
        typer.echo(f"figure: {target}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report.")] = Path("demo-report"),
    methods: Annotated[str, typer.Option(help="Methods to compare.")] = "clip,se,tpt,use",
    model: ModelName = "embedded",
    views: Annotated[int, typer.Option(help="Views per image; the paper uses 64.", min=2)] = 32,
) -> None:
    """Classify a dozen real images with every method and write a report with images."""
    from usetta import demo as demonstration
    from usetta import methods as known_methods
    from usetta.models import load_model

    with clear_errors():
        names = list(dict.fromkeys(known_methods.get(name).name for name in methods.split(",")))
        images = demonstration.demo_dataset(echo)
        loaded = load_model(model, precision="fp32")
        echo(f"model: {loaded.name}, {views} views of each of {len(images)} images")
        demonstration.measure(loaded, images, names, views, out / "run")
        answers = list(demonstration.answers(loaded, images, names, views))
        page = demonstration.write_pages(answers, out, loaded, views)
    print_rows(
        [
            {"image": answer.image.shows}
            | {
                name: ("✓" if answer.is_right(name) else f"✗ {explanation.prediction.label}")
                + f" {explanation.prediction.confidence:.0%}"
                for name, explanation in answer.by_method.items()
            }
            for answer in answers
        ],
        as_json=False,
    )
    for name in names:
        skipped = sum(answer.by_method[name].prediction.skipped is True for answer in answers)
        left = f", {skipped} skipped because the views already agree" if skipped else ""
        typer.echo(f"{name}: {sum(answer.is_right(name) for answer in answers)} of {len(answers)} right{left}")
    typer.echo(f"report: {page}")


def _refuse_without_out(sources: list[str]) -> None:
    """Sources that may be large are for --out: standard output cannot be continued."""
    for source in sources:
        if source.startswith("@") or "://" in source or source.lower().endswith(_ENDINGS):
            raise ValueError(f"{source} is a list, table, archive or URL: these need --out DIR")


def _classify_to(
    out: Path,
    sources: list[str],
    settings: "BatchSettings",
    context: Path | None,
    load: "Callable[..., Model]",
    load_reward: "Callable[..., Model] | None",
    engine: "RayEngine | None",
    shard: "Shard",
    column: str | None,
) -> None:
    """Classify into a directory; unreadable images are reported and counted, and the exit code is then 1."""
    from usetta.answer_warnings import chance_warning
    from usetta.batch.runner import classify
    from usetta.batch.sources import check
    from usetta.coop import load_context

    check(sources)
    gpus = engine.gpus if engine else 0
    model, reward_model = for_driver(load, gpus)(), for_driver(load_reward, gpus)() if load_reward else None
    echo(f"model: {described(model)}")
    if context:
        settings = replace(settings, context=load_context(context, model))
    try:
        with answers_alone():
            done = classify(
                model,
                settings,
                sources,
                out,
                column=column,
                reward_model=reward_model,
                engine=engine,
                shard=shard,
                load=for_workers(load, gpus),
                load_reward_model=for_workers(load_reward, gpus) if load_reward else None,
                log=echo,
                period=5 if sys.stderr.isatty() else 60,
            )
    except KeyboardInterrupt:
        echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
        raise typer.Exit(130) from None
    if not done.images + done.before:
        raise ValueError(f"no images in {', '.join(sources)}")
    echo(f"{done.images} images in {done.seconds:.0f} s, {done.before} were there already: {out}")
    if done.near_chance:
        warn(chance_warning(len(settings.classes), done.near_chance, done.images))
    if done.failed:
        echo(f"usetta: {done.failed} of {done.images} images could not be read")
        raise typer.Exit(1)


def _settings(
    classes: str, method: str, template: list[str] | None, context: Path | None, **settings: Any
) -> "BatchSettings":
    """What is asked, read before a model is loaded, so that a typo is reported at once."""
    from usetta import methods
    from usetta.batch.runner import BatchSettings
    from usetta.coop import template_of
    from usetta.prompts import DEFAULT_TEMPLATE

    templates = template or [template_of(context) if context else DEFAULT_TEMPLATE]
    return BatchSettings(tuple(_read_classes(classes)), methods.get(method), tuple(templates), **settings)


def _classifier(
    asked: "BatchSettings",
    context: Path | None,
    load: "Callable[[], Model]",
    load_reward: "Callable[[], Model] | None",
) -> "Classifier":
    from usetta.coop import load_context

    model = load()
    echo(f"model: {described(model)}")
    settings = replace(asked, context=load_context(context, model) if context else None)
    return settings.classifier(model, load_reward() if load_reward else None)


def _read_classes(classes: str) -> list[str]:
    if classes.startswith("@"):
        try:
            lines = Path(classes[1:]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read class names from {classes[1:]!r}: {error}") from error
    else:
        lines = classes.split(",")
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError("there must be at least one class name")
    return names


def _sentence(answer: "Prediction") -> str:
    text = f"{answer.label}  {answer.confidence:.1%}"
    weak = answer.classes[int(answer.zero_shot.argmax())]
    return text if weak == answer.label else f"{text}  (zero-shot: {weak}  {float(answer.zero_shot.max()):.1%})"


def _text_writer(images: list[Path]) -> Any:
    width = max(len(str(image)) for image in images)

    def write(image: Path, outcome: Any) -> None:
        if not isinstance(outcome, Exception):
            _line(f"{image!s:<{width}}  {_sentence(outcome)}")

    return write


def _json_writer(top: int) -> Any:
    def write(image: Path, outcome: Any) -> None:
        bad = isinstance(outcome, Exception)
        _line(json.dumps({"source": str(image), "error": outcome.reason} if bad else outcome.to_dict(top)))

    return write


def _csv_writer() -> Any:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["source", "label", "probability", "zero_shot_label", "zero_shot_probability", "error"])

    def write(image: Path, outcome: Any) -> None:
        if isinstance(outcome, Exception):
            table.writerow([image, "", "", "", "", outcome.reason])  # type: ignore[attr-defined]
        else:
            row = outcome.to_dict()
            zero_shot = row["zero_shot"]
            table.writerow([image, row["label"], row["probability"], zero_shot["label"], zero_shot["probability"], ""])
        sys.stdout.flush()

    return write


def _line(text: str) -> None:
    """One line to standard output, at once: what has been computed survives whatever comes next."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
