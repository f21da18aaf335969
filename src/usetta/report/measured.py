"""What a run has measured, by dataset, method and seed: numbers, what they cover, and what to tell about them.

Rows are read for one dataset, seed and method at a time, in the columns that the metrics ask for, and only the metrics
are kept. A number may come from fewer images than its neighbours, because a run is not finished, or from others than
the paper's. Both would look like a result of the method, so both become notes.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from usetta import methods as known_methods
from usetta.data import NamedDataset
from usetta.data.benchmark import BENCHMARKS
from usetta.evaluate.metrics import METRICS, group_means, over_seeds
from usetta.evaluate.store import FailedImage, Store, StoreError
from usetta.methods import FAMILIES
from usetta.methods.recipe import READOUTS
from usetta.report.items import members_of
from usetta.report.tables import Cell, Column

VIEWS = 64
"""Of an image, in the paper."""
_LISTED = 3
"""Bad images of a dataset that a footnote lists."""


class SeriesLook(NamedTuple):
    """How a metric is shown."""

    title: str
    heading: str
    """The same where there is little room."""
    digits: int
    best: Literal["high", "low", "none"]


LOOKS: dict[str, SeriesLook] = {
    "top1": SeriesLook("Accuracy, %", "top-1, %", 2, "high"),
    "top5": SeriesLook("Top-5 accuracy, %", "top-5, %", 2, "high"),
    "ece": SeriesLook("Expected calibration error, %", "ECE, %", 2, "low"),
    "nll": SeriesLook("Negative log-likelihood, nats", "NLL, nats", 3, "low"),
    "brier": SeriesLook("Brier score", "Brier", 3, "low"),
    "skip_ratio": SeriesLook("Images that were not tuned on, %", "skipped, %", 1, "none"),
    "seconds_per_image": SeriesLook("Seconds per image", "s/image", 3, "low"),
}
"""Every metric of `METRICS`."""

MEANS = {"in&o": "IN&O", "ood": "OOD", "fgvc": "FGVC", "avg": "Avg"}
"""Titles of the paper's means."""

_PAPERS: dict[str, NamedDataset] = {benchmark.name: benchmark for benchmark in BENCHMARKS}


@dataclass(frozen=True)
class MeasuredAnswers:
    """One method's answers to a dataset under one seed."""

    images: int
    which: str
    """A hash of the images' ids."""
    values: Mapping[str, float | None]
    """Metrics by name; None where one does not apply, such as the share of skipped images without tuning."""


