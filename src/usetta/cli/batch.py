"""`usetta classify --out`: any number of images, to a directory of Parquet files."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from usetta.cli.app import described, say
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
    settings: "BatchSettings",
    context: Path | None,
    load: "Callable[..., Model]",
    load_reward: "Callable[..., Model] | None",
    engine: "RayEngine | None",
    column: str | None,
) -> None:
    """Classify into a directory; unreadable images are reported and counted, and the exit code is then 1."""
    from usetta.batch.runner import classify
    from usetta.batch.sources import check
    from usetta.coop import load_context

    check(sources)
    model, reward_model = load(), load_reward() if load_reward else None
    say(f"model: {described(model)}")
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
                load=for_workers(load, engine.gpus if engine else 0),
                load_reward_model=for_workers(load_reward, engine.gpus if engine else 0) if load_reward else None,
                log=say,
                period=5 if sys.stderr.isatty() else 60,
            )
    except KeyboardInterrupt:
        say(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
        raise typer.Exit(130) from None
    if not done.images + done.before:
        raise ValueError(f"no images in {', '.join(sources)}")
    say(f"{done.images} images in {done.seconds:.0f} s, {done.before} were there already: {out}")
    if done.failed:
        say(f"usetta: {done.failed} of {done.images} images could not be read")
        raise typer.Exit(1)
