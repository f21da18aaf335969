"""The command `reproduce`: a table or figure of the paper, or all of them from an empty directory."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from usetta.cli.app import (
    Cache,
    ContextFile,
    Device,
    Limit,
    Precision,
    Protocol,
    Quiet,
    Verbose,
    app,
    clear_errors,
    counted,
    echo,
    note,
    print_rows,
    read_seeds,
)
from usetta.cli.engines import (
    Address,
    CpusPerWorker,
    EngineName,
    GpusPerWorker,
    Workers,
    read_engine,
)
from usetta.cli.measuring import Measuring, present_datasets, run_folder
from usetta.cli.reproduce_all import reproduce_all
from usetta.cli.results import Format, check_format, print_table

if TYPE_CHECKING:
    from usetta.evaluate.store import Store
    from usetta.report.reproduce import PaperItem

_ALL = "all"


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="A table or figure of the paper: table-1, figure-3; or 'all'. Default: list all."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the tables and figures and what they need.")] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder that contains the datasets.", envvar="USETTA_DATA")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Use this model instead of the paper's.")] = None,
    precision: Precision = "fp32",
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Directory of the run. Default: one per model in runs/.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds of the random views, such as 0,1,2. Default: two seeds.")
    ] = None,
    limit: Limit = None,
    protocol: Protocol = "lists",
    context: ContextFile = None,
    train_coop: Annotated[
        Path | None,
        typer.Option("--train-coop", help="With 'all': learn CoOp's context from ImageNet's training images here."),
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch/--no-fetch", help="With 'all': download datasets that are missing.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With 'all': print images, hours and gigabytes, and stop.")
    ] = False,
    cache: Cache = None,
    engine: EngineName = "local",
    address: Address = "auto",
    workers: Workers = None,
    cpus_per_worker: CpusPerWorker = 1,
    gpus_per_worker: GpusPerWorker = 0,
    shape: Format = "terminal",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure a table or figure of the paper and show it beside the paper's numbers; 'all' starts from nothing.

    Missing datasets are named and left out; 'all' downloads them first, and writes an HTML report, tables in Markdown
    and LaTeX, and figures. Rerun the same command to resume.
    """
    from usetta.evaluate.store import Store
    from usetta.report import reproduce as paper

    if listed or name is None:
        _list_items()
        return
    failed, complete = 0, True
    with clear_errors():
        check_format(shape)
        where = read_engine(engine, address, workers, cpus_per_worker, gpus_per_worker)
        numbers = read_seeds(seeds) if seeds else None
        measuring = Measuring(precision, device, limit, protocol, context, cache, where)
        if name.lower() == _ALL:
            complete = reproduce_all(data, model, out, numbers, measuring, train_coop, fetch=fetch, dry_run=dry_run)
            if not complete:
                raise typer.Exit(1)
            return
        item = paper.get(name)
        if item.coop and context is None:
            raise ValueError(f"{item.name} needs a prompt learned by CoOp: give it with --context")
        if context is not None and not item.coop:
            raise ValueError(f"{item.name} does not use a learned prompt: leave out --context")
        sets = present_datasets(item.datasets, data, protocol)
        if item.kind == "size":
            sizes = {dataset.name: (len(dataset), len(dataset.classes)) for dataset in sets}
            print_table(paper.sizes_table(sizes), shape)
            return
        models = (model,) if model else item.models
        for model_name in models:
            folder = run_folder(item, model_name, out, alone=len(models) == 1)
            if sets:
                done = measuring.measure(item, item.methods, sets, model_name, folder, numbers or item.seeds)
                failed += done.failed if done else 0
            with Store(folder, create=False) as store:
                complete &= _show(item, store, shape)
    if failed:
        echo(f"usetta: {counted(failed, 'image')} could not be read: left out of the results")
    if failed or not complete:
        raise typer.Exit(1)


def _list_items() -> None:
    from usetta.report.reproduce import ITEMS

    print_rows(
        [
            {
                "name": item.name,
                "shows": item.shows,
                "model": ", ".join(item.models) or "-",
                "datasets": len(item.datasets),
                "methods": len(item.methods),
                "seeds": len(item.seeds),
                "prompt": "CoOp's context" if item.coop else "7 templates" if item.ensemble else "-",
            }
            for item in ITEMS.values()
        ],
        as_json=False,
    )


def _show(item: "PaperItem", store: "Store", shape: str) -> bool:
    """Print a table, or write a figure and print where; False if there is nothing to draw."""
    from usetta.report.reproduce import as_table

    if item.kind != "figure":
        print_table(as_table(item, store), shape)
        return True
    from usetta.report.paper_figures import as_figures
    from usetta.report.style import save

    drawn = as_figures(item, store)
    for line in drawn.notes:
        note(line)
    for name, figure in drawn.figures.items():
        for path in save(figure, store.folder / name):
            typer.echo(path)
    if not drawn.figures:
        echo(f"usetta: the run in {store.folder} has no results for {item.name}")
    return bool(drawn.figures)