class Measured:
    """Some metrics of a run, which must have results, or of some datasets and methods of it, which may have none."""

    def __init__(
        self,
        store: Store,
        metrics: Sequence[str],
        datasets: Collection[str] | None = None,
        methods: Collection[str] | None = None,
    ) -> None:
        groups = store.groups()
        if datasets is None and not groups:
            raise StoreError(f"the run in {store.folder} has no results yet")
        self.answers: dict[tuple[str, str], dict[int, MeasuredAnswers]] = {}
        for dataset, seed, method, _ in groups:
            if (datasets is None or dataset in datasets) and (methods is None or method in methods):
                found = _answers(store, dataset, seed, method, metrics)
                self.answers.setdefault((dataset, method), {})[seed] = found
        self.run: dict[str, Any] = store.facts("run")
        self.facts: dict[str, Any] = store.facts("dataset")
        self.datasets = datasets_in_order({dataset for dataset, _ in self.answers})
        self.methods = methods_in_order({method for _, method in self.answers})
        self.seeds = sorted({seed for by_seed in self.answers.values() for seed in by_seed})
        self._bad = [bad for bad in store.bad() if datasets is None or bad.dataset in datasets]
        self._whole = {dataset: self._most(dataset) for dataset in self.datasets}

    @property
    def model(self) -> str:
        return str(self.run.get("model", {}).get("name", "an unknown model"))

    def title(self, dataset: str) -> str:
        """What a dataset is called in tables."""
        return str(self.facts.get(dataset, {}).get("title", papers_title(dataset)))

    def benchmark(self, dataset: str) -> NamedDataset | None:
        """The paper's set of that name, unless this one is a folder that is only called like it."""
        return _PAPERS.get(dataset) if self.facts.get(dataset, {}).get("family") != "other" else None

    def cell(self, method: str, dataset: str, metric: str) -> Cell:
        """Mean and standard deviation over seeds."""
        by_seed = self.answers.get((dataset, method), {})
        values = [answers.values[metric] for answers in by_seed.values()]
        known = [value for value in values if value is not None]
        if not known:
            return Cell()
        spread = over_seeds(known)
        return Cell(spread.mean, spread.std, notes=self.gaps(method, dataset))

    def mean(self, method: str, group: str, metric: str) -> Cell:
        """One of the paper's means, of the numbers that stand in the columns; empty where a dataset is missing."""
        members = [name for name in members_of(group) if self.benchmark(name)]
        cells = {name: self.cell(method, name, metric) for name in members}
        value = group_means({name: cell.value for name, cell in cells.items()})[group]
        if value is None:
            return Cell()
        seeds = {tuple(self.answers[name, method]) for name in members}
        std = None
        if len(seeds) == 1:
            runs = [
                group_means({name: self.answers[name, method][seed].values[metric] for name in members})[group]
                for seed in next(iter(seeds))
            ]
            std = over_seeds([run for run in runs if run is not None]).std
        notes = ("some of its datasets are not finished",) if any(cell.notes for cell in cells.values()) else ()
        return Cell(value, std, notes=notes)

    def column(self, dataset: str, metric: str, *, paper: bool) -> Column:
        look = LOOKS[metric]
        return Column(dataset, self.title(dataset), look.digits, look.best, self.data_notes(dataset, paper=paper))

    def mean_column(self, group: str, metric: str, *, paper: bool) -> Column:
        look = LOOKS[metric]
        there = any(self.mean(method, group, metric).value is not None for method in self.methods)
        differ = there and any(self.data_notes(name, paper=paper) for name in members_of(group))
        notes = ("of datasets with notes of their own",) if differ else ()
        return Column(group, MEANS[group], look.digits, look.best, notes)

    def gaps(self, method: str, dataset: str) -> tuple[str, ...]:
        """What this method's number lacks in comparison with others on the dataset."""
        by_seed = self.answers[dataset, method]
        whole, seeds = self._whole[dataset], self._seeds_of(dataset)
        short = {seed: found.images for seed, found in by_seed.items() if found.images < whole.images}
        notes = []
        if short:
            counts = [f"{n:,}" if len(seeds) == 1 else f"seed {seed}: {n:,}" for seed, n in short.items()]
            notes.append(f"{', '.join(counts)} of {whole.images:,} images")
        if any(found.which != whole.which for seed, found in by_seed.items() if seed not in short):
            notes.append("other images than some of its neighbours, though as many")
        if len(by_seed) < len(seeds):
            notes.append(f"{seeds_text(by_seed)} only")
        return tuple(notes)

    def data_notes(self, dataset: str, *, paper: bool) -> tuple[str, ...]:
        """How the images differ from the whole set, and with `paper` also views and data from the paper's."""
        benchmark, facts, done = self.benchmark(dataset), self.facts.get(dataset, {}), self._whole[dataset].images
        size = facts.get("images", benchmark.images if benchmark else done)
        notes = [f"{done:,} of {size:,} images"] if done < size else []
        if paper and benchmark:
            views = self.run.get("views", {}).get("views", VIEWS)
            usual = FAMILIES[benchmark.family].augmix
            if size != benchmark.images:
                notes.append(f"a set of {size:,} images, in the paper of {benchmark.images:,}")
            if views != VIEWS:
                notes.append(f"{views} views, in the paper {VIEWS}")
            if facts.get("augmix", usual) != usual:
                notes.append("views without AugMix, unlike the paper's" if usual else "AugMix, unlike the paper")
        return tuple(notes)

    def footnotes(self, spread: str | None = "mean ± standard deviation") -> tuple[str, ...]:
        """On seeds (`spread` is what is shown of them), unfinished datasets, and images that could not be read."""
        unfinished = [
            self.title(dataset)
            for dataset in self.datasets
            if any(self.gaps(method, dataset) for method in self.methods if (dataset, method) in self.answers)
        ]
        notes = [f"{spread} over {seeds_text(self.seeds)}"] if spread and len(self.seeds) > 1 else []
        if unfinished:
            notes.append(f"not finished: {', '.join(unfinished)}; some numbers lack images or seeds")
        return (*notes, *self.bad_notes())

    def bad_notes(self) -> list[str]:
        """How many images of each dataset could not be read, and which and why for the first few."""
        by_dataset: dict[str, list[FailedImage]] = {}
        for bad in self._bad:
            by_dataset.setdefault(bad.dataset, []).append(bad)
        notes = []
        for dataset in datasets_in_order(by_dataset):
            found = by_dataset[dataset]
            listed = ", ".join(f"{bad.image} ({bad.reason})" for bad in found[:_LISTED])
            more = f" … and {len(found) - _LISTED:,} more, see `usetta export`" if len(found) > _LISTED else ""
            images = "1 image" if len(found) == 1 else f"{len(found):,} images"
            notes.append(f"{self.title(dataset)}: {images} could not be read: {listed}{more}")
        return notes

    def _most(self, dataset: str) -> MeasuredAnswers:
        """The answers that cover the most images of a dataset."""
        return max(
            (found for (name, _), by_seed in self.answers.items() if name == dataset for found in by_seed.values()),
            key=lambda found: found.images,
        )

    def _seeds_of(self, dataset: str) -> set[int]:
        return {seed for (name, _), by_seed in self.answers.items() if name == dataset for seed in by_seed}


