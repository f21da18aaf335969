"""The command that shows what the methods do on real images."""

from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import ModelName, Quiet, Verbose, app, clear_errors, note, print_rows


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report.")] = Path("demo-report"),
    methods: Annotated[str, typer.Option(help="Methods to compare, separated by commas.")] = "clip,se,tpt,use",
    model: ModelName = "embedded",
    views: Annotated[int, typer.Option(help="Views per image; the paper uses 64.", min=2, max=1024)] = 32,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Classify a dozen real images with several methods and write an HTML report."""
    from usetta import demo as demonstration
    from usetta import methods as known_methods
    from usetta.models import load_model

    with clear_errors():
        names = list(dict.fromkeys(known_methods.get(name).name for name in methods.split(",")))
        images = demonstration.demo_dataset(note)
        loaded = load_model(model, precision="fp32")
        note(f"model: {loaded.name}, {views} views of each of {len(images)} images")
        demonstration.measure(loaded, images, names, views, out / "run")
        answers = list(demonstration.answers(loaded, images, names, views))
        page = demonstration.write_pages(answers, out, loaded, views)
    print_rows(
        [
            {"image": answer.image.shows}
            | {
                name: ("✓" if answer.is_right(name) else f"✗ {explanation.prediction.label}")
                + f" {explanation.prediction.confidence:.0%}"
                for name, explanation in answer.by_method.items()
            }
            for answer in answers
        ],
        as_json=False,
    )
    for name in names:
        skipped = sum(answer.by_method[name].prediction.skipped is True for answer in answers)
        left = f", {skipped} not tuned because their views already agree" if skipped else ""
        typer.echo(f"{name}: {sum(answer.is_right(name) for answer in answers)} of {len(answers)} correct{left}")
    typer.echo(f"report: {page}")
