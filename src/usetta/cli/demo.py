"""The command that shows what the methods do on real images."""

import time
from pathlib import Path
from typing import Annotated

import typer

from usetta.cli.app import ModelName, Quiet, Verbose, app, clear_errors, described, note, print_rows


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report.")] = Path("demo-report"),
    methods: Annotated[
        str, typer.Option(help="Methods, separated by commas; the others are compared with the first.")
    ] = "clip,se,use",
    model: ModelName = "embedded",
    # With 64 it takes twice as long; SE gains 0 or 1.2 points by that on 500 other images, depending on class names.
    views: Annotated[
        int,
        typer.Option(help="Views per image at most; an image gets fewer where the first ones agree.", min=2, max=1024),
    ] = 24,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Classify 70 real ImageNet images with several methods and write an HTML report."""
    from usetta import demo as demonstration
    from usetta import methods as known_methods
    from usetta.evaluate.store import Store

    started = time.perf_counter()
    with clear_errors():
        names = list(dict.fromkeys(known_methods.get(name).name for name in methods.split(",")))
        images = demonstration.demo_dataset(note)
        loaded = demonstration.load_demo_model(model)
        note(f"model: {described(loaded)}; {len(images)} images, {len(images.classes)} class names")
        run = demonstration.measure(loaded, images, names, views, out / "run")
        with Store(out / "run", create=False) as store:
            answers = demonstration.read_answers(store, images, names)
            page = demonstration.write_pages(store, images, answers, out)
    changed = [answer for answer in answers if answer.change != "same"]
    if changed:
        typer.echo(f"images whose answer changed, {len(changed)} of {len(answers)}:")
        print_rows(
            [
                {"image": images.classes[answer.image.label]}
                | {
                    name: ("✓" if answer.is_right(name) else f"✗ {images.classes[row.prediction]}")
                    + f" {row.confidence:.0%}"
                    for name, row in answer.rows.items()
                }
                for answer in changed
            ],
            as_json=False,
        )
        typer.echo()
    print_rows(
        [
            {
                "method": result.method,
                "accuracy (95 % interval)": demonstration.percent(result.accuracy),
                f"gain over {names[0]}": "–" if result.method == names[0] else demonstration.points(result.gain),
                "won": result.won,
                "lost": result.lost,
            }
            for result in demonstration.summarize(answers)
        ],
        as_json=False,
    )
    typer.echo(f"views: {demonstration.mean_views(answers):.1f} per image on average, at most {views}")
    cached = "" if run.encoded else ", with features from the cache" if run.images else ", with answers of the last run"
    typer.echo(f"time: {time.perf_counter() - started:.0f} s for {len(answers)} images{cached}")
    typer.echo(f"{len(answers)} images are too few to say which method is better.")
    typer.echo(demonstration.measured_results(names))
    typer.echo(f"report: {page}")
