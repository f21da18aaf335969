"""The command that measures methods on datasets."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import (
    Cache,
    Compiled,
    ContextFile,
    Device,
    Limit,
    ModelName,
    Precision,
    RewardModel,
    Templates,
    ViewCount,
    app,
    clear_errors,
    described,
    read_seeds,
    read_views,
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
    device: Device = "auto",
    compiled: Compiled = False,
    seeds: Annotated[str, typer.Option(help="Seeds of the views.")] = "0",
    template: Templates = None,
    context: ContextFile = None,
    reward_model: RewardModel = None,
    views: ViewCount = "64",
    augmix: Annotated[
        bool | None, typer.Option("--augmix/--no-augmix", help="AugMix, or crops only; by default as in the paper.")
    ] = None,
    limit: Limit = None,
    cache: Cache = None,
    half_features: Annotated[
        bool, typer.Option("--half-features", help="Round features to half precision: half the space in the cache.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="Images that go through a method together; default: 1 on a CPU, else 8.", min=1)
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that decode images and make views.", min=1)] = 2,
    engine: EngineName = "local",
    address: Address = "auto",
    workers: Workers = None,
    cpus_per_worker: CpusPerWorker = 1,
    gpus_per_worker: GpusPerWorker = 0,
) -> None:
    """Measure methods on datasets, and print a table. Rerun the same command to resume.

    Unreadable images are reported and left out; the exit code is then 1.
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
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        settings = EvalSettings(read_views(views), tuple(template or ()), context, augmix, half_features)
        loaded, loaded_reward = load(), load_reward() if load_reward else None
        sizes = ", ".join(f"{dataset.name} ({len(dataset)} images)" for dataset in sets)
        say(f"model: {described(loaded)}; {sizes}")
        try:
            with answers_alone():
                done = run(
                    loaded,
                    sets,
                    split(methods),
                    out,
                    settings,
                    seeds=numbers,
                    limit=limit,
                    reward_model=loaded_reward,
                    cache=cache,
                    batch_size=batch_size,
                    threads=threads,
                    engine=where,
                    load=for_workers(load, gpus_per_worker),
                    load_reward_model=for_workers(load_reward, gpus_per_worker) if load_reward else None,
                    log=say,
                )
        except KeyboardInterrupt:
            say(f"usetta: stopped; what was computed is in {out}, rerun the same command to resume")
            raise typer.Exit(130) from None
        say(f"{done.images} images in {done.seconds:.0f} s, {done.encoded} of them through the image tower")
        with Store(out, create=False) as store:
            Console().print(terminal(accuracy_table(store)))
    if done.failed:
        say(f"usetta: {done.failed} images could not be read and are left out")
        raise typer.Exit(1)