def _answers(store: Store, dataset: str, seed: int, method: str, metrics: Sequence[str]) -> MeasuredAnswers:
    needed = dict.fromkeys(("image", *(column for metric in metrics for column in METRICS[metric][1])))
    stored = store.columns(tuple(needed), {"dataset": dataset, "seed": seed, "method": method})
    values: dict[str, float | None] = {}
    for name in metrics:
        metric, columns = METRICS[name]
        known = not any(None in stored[column] for column in columns)
        values[name] = float(metric(*(stored[column] for column in columns))) if known else None
    images = stored["image"]
    digest = hashlib.blake2b("\n".join(images).encode(), digest_size=16)
    return MeasuredAnswers(len(images), digest.hexdigest(), values)


def papers_title(dataset: str) -> str:
    """What the paper calls one of its datasets; others have their name."""
    return _PAPERS[dataset].title if dataset in _PAPERS else dataset


def datasets_in_order(found: Iterable[str]) -> list[str]:
    """Datasets as the paper lists them, then the others by name."""
    places = {name: place for place, name in enumerate(_PAPERS)}
    return sorted(found, key=lambda name: (places.get(name, len(places)), name))


def methods_in_order(found: Iterable[str]) -> list[str]:
    """Methods as they are listed by name, then the rest of the grid: by method, readout and settings."""
    return sorted(found, key=_place)


def _place(method: str) -> tuple[Any, ...]:
    head, *settings = method.split(":")
    base, _, readout = head.partition("+")
    named, readouts = known_methods.names(), ["", *READOUTS]
    return (
        method not in named,
        named.index(base) if base in named else len(named),
        readouts.index(readout) if readout in readouts else len(readouts),
        [_setting(each) for each in settings],
        method,
    )


def _setting(text: str) -> tuple[str, float, str]:
    """`steps=10` after `steps=2`."""
    name, _, value = text.partition("=")
    try:
        return name, float(value), ""
    except ValueError:
        return name, float("inf"), value


def seeds_text(seeds: Iterable[int]) -> str:
    """Some seeds in words."""
    found = sorted(seeds)
    return f"seed{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
