"""`usetta reproduce all`: every table and figure of the paper from an empty directory."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from usetta.cli.app import counted, echo, is_quiet, note, warn
from usetta.cli.data import fetch_planned, print_fetched, print_plan
from usetta.cli.measuring import Measuring, present_datasets, run_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from usetta.data import Dataset
    from usetta.report.reproduce import PaperRun


def reproduce_all(
    data: Path | None,
    model: str | None,
    out: Path | None,
    seeds: tuple[int, ...] | None,
    measuring: Measuring,
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
    sets = {dataset.name: dataset for dataset in present_datasets(names, root, measuring.protocol)}
    if train_coop:
        measuring.context = _train_coop(train_coop, measuring, model or "ViT-B-16", base)
    folders, failed = {}, 0
    for run in runs:
        folder = run_folder(run.item, run.model, None, alone=True, base=base)
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
    measuring: Measuring,
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
    runs: "Sequence[PaperRun]", measuring: Measuring, seeds: tuple[int, ...] | None, *, to_stdout: bool
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
            text += f", about {_duration(hours)}"
        say(text)
    if seconds:
        unknown = [model for model in methods if model not in seconds]
        without = f", without {', '.join(unknown)}" if unknown else ""
        say(f"about {_duration(total)} on this machine{without}")


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else counted(max(round(60 * hours), 1), "minute")


def _train_coop(folder: Path, measuring: Measuring, model: str, base: Path) -> Path:
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


def _remarks(runs: "Sequence[PaperRun]", sizes: "Mapping[str, object]", measuring: Measuring) -> list[str]:
    backbones = ", ".join(dict.fromkeys(run.model for run in runs))
    part = f", at most {counted(measuring.limit, 'image')} of each" if measuring.limit else ""
    return [
        f"{backbones}; {len(sizes)} datasets{part}; class names: {measuring.protocol}",
        "Our number, below it the paper's and the difference. A dash is a number that is missing.",
    ]
