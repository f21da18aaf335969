"""The command that measures methods on datasets."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import (
    Compiled,
    ContextFile,
    Device,
    ModelName,
    Precision,
    Templates,
    Views,
    app,
    clear_errors,
    read_seeds,
    say,
    split,
)
from usetta.cli.engines import (
    Address,
    CpusPerWorker,
    EngineName,
    GpusPerWorker,
    Workers,
    answers_alone,
    for_workers,
    loader,
    read_engine,
)


@app.command("eval")
def evaluate(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of the run; the same command continues it.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of the datasets, or one dataset.", envvar="USETTA_DATA")
    ] = None,
    datasets: Annotated[
        str, typer.Option("--datasets", "-d", help="Names, folders or lists of images: 'dtd,pets'. Default: all.")
    ] = "",
    methods: Annotated[str, typer.Option("--methods", "-m", help="Methods to compare.")] = "clip,se,use",
    model: ModelName = "auto",
    precision: Precision = "fp32",
    device: Device = None,
    compiled: Compiled = False,
    seeds: Annotated[str, typer.Option(help="Seeds of the views.")] = "0",
    template: Templates = None,
    context: ContextFile = None,
    reward: Annotated[str | None, typer.Option(help="Model that judges for rlcf; by default the model itself.")] = None,
    views: Views = 64,
    augmix: Annotated[
        bool | None, typer.Option("--augmix/--no-augmix", help="AugMix, or crops only; by default as in the paper.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Only so many images of each dataset, evenly spread.", min=1)
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder that keeps features of views, for runs with other methods.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images that go through a method together.", min=1)] = 8,
    threads: Annotated[int, typer.Option(help="Threads that decode images and make views.", min=1)] = 2,
    engine: EngineName = "local",
    address: Address = "auto",
    workers: Workers = None,
    cpus_per_worker: CpusPerWorker = 1,
    gpus_per_worker: GpusPerWorker = 0,
) -> None:
    """Measure methods on datasets, and print a table. Stopped, the same command goes on; more can be added to it.

    Bad images are reported and left out; the exit code is then 1.
    """
    from rich.console import Console

    from usetta.data import load_datasets
    from usetta.evaluate.runner import EvalSettings
    from usetta.evaluate.runner import evaluate as run
    from usetta.evaluate.store import Store
    from usetta.report.results import accuracy_table
    from usetta.report.tables import terminal

    with clear_errors():
        sets = load_datasets(split(datasets), data)
        numbers = read_seeds(seeds)
        where = read_engine(engine, address, workers, cpus_per_worker, gpus_per_worker)
        computing = {"precision": precision, "device": device, "compiled": compiled}
        load, load_reward = loader(model, **computing), loader(reward, **computing) if reward else None
        loaded, judge = load(), load_reward() if load_reward else None
        say(f"model: {loaded.name}, {', '.join(f'{each.name} ({len(each)} images)' for each in sets)}")
        try:
            with answers_alone():
                done = run(
                    loaded,
                    sets,
                    split(methods),
                    out,
                    EvalSettings(views=views, templates=tuple(template or ()), context=context, augmix=augmix),
                    seeds=numbers,
                    images=images,
                    reward=judge,
                    cache=cache,
                    batch_size=batch_size,
                    threads=threads,
                    engine=where,
                    load=for_workers(load, gpus_per_worker),
                    load_reward=for_workers(load_reward, gpus_per_worker) if load_reward else None,
                    say=say,
                )
        except KeyboardInterrupt:
            say(f"usetta: stopped; what was computed is in {out}, and the same command goes on")
            raise typer.Exit(130) from None
        say(f"{done.images} images in {done.seconds:.0f} s, {done.encoded} of them through the image tower")
        with Store(out, create=False) as store:
            Console().print(terminal(accuracy_table(store)))
    if done.bad:
        say(f"usetta: {done.bad} images could not be read and are left out")
        raise typer.Exit(1)
