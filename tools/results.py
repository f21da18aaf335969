"""The results page, README's table and their figure, from the rows in `results`.

    python tools/results.py add RUN NAME    keep the rows of a run as results/NAME.parquet
    python tools/results.py                 write docs/results.md, its figure, README's table, the line of the demo

`make results` does the second. Rows have no images and no paths. Every number on the pages is computed here, from them.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from usetta.bench import CLIP_64
from usetta.data.layouts import imagenet_classes
from usetta.evaluate.metrics import Interval
from usetta.evaluate.store import ResultRow, Store
from usetta.prompts import TEMPLATES
from usetta.report import figures, paper, style
from usetta.report.measured import RunMetrics
from usetta.report.results import differences_table
from usetta.report.tables import format_difference, format_number

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "results"
IMAGENET = "imagenet1000"
IN_README = ("clip", "mta", "zero", "se", "use")
IN_FIGURE = ("mta", "zero", "tpt", "c-tpt", "r-tpt", "rlcf", "tps", "sts", "se", "use")
_FACTS = ("run", "dataset", "device", "recipe")
_COLUMNS = {int: pyarrow.int32(), float: pyarrow.float32(), str: pyarrow.string(), bool: pyarrow.bool_()}


def add(run: Path, name: str) -> None:
    """Keep the rows of a run, and what they depend on except for names and places of files."""
    with Store(run, create=False) as store:
        kept: dict[str, Any] = {kind: store.facts(kind) for kind in _FACTS}
        invocations = list(store.facts("invocation").values())
        rows = [vars(row) for row in store.rows()]
    kept["commands"] = list(dict.fromkeys(_without_places(made["command"]) for made in invocations))
    kept["made"] = {key: invocations[-1][key] for key in ("started", "cpu", "platform", "python", "torch", "pillow")}
    schema = pyarrow.schema(
        [(field.name, _COLUMNS[getattr(field.type, "__args__", (field.type,))[0]]) for field in fields(ResultRow)],
        metadata={"usetta": json.dumps(kept)},
    )
    ROWS.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    parquet.write_table(table, ROWS / f"{name}.parquet", compression="zstd")


def _without_places(command: str) -> str:
    """A command without the places of its files, which are another's."""
    for option, place in (("--data", "DATA"), ("--cache", "CACHE"), ("--out", "RUN")):
        command = re.sub(rf"{option} \S+", f"{option} {place}", command)
    return command


@contextmanager
def opened(name: str) -> Iterator[tuple[Store, dict[str, Any]]]:
    """A kept run as a store, and its facts."""
    table = parquet.read_table(ROWS / f"{name}.parquet")
    facts = json.loads(table.schema.metadata[b"usetta"])
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        store.fix_all((kind, key, value) for kind in _FACTS for key, value in facts[kind].items())
        store.add(ResultRow(**row) for row in table.to_pylist())
        yield store, facts


