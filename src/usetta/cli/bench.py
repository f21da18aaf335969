"""The command that measures cost."""

import json
from typing import Annotated

import typer

from usetta.cli.app import (
    AsJson,
    Compiled,
    Device,
    ModelName,
    Precision,
    Quiet,
    Verbose,
    app,
    clear_errors,
    note,
    split,
)


@app.command()
def bench(
    methods: Annotated[
        str, typer.Option("--methods", "-m", help="Methods, separated by commas. Default: those of the paper.")
    ] = "",
    model: ModelName = "auto",
    precision: Precision = "fp32",
    device: Device = "auto",
    compiled: Compiled = False,
    weights: Annotated[str | None, typer.Option(help="'random' measures an architecture without its weights.")] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.", min=2)] = 100,
    views: Annotated[int, typer.Option(help="Views per image.", min=2)] = 64,
    augmix: Annotated[bool, typer.Option("--augmix/--no-augmix", help="AugMix or plain crops.")] = True,
    repeat: Annotated[int, typer.Option(help="Number of runs; the fastest counts.", min=1)] = 3,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Also measure the memory, with a process per method.")
    ] = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure how long methods take on this machine: the paper's efficiency table, and where the time goes."""
    from dataclasses import asdict

    from rich.console import Console

    from usetta import bench as measuring
    from usetta.models import load_model
    from usetta.report.tables import terminal

    with clear_errors():
        job = measuring.BenchSettings(model, weights, classes, views, augmix, precision, device, compiled)
        costs = measuring.measure(job, split(methods), repeat=repeat, memory=memory, log=note)
        if as_json:
            typer.echo(json.dumps({"job": asdict(job), **asdict(costs)}, indent=1))
            return
        name = model if weights else load_model(model, precision="fp32").name
        for table in (measuring.efficiency_table(costs, job, name), measuring.stages_table(costs)):
            Console().print(terminal(table))
