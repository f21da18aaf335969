"""The metrics of a run by dataset, method and seed, and what a table must say about them.

Rows are read for one dataset, seed and method at a time, only the columns that the metrics need, and only the metrics
are kept: a run may have millions of rows. A number may cover fewer images than its neighbours, because a run is not
finished, or other images than the paper's. Both would look like a property of the method, so both become notes.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from usetta import methods as known_methods
from usetta.data import NamedDataset
from usetta.data.benchmark import BENCHMARKS
from usetta.data.protocols import protocol_note
from usetta.evaluate.metrics import METRICS, Spread, group_means, members_of, over_seeds
from usetta.evaluate.store import FailedImage, Store, StoreError
from usetta.methods import FAMILIES
from usetta.methods.recipe import READOUTS
from usetta.report.tables import Cell, Column

VIEWS = 64
"""Views of an image in the paper."""
_LISTED = 3
"""Failed images of a dataset that a footnote lists by name."""


_OVER_ORDERS = "±: over the orders of the stream"


class MetricFormat(NamedTuple):
    """How a metric is shown in tables."""

    title: str
    heading: str
    """A shorter title, for a column."""
    digits: int
    best: Literal["high", "low", "none"]


METRIC_FORMATS: dict[str, MetricFormat] = {
    "top1": MetricFormat("Accuracy, %", "top-1, %", 2, "high"),
    "top5": MetricFormat("Top-5 accuracy, %", "top-5, %", 2, "high"),
    "ece": MetricFormat("Expected calibration error (15 bins), %", "ECE, %", 2, "low"),
    "ece20": MetricFormat("Expected calibration error (20 bins), %", "ECE-20, %", 2, "low"),
    "aece": MetricFormat("Adaptive calibration error (15 bins), %", "AECE, %", 2, "low"),
    "aurc": MetricFormat("Area under the risk–coverage curve, %", "AURC, %", 2, "low"),
    "acc80": MetricFormat("Accuracy of the most confident 80 %, %", "acc@80, %", 2, "high"),
    "nll": MetricFormat("Negative log-likelihood, nats", "NLL, nats", 3, "low"),
    "brier": MetricFormat("Brier score", "Brier", 3, "low"),
    "skip_ratio": MetricFormat("Images that were not tuned on, %", "skipped, %", 1, "none"),
    "seconds_per_image": MetricFormat("Seconds per image", "s/image", 3, "low"),
}
"""Every metric of `METRICS`."""

MEANS = {"in&o": "IN&O", "ood": "OOD", "fgvc": "FGVC", "avg": "Avg"}
"""Titles of the paper's means."""

_BENCHMARKS: dict[str, NamedDataset] = {benchmark.name: benchmark for benchmark in BENCHMARKS}


@dataclass(frozen=True)
class SeedMetrics:
    """One method's metrics on a dataset under one seed."""

    images: int
    images_hash: str
    """Of the images' ids: equal counts may still be different images."""
    values: Mapping[str, float | None]
    """Metrics by name; None where one does not apply, such as the share of skipped images without tuning. Of a stream,
    the means over its orders."""
    by_order: Mapping[int, Mapping[str, float | None]]
    """The same by the seed of the order, if there are several."""


