"""Commands about the results of runs: tables, rows for other programs, reports, and the paper's tables and figures."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from usetta.cli.app import (
    Cache,
    ContextFile,
    Device,
    Limit,
    Precision,
    Quiet,
    Verbose,
    app,
    clear_errors,
    counted,
    echo,
    note,
    print_rows,
    read_seeds,
    warn,
)
from usetta.cli.engines import loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from usetta.data import Dataset
    from usetta.evaluate.runner import EvalSummary
    from usetta.evaluate.store import Store
    from usetta.models import Model
    from usetta.report.reproduce import PaperItem
    from usetta.report.tables import Table

Run = Annotated[Path, typer.Argument(help="Directory of a run.", metavar="RUN")]
Format = Annotated[str, typer.Option("--format", "-f", help="terminal, markdown, latex, csv or json.")]


@app.command()
def table(
    run: Run,
    shape: Format = "terminal",
    metric: Annotated[
        str | None,
        typer.Option(
            help="top1 (the default), top5, ece, ece20, aece, aurc, nll, brier, skip_ratio, seconds_per_image."
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", "-d", help="Show all metrics on this dataset.")] = None,
    metrics: Annotated[
        bool,
        typer.Option(
            "--metrics", help="Show calibration, selective accuracy, out-of-distribution detection and stability."
        ),
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(help="Show differences from this method, with confidence intervals: in accuracy, or --metrics."),
    ] = None,
    no_paper: Annotated[bool, typer.Option("--no-paper", help="Leave out the paper's numbers.")] = False,
) -> None:
    """Show the results of a run as a table."""
    from usetta.evaluate.store import Store
    from usetta.report.results import accuracy_table, differences_table, metrics_table
    from usetta.report.trust import trust_table

    with clear_errors():
        _check_format(shape)
        if sum(option is not None for option in (metric, dataset, baseline)) > 1:
            raise ValueError("choose one of --metric, --dataset and --baseline")
        with Store(run, create=False) as store:
            if metrics:
                if metric is not None or dataset is not None:
                    raise ValueError("--metrics shows all metrics on all datasets: leave out --metric and --dataset")
                shown = trust_table(store, baseline)
            elif dataset is not None:
                shown = metrics_table(store, dataset)
            elif baseline is not None:
                shown = differences_table(store, baseline)
            else:
                shown = accuracy_table(store, metric=metric or "top1", paper=not no_paper)
        _print(shown, shape)


@app.command()
def export(
    run: Run,
    file: Annotated[Path, typer.Argument(help="File to write: .parquet, .csv, .json or .jsonl.", metavar="FILE")],
) -> None:
    """Export a run to a file with one row for each image, seed and method."""
    from usetta.evaluate.export import export as write
    from usetta.evaluate.store import Store

    with clear_errors(), Store(run, create=False) as store:
        count = write(store, file)
    typer.echo(f"{count} rows: {file}")


@app.command()
def calibrate(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("calibration.json"),
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="Method of the run. Default: the only one that it has.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", "-d", help="Use only this dataset of the run. Default: all.")
    ] = None,
    accuracy: Annotated[
        float, typer.Option(help="Share of the answers that are kept that must be right.", min=0, max=1)
    ] = 0.9,
) -> None:
    """Fit when to trust an answer: a temperature, and a threshold below which answers are rejected.

    The run is one of `usetta eval`, whose labels are known. `usetta classify --calibration FILE` uses what is written.
    """
    from usetta.evaluate.calibrate import calibrate as fit
    from usetta.evaluate.store import Store

    with clear_errors():
        with Store(run, create=False) as store:
            fitted = fit(store, method, dataset, accuracy)
        fitted.calibration.save(out)
    known = fitted.calibration
    typer.echo(f"{known.method} by {known.model}, {counted(known.images, 'answer')}")
    typer.echo(
        f"temperature {known.temperature:.3f}: calibration error {fitted.ece_before:.1f} -> {fitted.ece_after:.1f}"
    )
    typer.echo(
        f"threshold {known.reject_below:.3f}: {known.kept:.1%} of the answers are kept, and {known.accuracy:.1%} of "
        f"these are right; of all, {fitted.accuracy_of_all:.1%}"
    )
    typer.echo(f"written: {out}")


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A table or figure of the paper: table-1, figure-3. Default: list all.")
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
    context: ContextFile = None,
    cache: Cache = None,
    shape: Format = "terminal",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure a table or figure of the paper and show it beside the paper's numbers.

    Missing datasets are named and left out. Rerun the same command to resume.
    """
    from usetta.evaluate.store import Store
    from usetta.report import reproduce as paper

    if listed or name is None:
        _list_items()
        return
    failed, drawn = 0, True
    with clear_errors():
        _check_format(shape)
        item = paper.get(name)
        numbers = read_seeds(seeds) if seeds else item.seeds
        if item.coop and context is None:
            raise ValueError(f"{item.name} needs a prompt learned by CoOp: give it with --context")
        if context is not None and not item.coop:
            raise ValueError(f"{item.name} does not use a learned prompt: leave out --context")
        sets = _present(item, data)
        if item.kind == "size":
            _print(paper.sizes_table({dataset.name: (len(dataset), len(dataset.classes)) for dataset in sets}), shape)
            return
        models = (model,) if model else item.models
        for model_name in models:
            folder = _folder(item, model_name, out, alone=len(models) == 1)
            if sets:
                load = loader(model_name, precision=precision, device=device)
                done = _measure(item, sets, load, folder, numbers, limit, context, cache)
                failed += done.failed if done else 0
            with Store(folder, create=False) as store:
                drawn &= _show(item, store, shape)
    if failed:
        echo(f"usetta: {counted(failed, 'image')} could not be read: left out of the results")
    if failed or not drawn:
        raise typer.Exit(1)


