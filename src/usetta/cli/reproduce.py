"""The command `reproduce`: a table or figure of the paper, or all of them from an empty directory."""

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
    Protocol,
    Quiet,
    Verbose,
    app,
    clear_errors,
    counted,
    echo,
    is_quiet,
    note,
    print_rows,
    read_seeds,
    warn,
)
from usetta.cli.data import fetch_planned, print_fetched, print_plan
from usetta.cli.engines import (
    Address,
    CpusPerWorker,
    EngineName,
    GpusPerWorker,
    Workers,
    answers_alone,
    for_driver,
    for_workers,
    loader,
    read_engine,
)
from usetta.cli.results import Format, check_format, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from usetta.data import Dataset
    from usetta.distributed import RayEngine
    from usetta.evaluate.runner import EvalSummary
    from usetta.evaluate.store import Store
    from usetta.models import Model
    from usetta.report.reproduce import PaperItem, PaperRun

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
        measuring = _Measuring(precision, device, limit, protocol, context, cache, where)
        if name.lower() == _ALL:
            complete = _reproduce_all(data, model, out, numbers, measuring, train_coop, fetch=fetch, dry_run=dry_run)
            if not complete:
                raise typer.Exit(1)
            return
        item = paper.get(name)
        if item.coop and context is None:
            raise ValueError(f"{item.name} needs a prompt learned by CoOp: give it with --context")
        if context is not None and not item.coop:
            raise ValueError(f"{item.name} does not use a learned prompt: leave out --context")
        sets = _present(item.datasets, data, protocol)
        if item.kind == "size":
            sizes = {dataset.name: (len(dataset), len(dataset.classes)) for dataset in sets}
            print_table(paper.sizes_table(sizes), shape)
            return
        models = (model,) if model else item.models
        for model_name in models:
            folder = _folder(item, model_name, out, alone=len(models) == 1)
            if sets:
                done = measuring.measure(item, item.methods, sets, model_name, folder, numbers or item.seeds)
                failed += done.failed if done else 0
            with Store(folder, create=False) as store:
                complete &= _show(item, store, shape)
    if failed:
        echo(f"usetta: {counted(failed, 'image')} could not be read: left out of the results")
    if failed or not complete:
        raise typer.Exit(1)


