"""Commands that measure methods on datasets: `eval`, and `merge` for a run whose work was shared out."""

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
    echo,
    read_seeds,
    read_views,
    split,
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
    rank: Rank = None,
    world_size: WorldSize = None,
) -> None:
    """Measure methods on datasets, and print a table. Rerun the same command to resume.

    Unreadable images are reported and left out; the exit code is then 1.
    """
    from rich.console import Console

    from usetta.data import load_datasets
    from usetta.evaluate.merge import shard_folder
    from usetta.evaluate.runner import EvalSettings
    from usetta.evaluate.runner import evaluate as run
    from usetta.evaluate.store import Store
    from usetta.report.results import accuracy_table
    from usetta.report.tables import terminal

    with clear_errors():
        sets = load_datasets(split(datasets), data)
        numbers = read_seeds(seeds)
        where = read_engine(engine, address, workers, cpus_per_worker, gpus_per_worker)
        shard = read_shard(rank, world_size, where)
        computing = {"precision": precision, "device": device, "compiled": compiled}
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        settings = EvalSettings(read_views(views), tuple(template or ()), context, augmix, half_features)
        gpus = where.gpus if where else 0
        loaded = for_driver(load, gpus)()
        loaded_reward = for_driver(load_reward, gpus)() if load_reward else None
        sizes = ", ".join(f"{dataset.name} ({len(dataset)} images)" for dataset in sets)
        echo(f"model: {described(loaded)}; {sizes}")
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
                    shard=shard,
                    load=for_workers(load, gpus),
                    load_reward_model=for_workers(load_reward, gpus) if load_reward else None,
                    log=echo,
                )
        except KeyboardInterrupt:
            echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
            raise typer.Exit(130) from None
        echo(f"{done.images} images in {done.seconds:.0f} s, {done.encoded} of them through the image tower")
        with Store(shard_folder(out, shard), create=False) as store:
            if shard.is_whole or store.groups():  # a shard may have had nothing to do
                Console().print(terminal(accuracy_table(store)))
        if not shard.is_whole:
            echo(f"this is shard {shard.name}; when all are done: usetta merge {out}")
    if done.failed:
        echo(f"usetta: {done.failed} images could not be read and are left out")
        raise typer.Exit(1)


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Merge the shards that are there, even if some are not.")
    ] = False,
) -> None:
    """Put together a run whose work was shared out with --rank and --world-size. Can be repeated at any time."""
    from usetta.evaluate.merge import merge_shards

    with clear_errors():
        done = merge_shards(run, echo, allow_missing=allow_missing)
    if done.missing:
        echo(f"usetta: without the missing shards {', '.join(done.missing)}")
    if done.failed:
        echo(f"usetta: {done.failed} images could not be read and are left out")
    typer.echo(f"{done.shards} shards, {done.new_rows} new rows: {run}")