class MethodResults:
    """What one method did on one dataset, over all seeds."""

    def __init__(self, run: RunMetrics, cells: dict[str, Any] | None, method: str, dataset: str, store: Store) -> None:
        self.method = method
        self.accuracy = run.cell(method, dataset, "top1").value or 0.0
        self.ece = run.cell(method, dataset, "ece").value or 0.0
        self.images = max(measured.images for measured in run.by_seed[dataset, method].values())
        self.gain = None
        if cells is not None:
            self.gain = Interval(*(cells[name].value for name in ("difference", "low", "high")))
            self.p = cells["p"].value if "p" in cells else None
            self.won, self.lost = _won_and_lost(store, dataset, method)

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes no difference."""
        return self.gain is not None and (self.gain.low > 0 or self.gain.high < 0)

    def shown_gain(self) -> str:
        """`+1.9 (0.4 … 3.4)`, bold if the interval does not contain 0."""
        if self.gain is None:
            return "–"
        text = f"{format_difference(self.gain.estimate, 1)} ({_signed(self.gain.low)} … {_signed(self.gain.high)})"
        return f"**{text}**" if self.is_clear else text


def _signed(value: float) -> str:
    return format_number(value, 1).replace("-", "−")


def _won_and_lost(store: Store, dataset: str, method: str) -> tuple[int, int]:
    """Images that only the method has right, and that only zero-shot has right, over all seeds."""
    won = lost = 0
    for found, seed, name, _ in store.groups():
        if (found, name) == (dataset, method):
            ours, theirs = (_right(store, dataset, seed, one) for one in (method, "clip"))
            common = ours.keys() & theirs.keys()
            won += sum(ours[image] and not theirs[image] for image in common)
            lost += sum(theirs[image] and not ours[image] for image in common)
    return won, lost


def _right(store: Store, dataset: str, seed: int, method: str) -> dict[str, bool]:
    columns = store.columns(("image", "label", "prediction"), {"dataset": dataset, "seed": seed, "method": method})
    return {image: a == b for image, a, b in zip(*columns.values(), strict=True)}


def measured(store: Store) -> dict[str, dict[str, MethodResults]]:
    """Results by dataset and method."""
    run = RunMetrics(store, ("top1", "ece"))
    cells = {(row.section, row.name): row.cells for row in differences_table(store).rows}
    return {
        dataset: {
            method: MethodResults(run, cells.get((run.title(dataset), method)), method, dataset, store)
            for method in run.methods
            if (dataset, method) in run.by_seed
        }
        for dataset in run.datasets
    }


def papers_gain(method: str, *, ensemble: bool = False) -> float | None:
    """The paper's gain over zero-shot on ImageNet, ViT-B/16."""
    numbers = [paper.find(name, "imagenet", "ViT-B-16", coop=False, ensemble=ensemble) for name in (method, "clip")]
    ours, zero_shot = (number.value if number else None for number in numbers)
    return None if ours is None or zero_shot is None or method == "clip" else ours - zero_shot


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)) + "\n"


def imagenet_table(results: dict[str, MethodResults], methods: Sequence[str], *, ensemble: bool = False) -> str:
    """Everything that is measured on ImageNet, beside the paper's gain."""
    most = results["clip"].images
    rows = []
    for method in methods:
        one, paper_gain = results[method], papers_gain(method, ensemble=ensemble)
        off = None if one.gain is None or paper_gain is None else one.gain.estimate - paper_gain
        rows.append(
            [
                f"`{method}`" + (f" ({one.images} images)" if one.images < most else ""),
                format_number(one.accuracy, 1),
                one.shown_gain(),
                "–" if one.gain is None or one.p is None else f"{one.p:.3f}",
                "–" if one.gain is None else f"{one.won} / {one.lost}",
                format_number(one.ece, 1),
                "–" if paper_gain is None else format_difference(paper_gain, 1),
                "–" if off is None else format_difference(off, 1),
            ]
        )
    header = ("method", "right, %", "gain (95 % interval)", "p", "won / lost", "ECE, %", "paper's gain", "difference")
    return table(header, rows)


def replaced(text: str, name: str, content: str) -> str:
    """The text with new content between two comments of that name."""
    begin, end = f"<!-- {name}: written by `make results` -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(text), f"{begin} … {end} not found"
    return pattern.sub(lambda _: f"{begin}\n{content}{end}", text)


HEAD = """# Results

<!-- Written by `make results` from the rows in results. -->

What the methods gain over zero-shot, measured with this library and the [embedded model](embedded.md). Its image
encoder is CLIP's, its text encoder is not, so compare gains with the paper's, not accuracies. The 95 % intervals come
from a paired bootstrap over images, p from McNemar's exact test. *Won* are images that only the method has right,
*lost* those that only zero-shot has right. A gain is bold if its interval does not contain 0. Where a method was run on
fewer images, the table says on how many, and the gain is over zero-shot on the same ones.

| | |
|---|---|
| model | {model}, {encoded} |
| images | {images} images of ImageNet, at most one of each class, probably from its training set |
| classes | all 1000, one template: “a photo of a {{}}.” |
| views | {views} (crops and flips), seed {seeds} |
| machine | {machine} |
| date | {date} |
| commands | {commands} |

The rows behind these tables are in `results`; `make results` computes this page from them.

{remarks}
![Gains over zero-shot on ImageNet, points with 95 % intervals](images/results.png)

## ImageNet
"""

README = """
ImageNet with all 1000 classes, {images} images, the [embedded model](docs/embedded.md) in {precision}, 64 views
(crops and flips), seed {seeds}. The gain is in percentage points over zero-shot; it is bold if its interval does not
contain 0.
The cost is the time an image takes with all 64 views on a CPU, relative to zero-shot and to encoding the views alone:

"""