class RunMetrics:
    """Metrics of a run, which must have results; or of given datasets and methods, which may have none."""

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
        self.by_seed: dict[tuple[str, str], dict[int, SeedMetrics]] = {}
        """By (dataset, method), then by seed."""
        for dataset, seed, method, _ in groups:
            if (datasets is None or dataset in datasets) and (methods is None or method in methods):
                measured = _measure(store, dataset, seed, method, metrics)
                self.by_seed.setdefault((dataset, method), {})[seed] = measured
        self.settings: dict[str, Any] = store.facts("run")
        """What the whole run depends on: model, views, prompt."""
        self.facts: dict[str, Any] = store.facts("dataset")
        self._classes = store.facts("classes")
        self._device = store.facts("device").get("model")
        self.datasets = sorted_datasets({dataset for dataset, _ in self.by_seed})
        self.methods = sorted_methods({method for _, method in self.by_seed})
        self.seeds = sorted({seed for by_seed in self.by_seed.values() for seed in by_seed})
        self._failed = [image for image in store.failed_images() if datasets is None or image.dataset in datasets]
        self._largest = {dataset: self._most_images(dataset) for dataset in self.datasets}

    @property
    def model(self) -> str:
        return str(self.settings.get("model", {}).get("name", "an unknown model"))

    def title(self, dataset: str) -> str:
        """What a dataset is called in tables."""
        return str(self.facts.get(dataset, {}).get("title", paper_title(dataset)))

    def benchmark(self, dataset: str) -> NamedDataset | None:
        """The paper's dataset of that name, unless this one is a folder that merely has the same name."""
        return _BENCHMARKS.get(dataset) if self.facts.get(dataset, {}).get("family") != "other" else None

    def cell(self, method: str, dataset: str, metric: str) -> Cell:
        """Mean and standard deviation over seeds; of a stream in several orders over those, see `order_spread`."""
        orders = self.order_spread(method, dataset, metric)
        if orders and orders.std is not None:
            return Cell(
                orders.mean, orders.std, notes=(self._orders_note(method, dataset, metric), *self.gaps(method, dataset))
            )
        values = [measured.values[metric] for measured in self.by_seed.get((dataset, method), {}).values()]
        known = [value for value in values if value is not None]
        if not known:
            return Cell()
        spread = over_seeds(known)
        return Cell(spread.mean, spread.std, notes=self.gaps(method, dataset))

    def order_spread(self, method: str, dataset: str, metric: str) -> Spread | None:
        """A metric over the orders of a stream, each the mean over seeds; None where there is one order or none."""
        of_seeds = [measured.by_order for measured in self.by_seed.get((dataset, method), {}).values()]
        common = set.intersection(*(set(orders) for orders in of_seeds)) if of_seeds else set()
        values = [[orders[order][metric] for orders in of_seeds] for order in sorted(common)]
        known = [sum(of_order) / len(of_order) for of_order in values if None not in of_order]  # type: ignore[arg-type]
        return over_seeds(known) if len(known) > 1 else None

    def _orders_note(self, method: str, dataset: str, metric: str) -> str:
        of_seeds = [measured.values[metric] for measured in self.by_seed[dataset, method].values()]
        std = over_seeds([value for value in of_seeds if value is not None]).std
        return _OVER_ORDERS if std is None else f"{_OVER_ORDERS}; over the seeds of the views it is ±{std:.2f}"

    def mean(self, method: str, group: str, metric: str) -> Cell:
        """One of the paper's means, of the numbers that stand in the columns; empty where a dataset is missing."""
        members = [name for name in members_of(group) if self.benchmark(name)]
        cells = {name: self.cell(method, name, metric) for name in members}
        value = group_means({name: cell.value for name, cell in cells.items()})[group]
        if value is None:
            return Cell()
        # The deviation is that of the mean, not the mean of deviations, so all datasets must have the same seeds.
        seeds = {tuple(self.by_seed[name, method]) for name in members}
        std = None
        if len(seeds) == 1:
            means = [
                group_means({name: self.by_seed[name, method][seed].values[metric] for name in members})[group]
                for seed in next(iter(seeds))
            ]
            std = over_seeds([mean for mean in means if mean is not None]).std
        notes = ("some of its datasets are not finished",) if any(cell.notes for cell in cells.values()) else ()
        return Cell(value, std, notes=notes)

    def column(self, dataset: str, metric: str, *, paper: bool) -> Column:
        shown = METRIC_FORMATS[metric]
        return Column(dataset, self.title(dataset), shown.digits, shown.best, self.data_notes(dataset, paper=paper))

    def mean_column(self, group: str, metric: str, *, paper: bool) -> Column:
        shown = METRIC_FORMATS[metric]
        exists = any(self.mean(method, group, metric).value is not None for method in self.methods)
        notes: list[str] = []
        for name in members_of(group) if exists else ():
            names = self._class_names_note(name, paper=paper)
            if names:  # in full, because a table of means has no column of the dataset
                notes.append(f"{self.title(name)}: {names}")
            if any(note != names for note in self.data_notes(name, paper=paper)):
                notes.append("of datasets with notes of their own")
        return Column(group, MEANS[group], shown.digits, shown.best, tuple(dict.fromkeys(notes)))

    def gaps(self, method: str, dataset: str) -> tuple[str, ...]:
        """What this method's number lacks in comparison with others on the dataset."""
        by_seed = self.by_seed[dataset, method]
        largest, seeds = self._largest[dataset], self._seeds_of(dataset)
        short = {seed: measured.images for seed, measured in by_seed.items() if measured.images < largest.images}
        notes = []
        if short:
            counts = [f"{n:,}" if len(seeds) == 1 else f"seed {seed}: {n:,}" for seed, n in short.items()]
            notes.append(f"{', '.join(counts)} of {largest.images:,} images")
        if any(measured.images_hash != largest.images_hash for seed, measured in by_seed.items() if seed not in short):
            notes.append("as many images as its neighbours, but not the same ones")
        if len(by_seed) < len(seeds):
            notes.append(f"{seeds_text(by_seed)} only")
        return tuple(notes)

    def data_notes(self, dataset: str, *, paper: bool) -> tuple[str, ...]:
        """How the images differ from the whole dataset, and with `paper` also how views and data differ from it."""
        benchmark, facts, done = self.benchmark(dataset), self.facts.get(dataset, {}), self._largest[dataset].images
        size = facts.get("images", benchmark.images if benchmark else done)
        notes = [f"{done:,} of {size:,} images"] if done < size else []
        if names := self._class_names_note(dataset, paper=paper):
            notes.append(names)
        if paper and benchmark:
            views = self.settings.get("views", {}).get("views", VIEWS)
            usual = FAMILIES[benchmark.family].augmix
            if size != benchmark.images:
                notes.append(f"{size:,} images in the dataset, {benchmark.images:,} in the paper's")
            if views != VIEWS:
                notes.append(f"{views} views, in the paper {VIEWS}")
            if facts.get("augmix", usual) != usual:
                notes.append("views without AugMix, unlike the paper's" if usual else "AugMix, unlike the paper")
        return tuple(notes)

    def _class_names_note(self, dataset: str, *, paper: bool) -> str | None:
        """How the class names differ from the paper's, or from those of the list."""
        classes = tuple(self._classes.get(dataset, ())) if self.benchmark(dataset) else ()
        return protocol_note(dataset, classes, paper=paper)

    def footnotes(self, spread: str | None = "mean ± standard deviation") -> tuple[str, ...]:
        """On seeds (`spread` names what is shown of them), unfinished datasets, and images that could not be read."""
        unfinished = [
            self.title(dataset)
            for dataset in self.datasets
            if any(self.gaps(method, dataset) for method in self.methods if (dataset, method) in self.by_seed)
        ]
        notes = [f"{spread} over {seeds_text(self.seeds)}"] if spread and len(self.seeds) > 1 else []
        if unfinished:
            notes.append(f"not finished: {', '.join(unfinished)}; some numbers lack images or seeds")
        return (*notes, *self._failed_notes())

    def computed_notes(self) -> tuple[str, ...]:
        """How many views were encoded, on which device and in which precision, as far as the run records it."""
        views, precision = self.settings.get("views", {}), self.settings.get("model", {}).get("precision")
        if self._device is None or precision is None:
            return ()
        count = "adaptive, up to" if views.get("adaptive") else ""
        noun = "view" if views.get("views") == 1 else "views"
        return (" ".join(f"{count} {views.get('views')} {noun}, {precision} on {self._device}".split()),)

    def missing_notes(self, datasets: Sequence[str], methods: Sequence[str]) -> list[str]:
        """Which of these datasets, and which methods on the others, have no results yet."""
        absent = [paper_title(name) for name in datasets if name not in self.datasets]
        notes = [f"no results yet: {', '.join(absent)}"] if absent else []
        lacking: dict[tuple[str, ...], list[str]] = {}
        for method in methods:
            titles = tuple(self.title(name) for name in self.datasets if (name, method) not in self.by_seed)
            if titles:
                lacking.setdefault(titles, []).append(method)
        return notes + [f"no results yet of {', '.join(names)} on {', '.join(sets)}" for sets, names in lacking.items()]

    def _failed_notes(self) -> list[str]:
        """How many images of each dataset could not be read, and which and why for the first few."""
        by_dataset: dict[str, list[FailedImage]] = {}
        for image in self._failed:
            by_dataset.setdefault(image.dataset, []).append(image)
        notes = []
        for dataset in sorted_datasets(by_dataset):
            failed = by_dataset[dataset]
            listed = ", ".join(f"{image.image} ({image.reason})" for image in failed[:_LISTED])
            more = f" … and {len(failed) - _LISTED:,} more, see `usetta export`" if len(failed) > _LISTED else ""
            count = "1 image" if len(failed) == 1 else f"{len(failed):,} images"
            notes.append(f"{self.title(dataset)}: {count} could not be read: {listed}{more}")
        return notes

    def _most_images(self, dataset: str) -> SeedMetrics:
        """The metrics that cover the most images of a dataset."""
        of_dataset = (by_seed.values() for (name, _), by_seed in self.by_seed.items() if name == dataset)
        return max((measured for group in of_dataset for measured in group), key=lambda measured: measured.images)

    def _seeds_of(self, dataset: str) -> set[int]:
        return {seed for (name, _), by_seed in self.by_seed.items() if name == dataset for seed in by_seed}