class _Measuring:
    """Computes what runs lack, with the options that all of them share."""

    def __init__(
        self,
        precision: str,
        device: str,
        limit: int | None,
        protocol: str,
        context: Path | None,
        cache: Path | None,
        engine: "RayEngine | None",
    ) -> None:
        self.precision, self.device, self.limit, self.protocol = precision, device, limit, protocol
        self.context, self.cache, self.engine = context, cache, engine
        self._loaded: tuple[str, Model] | None = None

    def load(self, name: str) -> "Model":
        """The model of that name; the last one is kept, because the next run usually has the same."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None
            self._loaded = name, for_driver(self._loader(name), self._gpus)()
        return self._loaded[1]

    @property
    def _gpus(self) -> float:
        return self.engine.gpus if self.engine else 0

    def _loader(self, name: str) -> "Callable[..., Model]":
        return loader(name, precision=self.precision, device=self.device)

    def measure(
        self,
        item: "PaperItem",
        methods: "Sequence[str]",
        sets: "Sequence[Dataset]",
        model_name: str,
        out: Path,
        seeds: tuple[int, ...],
    ) -> "EvalSummary | None":
        """Compute what the run in `out` lacks of the answers of methods, if anything; prompts are those of `item`."""
        from dataclasses import replace

        from usetta.evaluate.runner import EvalSettings, evaluate
        from usetta.evaluate.store import FILE, Store
        from usetta.report.reproduce import missing_results

        sizes = {dataset.name: min(len(dataset), self.limit or len(dataset)) for dataset in sets}
        if (out / FILE).is_file():
            asked = replace(item, methods=tuple(methods), datasets=tuple(sizes))
            with Store(out) as store:
                if not missing_results(asked, store, seeds=seeds, images=sizes):
                    return None
        model = self.load(model_name)
        note(f"model: {model.name}, {', '.join(f'{name} ({size} images)' for name, size in sizes.items())}")
        context = self.context if item.coop else None
        try:
            with answers_alone():
                return evaluate(
                    model,
                    sets,
                    _possible(methods, model),
                    out,
                    EvalSettings(templates=item.templates, context=context),
                    seeds=seeds,
                    limit=self.limit,
                    cache=self.cache,
                    engine=self.engine,
                    load=for_workers(self._loader(model_name), self._gpus),
                    log=note,
                )
        except KeyboardInterrupt:
            echo(f"usetta: stopped; what was computed is in {out}; rerun the same command to resume")
            raise typer.Exit(130) from None


# ------------------------------------------------------------------------------------------------------------------ all


def _reproduce_all(
    data: Path | None,
    model: str | None,
    out: Path | None,
    seeds: tuple[int, ...] | None,
    measuring: _Measuring,
    train_coop: Path | None,
    *,
    fetch: bool,
    dry_run: bool,
) -> bool:
    """Everything from nothing; whether all datasets were complete and all images readable."""
    from usetta.data import plan_fetch
    from usetta.report.paper_report import write_paper_report
    from usetta.report.reproduce import paper_runs

    if data is None:
        raise ValueError("reproduce all needs a folder for the datasets: give it with --data")
    if measuring.context and train_coop:
        raise ValueError("choose one of --context and --train-coop")
    base, root = out or Path("runs"), data.expanduser().absolute()
    runs = paper_runs(model=model, coop=bool(measuring.context or train_coop))
    names = list(dict.fromkeys(name for run in runs for name in run.methods))
    plan = [step for step in plan_fetch(names, root) if step.state != "complete"]
    _print_whole_plan(runs, measuring, seeds, to_stdout=dry_run)
    if plan:
        print_plan(plan, root, to_stdout=dry_run)
    if dry_run:
        return True
    complete = True
    if plan and fetch:
        complete = print_fetched(fetch_planned(plan, root))
    root.mkdir(parents=True, exist_ok=True)
    sets = {dataset.name: dataset for dataset in _present(names, root, measuring.protocol)}
    if train_coop:
        measuring.context = _train_coop(train_coop, measuring, model or "ViT-B-16", base)
    folders, failed = {}, 0
    for run in runs:
        folder = _folder(run.item, run.model, None, alone=True, base=base)
        folders[folder] = run
        failed += _measure_run(run, folder, sets, seeds, measuring)
    sizes = {dataset.name: (len(dataset), len(dataset.classes)) for dataset in sets.values()}
    written = write_paper_report(base / "paper", folders, sizes, _remarks(runs, sizes, measuring))
    for name, reason in written.missing.items():
        note(f"{name} {reason}")
    typer.echo(f"tables: {base / 'paper' / 'tables.md'}, {base / 'paper' / 'tables.tex'}")
    typer.echo(f"report: {written.page}")
    if failed:
        echo(f"usetta: {counted(failed, 'image')} could not be read: left out of the results")
    return complete and not failed and len(sets) == len(names)


def _measure_run(
    run: "PaperRun",
    folder: Path,
    sets: "Mapping[str, Dataset]",
    seeds: tuple[int, ...] | None,
    measuring: _Measuring,
) -> int:
    """Measure one dataset after the other, with a table of the accuracies so far after each; returns failed images."""
    from rich.console import Console

    from usetta.evaluate.store import Store
    from usetta.report.paper_report import RunningTable
    from usetta.report.tables import terminal

    failed, running = 0, RunningTable(run)
    chosen = seeds or tuple(dict.fromkeys(seed for item in run.items for seed in item.seeds))
    for name, methods in run.methods.items():
        if name not in sets:
            continue
        done = measuring.measure(run.item, methods, [sets[name]], run.model, folder, chosen)
        if is_quiet():
            failed += done.failed if done else 0
            continue
        with Store(folder, create=False) as store:
            running.add(store, name)
        if done:
            failed += done.failed
            Console(stderr=True).print(terminal(running.table()))
    return failed


def _print_whole_plan(
    runs: "Sequence[PaperRun]", measuring: _Measuring, seeds: tuple[int, ...] | None, *, to_stdout: bool
) -> None:
    """Print images, methods and hours of each run; hours are measured on this machine with a generated image."""
    from usetta import bench
    from usetta.data.named import DATASETS
    from usetta.models import ModelError

    say = typer.echo if to_stdout else note
    methods: dict[str, dict[str, None]] = {}
    for run in runs:
        own = (method for names in run.methods.values() for method in names)
        methods.setdefault(run.model, {}).update(dict.fromkeys(own))
    seconds: dict[str, dict[str, float]] = {}
    for model, names in methods.items():
        job = bench.BenchSettings(model, precision=measuring.precision, device=measuring.device)
        try:
            seconds[model] = bench.seconds_of_methods(job, list(names))
        except (ModelError, OSError, ValueError, RuntimeError) as error:  # no weights, no memory: still a plan
            warn(f"the time of {model} cannot be measured: {error}")
    total = 0.0
    for run in runs:
        images = {name: min(DATASETS.get(name).images, measuring.limit or 10**9) for name in run.methods}
        count = len(seeds or {seed for item in run.items for seed in item.seeds})
        prompt = "CoOp's context" if run.coop else "seven templates" if run.ensemble else "one template"
        number = len({method for names in run.methods.values() for method in names})
        text = f"{run.model}, {prompt}: {sum(images.values()):,} images, {counted(count, 'seed')}, {number} methods"
        if run.model in seconds:
            each = {name: bench.seconds_per_image(seconds[run.model], names) for name, names in run.methods.items()}
            hours = count * sum(images[name] * each[name] for name in images) / 3600
            total += hours
            text += f", about {hours:,.1f} hours"
        say(text)
    say(f"about {total:,.1f} hours on this machine")


def _train_coop(folder: Path, measuring: _Measuring, model: str, base: Path) -> Path:
    """Learn a context from ImageNet's training images, 16 of each class; a finished one is taken as it is."""
    from usetta.coop import train_context
    from usetta.data import DataError
    from usetta.data.layouts import DiskLayout, read_class_folders
    from usetta.feature_cache import FeatureCache
    from usetta.files import cache_dir

    layout = DiskLayout("imagenet", ("imagenet",), ("images/train", "train", ""))
    reading = read_class_folders(layout, folder.expanduser().absolute(), own=True)
    if reading.missing:
        raise DataError(
            f"{len(reading.missing)} classes of {folder} have no training images, such as {reading.missing[0]}"
        )
    dataset, out = reading.dataset, base / "coop-context.safetensors"
    assert dataset.labels is not None
    note(f"learning CoOp's context from {reading.dataset.root}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with FeatureCache(cache_dir() / "coop" / "features") as cache:
        paths = [item.path for item in dataset]
        train_context(measuring.load(model), paths, dataset.labels, dataset.classes, out=out, log=note, cache=cache)
    return out


def _remarks(runs: "Sequence[PaperRun]", sizes: "Mapping[str, object]", measuring: _Measuring) -> list[str]:
    backbones = ", ".join(dict.fromkeys(run.model for run in runs))
    part = f", at most {counted(measuring.limit, 'image')} of each" if measuring.limit else ""
    return [
        f"{backbones}; {len(sizes)} datasets{part}; class names: {measuring.protocol}",
        "Our number, below it the paper's and the difference. A dash is a number that is missing.",
    ]


# ------------------------------------------------------------------------------------------------------------ one item


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


def _present(names: "Sequence[str]", data: Path | None, protocol: str) -> "list[Dataset]":
    """The datasets that are there; the others are reported."""
    from usetta.data import DataError
    from usetta.data.dataset import AbsentError, NoListError
    from usetta.data.named import DATASETS
    from usetta.data.protocols import apply_protocol

    if data is None:
        note("no --data given, so nothing is measured")
        return []
    root = data.expanduser().absolute()
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder" if root.exists() else f"{root} does not exist")
    present, absent = [], []
    for name in names:
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
                present.append(apply_protocol(reading.dataset, protocol))
    if absent:
        note(f"not in {data}: {', '.join(absent)} (see `usetta data check`)")
    return present


def _folder(item: "PaperItem", model: str, out: Path | None, *, alone: bool, base: Path = Path("runs")) -> Path:
    """The directory of a run; what must not be mixed with other prompts or models has one of its own."""
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    if out is not None:
        return out if alone else out / name
    return base / f"paper-{name}{'-coop' if item.coop else '-ensemble' if item.ensemble else ''}"


def _possible(names: "Sequence[str]", model: "Model") -> list[str]:
    """The methods that a model can run; the others are reported."""
    from usetta import methods
    from usetta.models.base import require_last_blocks

    try:
        require_last_blocks(model)
    except ValueError as error:
        without = [method for method in names if methods.get(method).needs_hidden]
        if without:
            warn(f"left out: {', '.join(without)}; {error}")
        return [method for method in names if method not in without]
    return list(names)


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
