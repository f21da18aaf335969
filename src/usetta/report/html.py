"""Parts of HTML pages: templates in which every value is escaped, tables, thumbnails, and the figures of a run.

Pages load nothing from elsewhere: an image is a `data:` URL, a table plain HTML. A figure is an `Illustration` with a
text for people who cannot see it; a figure that the run has no data for is None.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image

from usetta import methods
from usetta.evaluate.metrics import Interval
from usetta.evaluate.store import Store
from usetta.images import ImageError
from usetta.report import explain, figures, trust_figures
from usetta.report.measured import RunMetrics, distinct_titles
from usetta.report.run_images import RunImages
from usetta.report.style import DPI
from usetta.report.tables import Cell, Table, lay_out

Item = TypeVar("Item")

ILLUSTRATED_METRICS = ("top1", "ece", "skip_ratio", "seconds_per_image")
"""What `RunMetrics` must have measured for the figures."""

_IN_PLAIN_WORDS = {
    "clip": "looks at the image once and picks the class whose text fits best.",
    "se": "also looks at crops, keeps the few that the model is most confident about, and mixes their answers with "
    "that of the image. The image counts more where it is more confident than its crops.",
    "tpt": "tunes the prompt for this one image until the most confident crops agree on a class, then looks at the "
    "image once more with the tuned prompt.",
    "use": "leaves the prompt alone where the image and its most confident crops already agree (skipped). Elsewhere "
    "it tunes the prompt towards the mixture that se would give, then mixes as se does.",
}


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("usetta.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> str:
    """The page that a template of this package makes of `values`."""
    return _environment().get_template(template).render(values)


def in_plain_words(method: str) -> str:
    """What a method does, for somebody who has not read the paper; for most, the description of their recipe."""
    try:
        return _IN_PLAIN_WORDS.get(method) or methods.get(method).description
    except ValueError:  # a plug-in of whoever made the run, which is not installed here
        return "a method that is not part of usetta."


def table_html(table: Table) -> Markup:
    """A table as HTML, which scrolls sideways where it is too wide, with its notes below."""
    return Markup(render("table.html.j2", table=lay_out(table)))  # noqa: S704  (the template escapes)


def thumbnail(image: Image.Image, side: int) -> str:
    """The `data:` URL of a small copy of an RGB image, at most `side` pixels wide and high."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80, optimize=True)
    return _data_url(out.getvalue(), "image/jpeg")


