"""The report of a run: one HTML file with tables, figures and the images whose answers changed the most.

The file needs nothing else: no script, and small images as `data:` URLs, so that it can be sent by mail. What methods
changed in the answers of the baseline is shown in full for the last method of the run; for the others it is folded
away, with a third as many images, to keep the file small.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from usetta import methods as known
from usetta.evaluate.store import Store
from usetta.files import write_atomically
from usetta.images import ImageError
from usetta.report import html
from usetta.report.html import table_html, titles
from usetta.report.measured import RunMetrics, seeds_text
from usetta.report.results import accuracy_table, differences_table, metrics_table
from usetta.report.run_images import AnswerChange, AnswerChanges, RunImages, find_changes
from usetta.report.trust import trust_table

_IMAGE_SIDE, _VIEW_SIDE = 160, 112
"""In pixels."""
_LONG = 24
"""A table with more rows is folded away, because the figure above it shows the same."""
_FAILED_LISTED = 100
"""Failed images of a dataset that are listed by name."""


@dataclass(frozen=True)
class ViewCard:
    """A view on the card of an image."""

    number: int
    label: str
    right: bool
    entropy: float
    url: str


@dataclass(frozen=True)
class ImageCard:
    """An image whose answer changed."""

    change: AnswerChange
    title: str
    """Of the dataset."""
    truth: str
    before: str
    after: str
    url: str | None
    views: tuple[ViewCard, ...]
    missing: str
    """Why the image cannot be shown."""


@dataclass(frozen=True)
class MethodComparison:
    """What a method changed, with cards of the images."""

    changes: AnswerChanges
    to_right: tuple[ImageCard, ...]
    to_wrong: tuple[ImageCard, ...]


def write_report(
    store: Store,
    path: Path,
    *,
    baseline: str = "clip",
    shown: int = 12,
    log: Callable[[str], object] = lambda text: None,
) -> Path:
    """Write the report of the run in `store` to `path`.

    `baseline`: the method that the others are compared with; a run that has no `clip` is reported without comparisons.
    `shown`: at most so many images that became right, and as many that became wrong. `log` receives what cannot be
    shown.
    """
    run = RunMetrics(store, html.ILLUSTRATED_METRICS)
    reference = _present_baseline(run, baseline)
    others = [method for method in run.methods if method != reference]
    cards = _CardMaker(RunImages(store), titles(run))
    comparisons = []
    accuracy, differences = accuracy_table(store), None
    if reference and others:
        last = _last_requested(store, others)
        comparisons = [_compare(store, reference, last, shown, cards)]
        comparisons += [_compare(store, reference, name, -(-shown // 3), cards) for name in others if name != last]
        differences = differences_table(store, reference)
    page = html.render(
        "run.html.j2",
        folder=store.folder.resolve().name,
        baseline=reference,
        about=_about(store, run),
        methods={method: html.in_plain_words(method) for method in run.methods},
        scores=html.mean_over_datasets(run, "top1"),
        accuracy=table_html(accuracy),
        has_paper=any(cell.paper is not None for row in accuracy.rows for cell in row.cells.values()),
        differences=table_html(differences) if differences else None,
        long_differences=differences is not None and len(differences.rows) > _LONG,
        metrics={title: table_html(metrics_table(store, dataset)) for dataset, title in titles(run).items()},
        trust=table_html(trust_table(store)),
        figures={
            "gains": html.gains(differences, reference) if differences and reference else None,
            "reliability": html.reliability(store, run),
            "risk_coverage": html.risk_coverage(store, run),
            "calibration": html.calibration(run),
            "streams": html.streams(store, run),
            "skips": html.skips(store, run),
            "cost": html.cost(run),
            "views": html.typical_views(store, run, cards.images),
        },
        comparisons=comparisons,
        several_seeds=len(run.seeds) > 1,
        failed=_failed(store, run),
        facts=_facts(store),
        datasets=_datasets(store),
    )
    write_atomically(path, page.encode("utf-8", "replace"))  # file names may contain lone surrogates
    if cards.missing:
        log(f"{len(cards.missing)} images cannot be shown, such as {cards.missing[0]}")
    return path


def _present_baseline(run: RunMetrics, baseline: str) -> str | None:
    name = baseline if baseline in run.methods else known.get(baseline).name
    if name in run.methods:
        return name
    if name == "clip":  # the default, which nobody asked for
        return None
    raise ValueError(f"the run has no answers of {name} to compare with, only of {', '.join(run.methods)}")


def _last_requested(store: Store, methods: list[str]) -> str:
    """The method that the run was asked for last: most likely the one that its owner cares about."""
    requested = [recipe.get("name") for recipe in store.facts("recipe").values()]
    return next((name for name in reversed(requested) if name in methods), methods[-1])


def _compare(store: Store, baseline: str, method: str, shown: int, cards: "_CardMaker") -> MethodComparison:
    changes = find_changes(store, baseline, method, shown)
    to_right, to_wrong = (tuple(map(cards.make, group.largest)) for group in (changes.to_right, changes.to_wrong))
    return MethodComparison(changes, to_right, to_wrong)


class _CardMaker:
    """Makes cards; an image that several methods changed is opened once."""

    def __init__(self, images: RunImages, titles: Mapping[str, str]) -> None:
        self.images = images
        self.missing: list[ImageError] = []
        self._titles = titles
        self._shown: dict[tuple[str, str, int], tuple[str | None, tuple[ViewCard, ...], str]] = {}

    def make(self, change: AnswerChange) -> ImageCard:
        key = change.dataset, change.image, change.seed
        if key not in self._shown:
            self._shown[key] = self._show(change)
        truth, before, after = (
            self.images.class_name(change.dataset, label)
            for label in (change.label, change.before.prediction, change.after.prediction)
        )
        return ImageCard(change, self._titles[change.dataset], truth, before, after, *self._shown[key])

    def _show(self, change: AnswerChange) -> tuple[str | None, tuple[ViewCard, ...], str]:
        """URL of the image, its views, and why there is none."""
        try:
            opened = self.images.open(change.dataset, change.image, change.seed)
        except ImageError as error:
            self.missing.append(error)
            return None, (), error.reason
        views = (
            ViewCard(
                view.number,
                self.images.class_name(change.dataset, view.label),
                view.label == change.label,
                view.entropy,
                html.thumbnail(image, _VIEW_SIDE),
            )
            for view, image in opened.views
        )
        return html.thumbnail(opened.image, _IMAGE_SIDE), tuple(views), ""


def _about(store: Store, run: RunMetrics) -> dict[str, Any]:
    """What was measured, in numbers."""
    images: dict[str, int] = {}
    for dataset, _, _, count in store.groups():
        images[dataset] = max(count, images.get(dataset, 0))
    return {
        "model": run.model,
        "datasets": [
            {"title": title, "images": images[name], **_sizes(run.facts.get(name, {}))}
            for name, title in titles(run).items()
        ],
        "images": sum(images.values()),
        "seeds": seeds_text(run.seeds),
        "views": run.settings.get("views", {}).get("views"),
    }


def _sizes(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"whole": facts.get("images"), "classes": facts.get("classes")}


def _failed(store: Store, run: RunMetrics) -> list[dict[str, Any]]:
    """Images that could not be read, by dataset."""
    groups = []
    for dataset, members in groupby(store.failed_images(), key=lambda image: image.dataset):
        images = list(members)
        groups.append({"title": run.title(dataset), "count": len(images), "listed": images[:_FAILED_LISTED]})
    return groups


def _facts(store: Store) -> dict[str, dict[str, dict[str, str]]]:
    """What the results depend on and where they come from, as text: by kind, then by name."""
    kinds = {"run": "The run as a whole", "recipe": "Settings of the methods", "invocation": "Commands"}
    return {
        title: {name: _texts(value) for name, value in store.facts(kind).items() if value is not None}
        for kind, title in kinds.items()
    }


def _datasets(store: Store) -> list[dict[str, Any]]:
    roots, classes = store.facts("root"), store.facts("classes")
    return [
        {"name": name, "facts": {**_texts(facts), "folder": roots.get(name, "–")}, "classes": classes.get(name, ())}
        for name, facts in store.facts("dataset").items()
    ]


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): _text(name, value) for name, value in facts.items()}


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name == "peak_memory":
        return f"{value / 1e9:.2f} GB"
    return str(value)
