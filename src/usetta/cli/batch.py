"""`usetta classify --out`: any number of images, to a directory of Parquet files."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from usetta.cli.app import say
from usetta.cli.engines import answers_alone, for_workers

if TYPE_CHECKING:
    from usetta.batch.runner import BatchSettings
    from usetta.distributed import RayEngine
    from usetta.models import Model

_ENDINGS = (".txt", ".parquet", ".pq", ".tar", ".tar.gz", ".tgz")


def refuse_without_out(sources: list[str]) -> None:
    """Sources that may be large are for --out: standard output cannot be continued."""
    for source in sources:
        if source.startswith("@") or "://" in source or source.lower().endswith(_ENDINGS):
            raise ValueError(f"{source} is a list, table, archive or URL: these need --out DIR")


def classify_to(
    out: Path,
    sources: list[str],
    setting: "BatchSettings",
    context: Path | None,
    load: "Callable[..., Model]",
    engine: "RayEngine | None",
    column: str | None,
) -> None:
    """Classify into a directory; bad images are told and counted, and the exit code is then 1."""
    from usetta.batch.runner import classify
    from usetta.batch.sources import check
    from usetta.coop import load_context

    check(sources)
    model = load()
    say(f"model: {model.name}")
    if context:
        setting = replace(setting, context=load_context(context, model))
    try:
        with answers_alone():
            done = classify(
                model,
                setting,
                sources,
                out,
                column=column,
                engine=engine,
                load=for_workers(load, engine.gpus if engine else 0),
                say=say,
                period=5 if sys.stderr.isatty() else 60,
            )
    except KeyboardInterrupt:
        say(f"usetta: stopped; what was computed is in {out}, and the same command goes on")
        raise typer.Exit(130) from None
    if not done.images + done.before:
        raise ValueError(f"no images in {', '.join(sources)}")
    say(f"{done.images} images in {done.seconds:.0f} s, {done.before} were there already: {out}")
    if done.bad:
        say(f"usetta: {done.bad} of {done.images} images could not be read")
        raise typer.Exit(1)