def _data_url(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@dataclass(frozen=True)
class Illustration:
    """A figure as part of a page."""

    url: str
    width: int
    """In CSS pixels."""
    alt: str


def illustration(figure: Figure, alt: str, *, photos: bool = False, saved: Path | None = None) -> Illustration:
    """The figure with more pixels than the page shows, for sharp screens; as JPEG if it shows `photos`.

    `saved`: the PNG that `style.save` wrote of it, which has as many.
    """
    out = io.BytesIO()
    if photos:
        figure.savefig(out, format="jpeg", dpi=1.5 * DPI, pil_kwargs={"quality": 75, "optimize": True})
    elif saved is None:
        figure.savefig(out, format="png", dpi=2 * DPI, metadata={"Software": None})
    content = saved.read_bytes() if saved and not photos else out.getvalue()
    url = _data_url(content, "image/jpeg" if photos else "image/png")
    return Illustration(url, round(DPI * float(figure.get_figwidth())), alt)


@dataclass(frozen=True)
class GainsFigure:
    """Gains over the baseline, as far as they come from enough images to be drawn."""

    drawing: Illustration | None
    too_few: Mapping[str, int]
    """Images of each dataset that has less than `least` of them."""
    least: int = 100


def gains(differences: Table, baseline: str) -> GainsFigure:
    """How many points better the methods are than the baseline, of a table by `results.differences_table`."""
    drawn: dict[str, dict[str, Interval]] = {}
    too_few: dict[str, int] = {}
    for row in differences.rows:
        estimate, low, high, images = (row.cells[name].value or 0.0 for name in ("difference", "low", "high", "images"))
        if images < GainsFigure.least:
            too_few[row.section] = max(int(images), too_few.get(row.section, 0))
        else:
            drawn.setdefault(row.name, {})[row.section] = Interval(estimate, low, high)
    if not drawn:
        return GainsFigure(None, too_few)
    alt = f"Points with 95 % intervals: gain over {baseline} in points of accuracy, by dataset and method."
    return GainsFigure(illustration(figures.gains(drawn, baseline), alt), too_few)


def reliability(store: Store, run: RunMetrics) -> Illustration:
    """How often the methods are right at each confidence, on all datasets together."""
    confidence, right = _confidences(store, run)
    alt = "For each method, bars of accuracy by confidence against the diagonal on which both would be the same."
    return illustration(figures.reliability(confidence, right), alt)


def risk_coverage(store: Store, run: RunMetrics) -> Illustration:
    """How many answers are wrong among the most confident, on all datasets together."""
    confidence, right = _confidences(store, run)
    alt = "For each method, a curve of wrong answers by the share of images that is answered, most confident first."
    return illustration(trust_figures.risk_coverage_curves(confidence, right), alt)


def calibration(run: RunMetrics) -> Illustration | None:
    """Accuracy against calibration error, both as means over the datasets that every method has."""
    accuracy, error = mean_over_datasets(run, "top1"), mean_over_datasets(run, "ece")
    if len(accuracy) < 2:
        return None
    alt = "Points: accuracy of each method against its expected calibration error."
    return illustration(trust_figures.calibration(accuracy, error), alt)


def streams(store: Store, run: RunMetrics) -> dict[str, tuple[Illustration, Illustration | None]]:
    """By title of the dataset: accuracy over the stream, and in each of its orders if there are several."""
    drawn = {}
    for dataset, title in titles(run).items():
        right: dict[str, list[list[bool]]] = {}
        by_order: dict[str, list[float]] = {}
        for method in run.methods:
            for seed in run.by_seed.get((dataset, method), ()):
                for order in store.orders(dataset, seed, method):
                    where = {"dataset": dataset, "seed": seed, "method": method, "order_seed": order}
                    columns = store.columns(("position", "label", "prediction"), where)
                    if None in columns["position"] or not columns["position"]:
                        continue  # a method without a memory
                    places = np.argsort(columns["position"])
                    hits = np.equal(columns["label"], columns["prediction"])[places]
                    right.setdefault(method, []).append(hits.tolist())
                    by_order.setdefault(method, []).append(100 * float(hits.mean()))
        # Orders of a run that is not finished may have different images.
        right = {method: rows for method, rows in right.items() if len({len(row) for row in rows}) == 1}
        if right:
            window = max(10, len(next(iter(right.values()))[0]) // 10)
            over = illustration(
                trust_figures.over_the_stream(right, window),
                f"Curves: accuracy of each method over the stream of {title}, the mean over its orders.",
            )
            several = {method: by_order[method] for method in right if len(by_order[method]) > 1}
            sensitivity = None
            if several:
                alt = f"Points: accuracy of each method on {title} in each order of the stream."
                sensitivity = illustration(trust_figures.order_sensitivity(several), alt)
            drawn[title] = over, sensitivity
    return drawn


def _confidences(store: Store, run: RunMetrics) -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    """Confidence and whether the answer was right, by method."""
    confidence: dict[str, list[float]] = {method: [] for method in run.methods}
    right: dict[str, list[bool]] = {method: [] for method in run.methods}
    for (dataset, method), by_seed in run.by_seed.items():
        for seed in by_seed:
            where = {"dataset": dataset, "seed": seed, "method": method}
            columns = store.columns(("label", "prediction", "confidence"), where)
            confidence[method] += columns["confidence"]
            right[method] += np.equal(columns["label"], columns["prediction"]).tolist()
    return confidence, right


def skips(store: Store, run: RunMetrics) -> tuple[str, Illustration] | None:
    """The last method that skipped images: how many, and its accuracy before and after tuning on the others."""
    shares = {method: _cells(run, method, "skip_ratio") for method in run.methods}
    skipping = [method for method, row in shares.items() if any(cell.value for cell in row.values())]
    if not skipping:
        return None
    method = skipping[-1]
    ratio = {title: cell.value for title, cell in shares[method].items()}
    after = {title: cell.value for title, cell in _cells(run, method, "top1").items()}
    before = {}
    for dataset, title in titles(run).items():
        columns = store.columns(("label", "before"), {"dataset": dataset, "method": method})
        if columns["label"]:
            before[title] = 100 * float(np.mean(np.equal(columns["label"], columns["before"])))
    alt = f"For each dataset, the share of images that {method} skipped, and its accuracy before and after tuning."
    return method, illustration(figures.skips(ratio, before, after), alt)


def cost(run: RunMetrics) -> Illustration | None:
    """Accuracy against time, both as means over the datasets that every method has."""
    accuracy, seconds = mean_over_datasets(run, "top1"), mean_over_datasets(run, "seconds_per_image")
    if len(accuracy) < 2:
        return None
    alt = "Points: accuracy of each method against the seconds that it needs for an image."
    return illustration(figures.cost(seconds, accuracy), alt)


def typical_views(store: Store, run: RunMetrics, images: RunImages, limit: int = 4) -> Illustration | None:
    """Images with their views, evenly spread over the datasets, whatever the answers were."""
    rows = []
    for dataset, image, label, seed in _spread_images(store, run, limit)[:limit]:
        try:
            row = images.grid_row(dataset, image, label, seed)
        except ImageError:
            continue
        if row.views:
            rows.append(row)
    if not rows:
        return None
    answers = "; ".join(f"{row.label}: {', '.join(view.label for view in row.views)}" for row in rows)
    alt = f"Rows of views. What each image shows, and what its views are taken for: {answers}."
    return illustration(explain.view_grid(rows), alt, photos=True)


def _spread_images(store: Store, run: RunMetrics, limit: int) -> list[tuple[str, str, int, int]]:
    """Dataset, image, label and seed of `limit` images or a few more."""
    chosen = []
    datasets = _evenly(run.datasets, limit)
    for dataset in datasets:
        method = next(method for method in reversed(run.methods) if (dataset, method) in run.by_seed)
        seed = min(run.by_seed[dataset, method])
        columns = store.columns(("image", "label"), {"dataset": dataset, "seed": seed, "method": method})
        images = list(dict.fromkeys(zip(columns["image"], columns["label"], strict=True)))  # once for all orders
        per_dataset = -(-limit // len(datasets))
        chosen += [(dataset, image, label, seed) for image, label in _evenly(images, per_dataset)]
    return chosen


def _evenly(items: Sequence[Item], limit: int) -> list[Item]:
    n = min(limit, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * n)] for i in range(n)]


def mean_over_datasets(run: RunMetrics, metric: str) -> dict[str, float]:
    """The mean of a metric by method, over the datasets that every method has; others would not compare."""
    common = [dataset for dataset in run.datasets if all((dataset, method) in run.by_seed for method in run.methods)]
    if not common:
        return {}
    cells = {method: [run.cell(method, dataset, metric) for dataset in common] for method in run.methods}
    return {
        method: float(np.mean([cell.value for cell in row if cell.value is not None])) for method, row in cells.items()
    }


def titles(run: RunMetrics) -> dict[str, str]:
    """Titles of the datasets; where two have the same title, their names."""
    return distinct_titles({dataset: run.title(dataset) for dataset in run.datasets})


def _cells(run: RunMetrics, method: str, metric: str) -> dict[str, Cell]:
    """By title of the dataset."""
    return {title: run.cell(method, dataset, metric) for dataset, title in titles(run).items()}
