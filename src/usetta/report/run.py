"""The report of a run: one HTML file with tables, figures and the images whose answers changed the most.

The file needs nothing else: no script, and images as `data:` addresses, small ones, so that it can be sent by mail.
What methods changed in the answers of one of them (`against`) is shown in full for the last method of the run; for
the others it is folded away, and with a third as many images, to keep the file small.
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
from usetta.report import illustrations
from usetta.report.changes import AnswerChange, Changes, find_changes
from usetta.report.html import fragment, in_plain_words, render, thumbnail
from usetta.report.illustrations import titles
from usetta.report.measured import Measured, seeds_text
from usetta.report.results import accuracy_table, differences_table, metrics_table
from usetta.report.run_images import Album

_IMAGE, _VIEW = 160, 112
"""Sides of images and views in pixels."""
_LONG = 24
"""Rows of a table that is folded away because the figure above it says the same."""
_BAD_SHOWN = 100
"""Images that could not be read and are listed one by one."""


@dataclass(frozen=True)
class CardView:
    """A view on the card of an image."""

    number: int
    label: str
    right: bool
    entropy: float
    address: str


@dataclass(frozen=True)
class Card:
    """An image whose answer changed."""

    change: AnswerChange
    title: str
    """Of the dataset."""
    truth: str
    before: str
    after: str
    address: str | None
    views: tuple[CardView, ...]
    missing: str
    """Why the image cannot be shown."""


@dataclass(frozen=True)
class RunComparison:
    """What a method changed, with its cards."""

    changes: Changes
    to_right: tuple[Card, ...]
    to_wrong: tuple[Card, ...]


def write_report(
    store: Store,
    path: Path,
    *,
    against: str = "clip",
    shown: int = 12,
    say: Callable[[str], object] = lambda text: None,
) -> Path:
    """Write the report of the run in `store` to `path`.

    `against`: the method that the others are compared with; a run that has no `clip` is reported without comparisons.
    `shown`: at most so many images that became right, and as many that became wrong. What cannot be shown is told by
    `say`.
    """
    found = Measured(store, illustrations.METRICS)
    baseline = _baseline(found, against)
    others = [method for method in found.methods if method != baseline]
    cards = _Cards(Album(store), titles(found))
    comparisons = []
    accuracy, differences = accuracy_table(store), None
    if baseline and others:
        last = _last(store, others)
        comparisons = [_compare(store, baseline, last, shown, cards)]
        comparisons += [_compare(store, baseline, each, -(-shown // 3), cards) for each in others if each != last]
        differences = differences_table(store, baseline)
    page = render(
        "run.html.j2",
        folder=store.folder.resolve().name,
        against=baseline,
        about=_about(store, found),
        methods={method: in_plain_words(method) for method in found.methods},
        scores=illustrations.mean_over_datasets(found, "top1"),
        accuracy=fragment(accuracy),
        has_paper=any(cell.paper is not None for row in accuracy.rows for cell in row.cells.values()),
        differences=fragment(differences) if differences else None,
        long_differences=differences is not None and len(differences.rows) > _LONG,
        metrics={title: fragment(metrics_table(store, dataset)) for dataset, title in titles(found).items()},
        figures={
            "gains": illustrations.gains(found, baseline) if baseline else None,
            "reliability": illustrations.reliability(store, found),
            "skips": illustrations.skips(store, found),
            "cost": illustrations.cost(found),
            "views": illustrations.typical_views(store, found, cards.album),
        },
        comparisons=comparisons,
        several_seeds=len(found.seeds) > 1,
        bad=_bad(store, found),
        facts=_facts(store),
        datasets=_datasets(store),
    )
    write_atomically(path, page.encode("utf-8", "replace"))  # names of files may hold what is no character
    if cards.missing:
        say(f"{len(cards.missing)} images cannot be shown, such as {cards.missing[0]}")
    return path


def _baseline(found: Measured, against: str) -> str | None:
    name = against if against in found.methods else known.get(against).name
    if name in found.methods:
        return name
    if name == "clip":
        return None
    raise ValueError(f"the run has no answers of {name} to compare with, only of {', '.join(found.methods)}")


def _last(store: Store, methods: list[str]) -> str:
    """The method that the run was asked for last."""
    asked = [recipe.get("name") for recipe in store.facts("recipe").values()]
    return next((name for name in reversed(asked) if name in methods), methods[-1])


def _compare(store: Store, against: str, method: str, shown: int, cards: "_Cards") -> RunComparison:
    changes = find_changes(store, against, method, shown)
    to_right, to_wrong = (tuple(map(cards.make, way.most)) for way in (changes.to_right, changes.to_wrong))
    return RunComparison(changes, to_right, to_wrong)


class _Cards:
    """Makes cards; an image that several methods changed is read once."""

    def __init__(self, album: Album, titles: Mapping[str, str]) -> None:
        self.album = album
        self.missing: list[ImageError] = []
        self._titles = titles
        self._images: dict[tuple[str, str, int], tuple[str | None, tuple[CardView, ...], str]] = {}

    def make(self, change: AnswerChange) -> Card:
        key = change.dataset, change.image, change.seed
        if key not in self._images:
            self._images[key] = self._image(change)
        truth, before, after = (
            self.album.class_name(change.dataset, label)
            for label in (change.label, change.before.prediction, change.after.prediction)
        )
        return Card(change, self._titles[change.dataset], truth, before, after, *self._images[key])

    def _image(self, change: AnswerChange) -> tuple[str | None, tuple[CardView, ...], str]:
        try:
            shown = self.album.show(change.dataset, change.image, change.seed)
        except ImageError as error:
            self.missing.append(error)
            return None, (), error.reason
        views = (
            CardView(
                view.number,
                self.album.class_name(change.dataset, view.label),
                view.label == change.label,
                view.entropy,
                thumbnail(image, _VIEW),
            )
            for view, image in shown.views
        )
        return thumbnail(shown.image, _IMAGE), tuple(views), ""


def _about(store: Store, found: Measured) -> dict[str, Any]:
    """What was measured, in numbers."""
    images: dict[str, int] = {}
    for dataset, _, _, count in store.groups():
        images[dataset] = max(count, images.get(dataset, 0))
    return {
        "model": found.model,
        "datasets": [
            {"title": title, "images": images[name], **_sizes(found.facts.get(name, {}))}
            for name, title in titles(found).items()
        ],
        "images": sum(images.values()),
        "seeds": seeds_text(found.seeds),
        "views": found.run.get("views", {}).get("views"),
    }


def _sizes(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"whole": facts.get("images"), "classes": facts.get("classes")}


def _bad(store: Store, found: Measured) -> list[dict[str, Any]]:
    """Images that could not be read, by dataset."""
    groups = []
    for dataset, members in groupby(store.bad(), key=lambda bad: bad.dataset):
        images = list(members)
        title = found.title(dataset)
        groups.append({"title": title, "count": len(images), "listed": images[:_BAD_SHOWN]})
    return groups


def _facts(store: Store) -> dict[str, dict[str, dict[str, str]]]:
    """What the results depend on and where they come from, as texts: by kind, then by name."""
    kinds = {"run": "The run as a whole", "recipe": "Settings of the methods", "invocation": "Calls of the program"}
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