def _measure(store: Store, dataset: str, seed: int, method: str, metrics: Sequence[str]) -> SeedMetrics:
    needed = dict.fromkeys(("image", *(column for metric in metrics for column in METRICS[metric][1])))
    by_order: dict[int, dict[str, float | None]] = {}
    images: list[str] = []
    for order in store.orders(dataset, seed, method):
        where = {"dataset": dataset, "seed": seed, "method": method, "order_seed": order}
        stored = store.columns(tuple(needed), where)
        values: dict[str, float | None] = {}
        for name in metrics:
            metric, columns = METRICS[name]
            known = not any(None in stored[column] for column in columns)
            values[name] = float(metric(*(stored[column] for column in columns))) if known else None
        by_order[order], images = values, stored["image"]
    digest = hashlib.blake2b("\n".join(images).encode(), digest_size=16)
    means = {name: _mean([values[name] for values in by_order.values()]) for name in metrics}
    return SeedMetrics(len(images), digest.hexdigest(), means, by_order if len(by_order) > 1 else {})


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def paper_title(dataset: str) -> str:
    """What the paper calls one of its datasets; others go by their name."""
    return _BENCHMARKS[dataset].title if dataset in _BENCHMARKS else dataset


def distinct_titles(titles: Mapping[str, str]) -> dict[str, str]:
    """Titles by dataset; where several have the same title, their names."""
    counts = Counter(titles.values())
    return {dataset: title if counts[title] == 1 else dataset for dataset, title in titles.items()}


def sorted_datasets(datasets: Iterable[str]) -> list[str]:
    """Datasets in the paper's order, then the others by name."""
    places = {name: place for place, name in enumerate(_BENCHMARKS)}
    return sorted(datasets, key=lambda name: (places.get(name, len(places)), name))


def sorted_methods(methods: Iterable[str]) -> list[str]:
    """Named methods in the order of their list, then the rest of the grid by method, readout and settings."""
    return sorted(methods, key=_method_key)


def _method_key(method: str) -> tuple[Any, ...]:
    head, *settings = method.split(":")
    base, _, readout = head.partition("+")
    named, readouts = known_methods.names(), ["", *READOUTS]
    return (
        method not in named,
        named.index(base) if base in named else len(named),
        readouts.index(readout) if readout in readouts else len(readouts),
        [_setting_key(setting) for setting in settings],
        method,
    )


def _setting_key(text: str) -> tuple[str, float, str]:
    """By value, so that `steps=10` comes after `steps=2`."""
    name, _, value = text.partition("=")
    try:
        return name, float(value), ""
    except ValueError:
        return name, float("inf"), value


def seeds_text(seeds: Iterable[int]) -> str:
    """`seed 0`, or `seeds 0, 1`."""
    numbers = sorted(seeds)
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
