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
    Protocol,
    Quiet,
    RewardModel,
    Templates,
    Verbose,
    ViewCount,
    app,
    clear_errors,
    counted,
    described,
    echo,
    note,
    read_seeds,
    read_views,
    split,
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


@app.command("eval")
def evaluate(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of the run. Rerun the same command to resume.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of one or several datasets.", envvar="USETTA_DATA")
    ] = None,
    datasets: Annotated[
        str,
        typer.Option("--datasets", "-d", help="Names, folders or lists of images: 'dtd,pets'. Default: all in --data."),
    ] = "",
    methods: Annotated[
        str, typer.Option("--methods", "-m", help="Methods to compare, separated by commas.")
    ] = "clip,se,use",
    model: ModelName = "auto",
    precision: Precision = "fp32",
    device: Device = "auto",
    compiled: Compiled = False,
    seeds: Annotated[str, typer.Option(help="Seeds of the random views, separated by commas.")] = "0",
    order: Annotated[
        str,
        typer.Option(help="Order of the images for methods with a memory: shuffled, class-blocks:10 or dirichlet:0.1."),
    ] = "shuffled",
    order_seeds: Annotated[str, typer.Option(help="Seeds of that order, separated by commas.")] = "0",
    ood: Annotated[
        str, typer.Option(help="Datasets of other classes, to measure how well methods notice: 'dtd'. Default: none.")
    ] = "",
    template: Templates = None,
    context: ContextFile = None,
    reward_model: RewardModel = None,
    views: ViewCount = "64",
    augmix: Annotated[
        bool | None,
        typer.Option(
            "--augmix/--no-augmix", help="AugMix or plain crops. Default: as the paper does for each dataset."
        ),
    ] = None,
    limit: Limit = None,
    family: Annotated[
        str,
        typer.Option(
            help="Settings of methods, and AugMix, as the paper has them for 'imagenet', 'fine-grained' or 'other' "
            "datasets. Default: by the name of the dataset."
        ),
    ] = "",
    protocol: Protocol = "lists",
    cache: Cache = None,
    half_features: Annotated[
        bool, typer.Option("--half-features", help="Round features to half precision, which halves the cache.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(help="Images per batch of a method. Default: 1 on a CPU, else 8.", min=1)
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that decode images and make views.", min=1)] = 2,
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
    """Measure the accuracy of methods on datasets and print a table. Rerun the same command to resume.

    Unreadable images are reported and left out; the exit code is then 1.
    """
    from rich.console import Console

    from usetta import methods as known_methods
    from usetta.adaptive import most_views
    from usetta.coop import template_of
    from usetta.data import load_datasets
    from usetta.data.protocols import apply_protocol
    from usetta.episode import check_without_model
    from usetta.evaluate.merge import shard_folder
    from usetta.evaluate.orders import StreamOrder
    from usetta.evaluate.runner import EvalSettings
    from usetta.evaluate.runner import evaluate as run
    from usetta.evaluate.store import Store
    from usetta.prompts import DEFAULT_TEMPLATE
    from usetta.report.results import accuracy_table
    from usetta.report.tables import terminal

    with clear_errors():
        sets = [apply_protocol(dataset, protocol) for dataset in load_datasets(split(datasets), data)]
        if family:
            sets = [dataset.as_family(family) for dataset in sets]
        numbers, orders = read_seeds(seeds), read_seeds(order_seeds, "--order-seeds")
        others = load_datasets(split(ood), data) if split(ood) else []
        StreamOrder.parse(order)  # before a model is loaded
        where = read_engine(engine, address, workers, cpus_per_worker, gpus_per_worker)
        shard = read_shard(rank, world_size, where)
        computing = {"precision": precision, "device": device, "compiled": compiled}
        load, load_reward = loader(model, **computing), loader(reward_model, **computing) if reward_model else None
        settings = EvalSettings(read_views(views), tuple(template or ()), context, augmix, half_features)
        templates = template or [template_of(context) if context else DEFAULT_TEMPLATE]
        names = split(methods)
        if not names:
            raise ValueError("no methods given")
        for name in names:
            recipes = {known_methods.get(name, family=known.family, dataset=known.name) for known in sets}
            for recipe in recipes:
                check_without_model(recipe, most_views(settings.views), templates)
        gpus = where.gpus if where else 0
        loaded = for_driver(load, gpus)()
        loaded_reward = for_driver(load_reward, gpus)() if load_reward else None
        sizes = ", ".join(f"{dataset.name} ({counted(len(dataset), 'image')})" for dataset in sets)
        note(f"model: {described(loaded)}; {sizes}")
        try:
            with answers_alone():
                done = run(
                    loaded,
                    sets,
                    names,
                    out,
                    settings,
                    seeds=numbers,
                    order=order,
                    order_seeds=orders,
                    ood=others,
                    limit=limit,
                    reward_model=loaded_reward,
                    cache=cache,
                    batch_size=batch_size,
                    threads=threads,
                    engine=where,
                    shard=shard,
                    load=for_workers(load, gpus),
                    load_reward_model=for_workers(load_reward, gpus) if load_reward else None,
                    log=note,
                )
        except KeyboardInterrupt:
            echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
            raise typer.Exit(130) from None
        encoded = f", {done.encoded} of them encoded" if cache else ""
        note(f"{counted(done.images, 'image')} in {done.seconds:.0f} s{encoded}")
        with Store(shard_folder(out, shard), create=False) as store:
            if shard.is_whole or store.groups():  # a shard may have had nothing to do
                Console().print(terminal(accuracy_table(store)))
        if not shard.is_whole:
            note(f"this is shard {shard.name}; when all shards are done, run: usetta merge {out}")
    if done.failed:
        echo(f"usetta: {counted(done.failed, 'image')} could not be read: left out of the results")
        raise typer.Exit(1)


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Merge the finished shards even if others are missing.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Merge the shards of a run that several processes computed (--rank, --world-size). Can be repeated."""
    from usetta.evaluate.merge import merge_shards

    with clear_errors():
        done = merge_shards(run, note, allow_missing=allow_missing)
    if done.missing:
        warn(f"missing shards: {', '.join(done.missing)}")
    if done.failed:
        echo(f"usetta: {counted(done.failed, 'image')} could not be read: left out of the results")
    typer.echo(f"{done.shards} shards, {done.new_rows} new rows: {run}")
