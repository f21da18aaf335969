"""Commands that classify images."""

import json
import sys
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from usetta.cli.answers import csv_writer, json_writer, sentence, text_writer
from usetta.cli.app import (
    AsJson,
    AugMix,
    Cache,
    Classes,
    Compiled,
    ContextFile,
    Device,
    MaxPixels,
    Method,
    ModelName,
    Precision,
    Quiet,
    RewardModel,
    Seed,
    Templates,
    Verbose,
    ViewCount,
    app,
    clear_errors,
    counted,
    described,
    detail,
    echo,
    note,
    printable,
    read_classes,
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
from usetta.progress import track, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from usetta.batch.runner import BatchSettings
    from usetta.batch.sources import BatchImage, SourceOptions
    from usetta.classifier import Classifier
    from usetta.distributed import RayEngine, Shard
    from usetta.images import ImageError
    from usetta.models import Model
    from usetta.prediction import Prediction
    from usetta.rejection import Calibration

    Outcome = Prediction | ImageError

_AHEAD = 100_000
"""Images that are listed before the first is classified, so that progress knows their number,"""
_AHEAD_BYTES = 2**26
"""as long as they carry no more bytes than this."""


@app.command()
def classify(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Images, folders, 'quoted patterns', @lists, Parquet files, tars, URLs, or - for standard input.",
            metavar="SOURCE...",
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
    top: Annotated[
        int | None,
        typer.Option(help="Print the N most probable classes. Default: 1 in text and CSV, else 5.", min=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values with a header.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write to FILE.parquet, or to a directory of Parquet files. Rerun the same command to resume.",
        ),
    ] = None,
    column: Annotated[str | None, typer.Option(help="Column of a Parquet file with paths or image bytes.")] = None,
    allow_urls: Annotated[
        bool, typer.Option("--allow-urls", help="Open URLs (http, https, s3, …), also those in lists and tables.")
    ] = False,
    max_pixels: MaxPixels = None,
    cache: Cache = None,
    reject_below: Annotated[
        float | None,
        typer.Option(help="Reject answers whose score is lower: the image is none of the classes.", min=0, max=1),
    ] = None,
    reject: Annotated[
        str | None, typer.Option(help="The score: confidence (default), margin or entropy; 1 is no doubt.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File of `usetta calibrate`: calibrated confidence, and a threshold.")
    ] = None,
    engine: EngineName = "local",
    address: Address = "auto",
    workers: Workers = None,
    cpus_per_worker: CpusPerWorker = 1,
    gpus_per_worker: GpusPerWorker = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Classify images. Unreadable images are reported and skipped; the exit code is then 1.

    With --out, answers are written to Parquet instead of standard output, and the work can run on a cluster.
    """
    if as_json and as_csv:
        raise typer.BadParameter("choose one of --json and --csv")
    if out is not None and (as_json or as_csv):
        raise typer.BadParameter("--out writes Parquet: use it without --json and --csv")
    with clear_errors():
        from usetta.batch.sources import SourceOptions, check
        from usetta.images import describe_ignored

        where = read_engine(engine, address, workers, cpus_per_worker, gpus_per_worker)
        if where is not None and out is None:
            raise ValueError("--engine ray needs --out: a cluster writes its answers to files")
        options = SourceOptions(column, allow_urls)
        check(sources, options)
        asked = _settings(
            classes,
            method,
            template,
            context,
            views=read_views(views),
            augmix=augmix,
            seed=seed,
            top=top or (5 if as_json or out else 1),
            cache=cache,
            max_pixels=max_pixels,
            reject=reject,
            reject_below=reject_below,
            calibration=_read_calibration(calibration, reject, reject_below),
        )
        computing = {"precision": precision, "device": device, "compiled": compiled}
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        if out is not None:
            shard = read_shard(rank, world_size, where)
            failed, count = _classify_to(out, sources, options, asked, context, load, load_reward, where, shard)
        else:
            kind = "json" if as_json else "csv" if as_csv else "text"
            failed, count = _classify_here(sources, options, asked, context, load, load_reward, kind)
    if options.ignored:
        warn(describe_ignored(options.ignored))
    if failed:
        echo(f"usetta: {failed} of {count} images could not be read")
        raise typer.Exit(1)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(help="An image.")],
    classes: Classes,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Figure to write: .png, .svg, .pdf or .jpg. Default: IMAGE-explained.png."),
    ] = None,
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
    max_pixels: MaxPixels = None,
    cache: Cache = None,
    shown: Annotated[int, typer.Option(help="How many random views the figure shows.", min=1)] = 24,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Explain an answer: a figure of the most confident views, and zero-shot against the method."""
    target = out or path.with_name(f"{path.stem}-explained.png")
    with clear_errors():
        from usetta.images import MAX_PIXELS, open_image

        if target.suffix.lower() not in (".png", ".svg", ".pdf", ".jpg", ".jpeg"):
            raise ValueError(f"cannot write a figure to {target.name!r}: the name must end in .png, .svg, .pdf or .jpg")
        if not target.parent.is_dir():
            raise ValueError(f"cannot write the figure: there is no folder {str(target.parent)!r}")
        # Opened here, so that an unreadable image is reported before a model is loaded.
        image = open_image(path, max_pixels=max_pixels or MAX_PIXELS)
        asked = _settings(
            classes,
            method,
            template,
            context,
            views=read_views(views, least=2),
            augmix=augmix,
            seed=seed,
            cache=cache,
            max_pixels=max_pixels,
        )
        computing = {"precision": precision, "device": device}
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        classifier = _classifier(asked, context, load, load_reward)
        started = time.perf_counter()
        with waiting(f"Explaining {printable(path.name)}"):
            explanation = classifier.explain(image)
            explanation.save(target, shown)
    note(f"{len(explanation.views)} views in {time.perf_counter() - started:.1f} s")
    if as_json:
        typer.echo(json.dumps({**explanation.prediction.to_dict(), "source": str(path), "figure": str(target)}))
    else:
        typer.echo(printable(sentence(explanation.prediction)))
        typer.echo(printable(explanation.prediction.reason))
        typer.echo(f"figure: {printable(str(target))}")


def _classify_here(
    sources: list[str],
    options: "SourceOptions",
    asked: "BatchSettings",
    context: Path | None,
    load: "Callable[[], Model]",
    load_reward: "Callable[[], Model] | None",
    kind: str,
) -> tuple[int, int]:
    """Print the answers; returns how many images could not be read, and how many there were."""
    from usetta.answer_warnings import chance_warning, is_near_chance
    from usetta.batch.sources import images
    from usetta.images import ImageError

    first, rest = _look_ahead(images(sources, options))
    if not first:
        raise _no_images(sources, options)
    total = None if rest else len(first)
    classifier = _classifier(asked, context, load, load_reward)
    rejects = asked.reject_below is not None or asked.calibration is not None
    write = json_writer(asked.top) if kind == "json" else csv_writer(asked.top, rejects) if kind == "csv" else None
    write = write or text_writer(first, asked.top)
    under_way: deque[BatchImage] = deque()

    def reads() -> "Iterator[Callable[[], str | bytes]]":
        for image in chain(first, rest or ()):
            under_way.append(image)
            yield image.read

    started, failed, near_chance, views = time.perf_counter(), 0, 0, list[int]()
    with waiting(f"Classifying {printable(first[0].name)}") if total == 1 else nullcontext():
        for outcome in track(classifier.stream(reads()), total, "Classifying"):
            image = under_way.popleft()
            write(image, outcome)
            if isinstance(outcome, ImageError):
                failed += 1
                echo(f"usetta: {printable(image.name)}: {outcome.reason}")
            else:
                views.append(len(outcome.entropies))
                near_chance += is_near_chance(outcome.confidence, len(outcome.classes))
                detail(f"{printable(image.name)}: {views[-1]} views; {outcome.reason}")
    if views:
        note(_summary(views, time.perf_counter() - started))
    if near_chance:
        warn(chance_warning(len(asked.classes), near_chance, failed + len(views)))
    return failed, failed + len(views)


def _look_ahead(stream: "Iterator[BatchImage]") -> "tuple[list[BatchImage], Iterator[BatchImage] | None]":
    """The first images, and the stream of the others if there may be more."""
    first, size = list[Any](), 0
    for image in stream:
        first.append(image)
        size += len(image.place) if isinstance(image.place, bytes) else 0
        if len(first) == _AHEAD or size >= _AHEAD_BYTES:
            return first, stream
    return first, None


def _no_images(sources: list[str], options: "SourceOptions") -> ValueError:
    from usetta.images import describe_ignored

    ignored = f"; {describe_ignored(options.ignored)}" if options.ignored else ""
    return ValueError(f"no images in {', '.join(sources)}{ignored}")


def _summary(views: list[int], seconds: float) -> str:
    """How long it took, and with how many views."""
    if len(views) == 1:
        return f"1 image in {seconds:.1f} s, {counted(views[0], 'view')}"
    mean = sum(views) / len(views)
    each = f"{views[0]}" if min(views) == max(views) else f"{min(views)} to {max(views)} (mean {mean:.0f})"
    return f"{len(views)} images in {seconds:.1f} s, views per image: {each}"


def _classify_to(
    out: Path,
    sources: list[str],
    options: "SourceOptions",
    settings: "BatchSettings",
    context: Path | None,
    load: "Callable[..., Model]",
    load_reward: "Callable[..., Model] | None",
    engine: "RayEngine | None",
    shard: "Shard",
) -> tuple[int, int]:
    """Write the answers to Parquet; returns how many images could not be read, and how many there were."""
    from usetta.answer_warnings import chance_warning
    from usetta.batch.parts import check_output
    from usetta.batch.runner import classify
    from usetta.coop import load_context

    check_output(out, shard)
    gpus = engine.gpus if engine else 0
    model, reward_model = for_driver(load, gpus)(), for_driver(load_reward, gpus)() if load_reward else None
    note(f"model: {described(model)}")
    if context:
        settings = replace(settings, context=load_context(context, model))
    try:
        with answers_alone():
            done = classify(
                model,
                settings,
                sources,
                out,
                options=options,
                reward_model=reward_model,
                engine=engine,
                shard=shard,
                load=for_workers(load, gpus),
                load_reward_model=for_workers(load_reward, gpus) if load_reward else None,
                log=note,
                period=5 if sys.stderr.isatty() else 60,
            )
    except KeyboardInterrupt:
        echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
        raise typer.Exit(130) from None
    if not done.images + done.before:
        raise _no_images(sources, options)
    already = f", {done.before} were already there" if done.before else ""
    note(f"{counted(done.images, 'image')} in {done.seconds:.0f} s{already}: {out}")
    if done.near_chance:
        warn(chance_warning(len(settings.classes), done.near_chance, done.images))
    return done.failed, done.images


def _settings(
    classes: str, method: str, template: list[str] | None, context: Path | None, **settings: Any
) -> "BatchSettings":
    """What is asked, checked before a model is loaded, so that a mistake is reported at once."""
    from usetta import methods
    from usetta.adaptive import most_views
    from usetta.batch.runner import BatchSettings
    from usetta.coop import template_of
    from usetta.episode import check_without_model
    from usetta.prompts import DEFAULT_TEMPLATE

    recipe = methods.get(method)
    templates = template or [template_of(context) if context else DEFAULT_TEMPLATE]
    check_without_model(recipe, most_views(settings["views"]), templates)
    return BatchSettings(tuple(read_classes(classes)), recipe, tuple(templates), **settings)


def _read_calibration(path: Path | None, reject: str | None, below: float | None) -> "Calibration | None":
    """The calibration; what is wrong with any of the three options is reported before a model is loaded."""
    from usetta.rejection import Calibration, make_rejection

    known = None if path is None else Calibration.load(path)
    fitted = {"model": known.model, "fingerprint": known.fingerprint, "method": known.method} if known else None
    make_rejection(reject, below, known, **(fitted or {"model": "", "fingerprint": "", "method": ""}))  # type: ignore[arg-type]
    return known


def _classifier(
    asked: "BatchSettings",
    context: Path | None,
    load: "Callable[[], Model]",
    load_reward: "Callable[[], Model] | None",
) -> "Classifier":
    from usetta.coop import load_context

    model = load()
    note(f"model: {described(model)}")
    settings = replace(asked, context=load_context(context, model) if context else None)
    return settings.classifier(model, load_reward() if load_reward else None)
