"""The command that measures cost."""

import json
from typing import Annotated

import typer

from usetta.cli.app import AsJson, Compiled, Device, ModelName, Precision, app, clear_errors, echo, split


@app.command()
def bench(
    methods: Annotated[str, typer.Option("--methods", "-m", help="Methods; by default those of the paper.")] = "",
    model: ModelName = "auto",
    precision: Precision = "fp32",
    device: Device = "auto",
    compiled: Compiled = False,
    weights: Annotated[
        str | None, typer.Option(help="'random', to measure an architecture without its weights.")
    ] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.", min=2)] = 100,
    views: Annotated[int, typer.Option(help="Views per image.", min=2)] = 64,
    augmix: Annotated[bool, typer.Option("--augmix/--no-augmix", help="AugMix, or crops only.")] = True,
    repeat: Annotated[int, typer.Option(help="Runs, of which the shortest counts.", min=1)] = 3,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Also measure memory, in a process for each method.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Measure what methods cost on this machine: the paper's efficiency table, and where the time goes."""
    from dataclasses import asdict

    from rich.console import Console

    from usetta import bench as measuring
    from usetta.models import load_model
    from usetta.report.tables import terminal

    with clear_errors():
        job = measuring.BenchSettings(model, weights, classes, views, augmix, precision, device, compiled)
        costs = measuring.measure(job, split(methods), repeat=repeat, memory=memory, log=echo)
        if as_json:
            typer.echo(json.dumps({"job": asdict(job), **asdict(costs)}, indent=1))
            return
        name = model if weights else load_model(model, precision="fp32").name
        for table in (measuring.efficiency_table(costs, job, name), measuring.stages_table(costs)):
            Console().print(terminal(table))