@app.command()
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: RUN/report.html.")] = None,
    baseline: Annotated[str, typer.Option(help="Method to compare the others with.")] = "clip",
    shown: Annotated[
        int, typer.Option(help="How many corrected images to show, and how many spoiled ones.", min=0)
    ] = 12,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a report of a run in one HTML file: tables, figures, and the images whose answers changed most."""
    from usetta.evaluate.store import Store
    from usetta.report.run import write_report

    with clear_errors(), Store(run, create=False) as store:
        path = write_report(store, out or run / "report.html", baseline=baseline, shown=shown, log=note)
    typer.echo(f"report: {path}")


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


def _check_format(shape: str) -> None:
    from usetta.report.tables import FORMATS

    known = ("terminal", *FORMATS)
    if shape not in known:
        raise ValueError(f"unknown format {shape!r}; known: {', '.join(known)}")


def _print(table: "Table", shape: str) -> None:
    from usetta.report.tables import FORMATS, terminal

    if shape == "terminal":
        from rich.console import Console

        Console().print(terminal(table))
    else:
        typer.echo(FORMATS[shape](table), nl=False)


def _present(item: "PaperItem", data: Path | None) -> "list[Dataset]":
    """The datasets that are there; the others are reported."""
    from usetta.data import DataError
    from usetta.data.dataset import AbsentError, NoListError
    from usetta.data.named import DATASETS

    if data is None:
        note("no --data given, so nothing is measured")
        return []
    root = data.expanduser().absolute()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder" if root.exists() else f"{root} does not exist")
    present, absent = [], []
    for name in item.datasets:
        try:
            reading = DATASETS.get(name).read(root)
        except (AbsentError, NoListError):
            absent.append(name)
        except DataError as error:
            warn(f"left out: {error}")
        else:
            if reading.missing:
                warn(f"left out: {name} is incomplete; the first missing file is {reading.missing[0]}")
            else:
                present.append(reading.dataset)
    if absent:
        note(f"not in {data}: {', '.join(absent)} (see `usetta data check`)")
    return present


def _folder(item: "PaperItem", model: str, out: Path | None, *, alone: bool) -> Path:
    """The directory of a run; what must not be mixed with other prompts or models has one of its own."""
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    if out is not None:
        return out if alone else out / name
    return Path("runs") / f"paper-{name}{'-coop' if item.coop else '-ensemble' if item.ensemble else ''}"


def _measure(
    item: "PaperItem",
    sets: "list[Dataset]",
    load: "Callable[[], Model]",
    out: Path,
    seeds: tuple[int, ...],
    limit: int | None,
    context: Path | None,
    cache: Path | None,
) -> "EvalSummary | None":
    """Compute what the run lacks, if anything."""
    from usetta.evaluate.runner import EvalSettings, evaluate
    from usetta.evaluate.store import FILE, Store
    from usetta.report.reproduce import missing_results

    sizes = {dataset.name: min(len(dataset), limit or len(dataset)) for dataset in sets}
    if (out / FILE).is_file():
        with Store(out) as store:
            missing = missing_results(item, store, seeds=seeds, images=sizes)
        if not any(result.dataset in sizes for result in missing):
            return None
    loaded = load()
    methods = _possible(item, loaded)
    note(f"model: {loaded.name}, {', '.join(f'{name} ({size} images)' for name, size in sizes.items())}")
    try:
        return evaluate(
            loaded,
            sets,
            methods,
            out,
            EvalSettings(templates=item.templates, context=context),
            seeds=seeds,
            limit=limit,
            cache=cache,
            log=note,
        )
    except KeyboardInterrupt:
        echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
        raise typer.Exit(130) from None


def _possible(item: "PaperItem", model: "Model") -> list[str]:
    """The methods of an item that a model can run; the others are reported."""
    from usetta import methods
    from usetta.models.base import require_last_blocks

    try:
        require_last_blocks(model)
    except ValueError as error:
        without = [method for method in item.methods if methods.get(method).needs_hidden]
        if without:
            warn(f"left out: {', '.join(without)}; {error}")
        return [method for method in item.methods if method not in without]
    return list(item.methods)


def _show(item: "PaperItem", store: "Store", shape: str) -> bool:
    """Print a table, or write a figure and print where; False if there is nothing to draw."""
    from usetta.report.reproduce import as_table

    if item.kind != "figure":
        _print(as_table(item, store), shape)
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