README_FIGURE = """
![Gains over zero-shot on ImageNet with their 95 % intervals](docs/images/results.png)

"""

COMBINED = """## Combinations and ablations on ImageNet

A method and another readout (`tpt+se`), or a method with another setting.
"""

FAILURES = """## Where SE helps, and where it hurts

SE changes an answer mostly where zero-shot is not confident:
"""

ENSEMBLE = """## ImageNet with an ensemble of {count} templates

The class features are means over the paper's {count} templates. With them the paper has only means over ImageNet and
its four relatives, so there are no gains to compare with.
"""


def about(store: Store, facts: dict[str, Any]) -> dict[str, Any]:
    """What the page says of a run."""
    run, made = facts["run"], facts["made"]
    seeds = sorted({seed for _, seed, _, _ in store.groups()})
    precision = run["model"]["precision"]
    return {
        "model": run["model"]["name"],
        "precision": precision,
        "encoded": "weak views in fp32, crops in int8" if precision == "int8" else f"all views in {precision}",
        "views": run["views"]["views"],
        "seeds": ", ".join(map(str, seeds)),
        "machine": f"{made['cpu']} CPU cores, {made['platform']}, PyTorch {made['torch']}, Pillow {made['pillow']}",
        "date": made["started"][:10],
        "commands": "<br>".join(f"`{command}`" for command in facts["commands"]),
    }


def holds(results: dict[str, MethodResults]) -> Iterator[str]:
    """What can be concluded, in sentences."""
    known = {name: one for name, one in results.items() if one.gain is not None}
    better = [name for name, one in known.items() if one.gain.low > 0]
    worse = [name for name, one in known.items() if one.gain.high < 0]
    unclear = [name for name in known if name not in better + worse]
    for names, text in (
        (better, "The interval of the gain lies above 0"),
        (worse, "It lies below 0"),
        (unclear, "It contains 0, so that nothing can be concluded"),
    ):
        yield f"- {text}: {', '.join(f'`{name}`' for name in names) or 'none'}."
    apart = [
        name
        for name, one in known.items()
        if (gain := papers_gain(name)) is not None and not one.gain.low <= gain <= one.gain.high
    ]
    yield f"- The paper's gain lies outside our interval for: {', '.join(f'`{name}`' for name in apart) or 'none'}.\n"


def dataset_table(results: dict[str, MethodResults]) -> str:
    """The results on a dataset whose classes are not the paper's."""
    rows = [
        [f"`{name}`", format_number(one.accuracy, 1), one.shown_gain(), format_number(one.ece, 1)]
        + (["–", "–"] if one.gain is None else ["–" if one.p is None else f"{one.p:.3f}", f"{one.won} / {one.lost}"])
        for name, one in results.items()
    ]
    return table(("method", "right, %", "gain (95 % interval)", "ECE, %", "p", "won / lost"), rows)


def by_confidence(store: Store, method: str) -> str:
    """How often zero-shot and a method are right, by how confident zero-shot is."""
    where = {"dataset": IMAGENET, "seed": 0}
    columns = store.columns(("image", "confidence"), where | {"method": "clip"})
    confidence = dict(zip(columns["image"], columns["confidence"], strict=True))
    zero_shot, ours = (_right(store, IMAGENET, 0, name) for name in ("clip", method))
    rows = []
    for low in range(0, 100, 20):
        images = [image for image in ours if low <= 100 * confidence[image] < low + 20 + (low == 80)]
        right = [sum(one[image] for image in images) for one in (zero_shot, ours)]
        rows.append([f"{low} to {low + 20} %", str(len(images)), *map(str, right), f"{right[1] - right[0]:+d}"])
    return table(("zero-shot is confident by", "images", "zero-shot right", f"{method} right", "difference"), rows)


def lost_images(store: Store, method: str) -> str:
    """What the method answers where only zero-shot is right."""
    names = [one.name for one in imagenet_classes()]
    zero_shot, ours = (_right(store, IMAGENET, 0, name) for name in ("clip", method))
    where = {"dataset": IMAGENET, "seed": 0, "method": method}
    columns = store.columns(("image", "label", "prediction"), where)
    lost = [
        f"{names[label]} → {names[answer]}"
        for image, label, answer in zip(*columns.values(), strict=True)
        if zero_shot[image] and not ours[image]
    ]
    return f"The {len(lost)} images that `{method}` loses (class → answer): {', '.join(lost)}.\n"


def readme_table(results: dict[str, MethodResults], said: dict[str, Any]) -> str:
    """The table near the top of the README."""
    seconds = json.loads((ROWS / "costs.json").read_text(encoding="utf-8"))["seconds"]
    rows = []
    for name in [name for name in IN_README if name in results]:
        one, gain = results[name], papers_gain(name)
        shown = "–" if gain is None else format_difference(gain, 1)
        cost = [f"{seconds[name] / seconds['clip']:.0f} ×", f"{seconds[name] / seconds[CLIP_64]:.2f} ×"]
        rows.append([f"`{name}`", f"{format_number(one.accuracy, 1)} %", one.shown_gain(), shown, *cost])
    header = "method", "accuracy", "gain (95 % interval)", "gain in the paper", "time ÷ zero-shot", "÷ 64 views"
    return README.format(images=results["clip"].images, **said) + table(header, rows) + README_FIGURE


def summary(results: dict[str, MethodResults], facts: dict[str, Any]) -> dict[str, Any]:
    """What `usetta demo` says of the measurement on many images."""
    methods: dict[str, Any] = {}
    most = results["clip"].images
    for name, one in results.items():
        if one.images < most:  # what is said is said of all images
            continue
        methods[name] = {"accuracy": round(one.accuracy, 2)}
        if one.gain is not None:
            gain = {"gain": one.gain.estimate, "low": one.gain.low, "high": one.gain.high}
            methods[name] |= {key: round(value, 2) for key, value in gain.items()}
    return {
        "images": most,
        "model": facts["run"]["model"]["name"],
        "date": facts["made"]["started"][:10],
        "methods": methods,
    }


def write(root: Path) -> None:
    """Write all pages below `root`, which has the old ones."""
    with opened("imagenet") as (store, facts):
        results, said = measured(store)[IMAGENET], about(store, facts)
        confidence = [by_confidence(store, "se"), lost_images(store, "se")]
    drawn = {name: {"ImageNet": results[name].gain} for name in IN_FIGURE if name in results}
    plain = [name for name in results if "+" not in name and ":" not in name]
    combined = [name for name in results if name not in plain]
    remarks = (ROWS / "remarks.md").read_text(encoding="utf-8")
    head = HEAD.format(images=results["clip"].images, remarks=remarks, **said)
    parts = [head, imagenet_table(results, plain), *holds(results)]
    if combined:
        parts += [COMBINED, imagenet_table(results, combined)]
    if (ROWS / "ensemble.parquet").exists():
        with opened("ensemble") as (store, _):
            ensemble = measured(store)[IMAGENET]
        count = len(TEMPLATES["ensemble"])
        parts += [ENSEMBLE.format(count=count), imagenet_table(ensemble, list(ensemble), ensemble=True)]
    for path in sorted(ROWS.glob("fine-grained-*.parquet")):
        with opened(path.stem) as (store, facts_of_dataset):
            for dataset, by_method in measured(store).items():
                title = facts_of_dataset["dataset"][dataset]["title"]
                parts.append(f"## {title}, {by_method['clip'].images} images, AugMix\n")
                parts.append(dataset_table(by_method))
    parts += [FAILURES, *confidence, (ROWS / "failures.md").read_text(encoding="utf-8")]
    (root / "docs" / "results.md").write_text("\n".join(parts), encoding="utf-8")
    figures.gains(drawn).savefig(root / "docs" / "images" / "results.png", dpi=style.DPI, metadata={"Software": None})
    readme = root / "README.md"
    text = replaced(readme.read_text(encoding="utf-8"), "results", readme_table(results, said))
    readme.write_text(text, encoding="utf-8")
    line = root / "src" / "usetta" / "report" / "imagenet_results.json"
    line.write_text(json.dumps(summary(results, facts), indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("add", nargs="*", metavar="add RUN NAME", help="keep the rows of a run")
    given = parser.parse_args().add
    if given and (len(given) != 3 or given[0] != "add"):
        parser.error("expected: add RUN NAME, or nothing")
    if given:
        add(Path(given[1]), given[2])
    else:
        write(ROOT)


if __name__ == "__main__":
    main()
