"""One style for all figures: a method has the same colour and marker wherever it appears.

Figures are drawn at the size at which a page shows them, `WIDTH` inches or 900 pixels, with no text below 9 points.
Their layout is final when they are returned (`finish`), so that PNG and SVG show the same. Names are never typeset as
formulas, whatever characters they contain, and long ones are cut in the middle: many differ only at their ends.

Nothing here needs pyplot or a display. Matplotlib's global settings stay untouched except for those of SVG files, which
cannot be passed in another way: `save` sets them while it writes one, one thread at a time.
"""

import math
import os
import threading
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextToPath
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WIDTH = 9.0
DPI = 100
SMALL, MEDIUM = 9, 10
"""Font sizes in points: for numbers and names, and for titles of axes and panels."""
POINTS = 72
"""Per inch."""

# Okabe and Ito's colours, which people with any kind of colour vision can distinguish. Without their yellow, which is
# too light for a line on white, and with a grey for zero-shot CLIP.
GREY, BLACK, ORANGE, SKY = "#999999", "#000000", "#E69F00", "#56B4E9"
GREEN, BLUE, VERMILION, PURPLE = "#009E73", "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (GREY, BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE)
GRID, DIM = "#e4e4e4", "#666666"

_Marker = str | tuple[int, int, int]
"""Matplotlib's letter, or (corners, whether it is a star, rotation)."""


@dataclass(frozen=True)
class SeriesStyle:
    """How a method is drawn. The marker distinguishes it where colours cannot, as in a black and white print."""

    colour: str
    marker: _Marker

    def line(self, size: float = 7) -> dict[str, Any]:
        """Arguments of a line with markers; a star is larger, since it covers less of its box."""
        star = self.marker == "*" or (isinstance(self.marker, tuple) and self.marker[1] == 1)
        return {"color": self.colour, "marker": self.marker, "markersize": 1.5 * size if star else size}


_STYLES: dict[str, SeriesStyle] = {
    "clip": SeriesStyle(GREY, "o"),
    "strong": SeriesStyle(SKY, "v"),
    "average": SeriesStyle(PURPLE, "P"),
    "uniform": SeriesStyle(ORANGE, "p"),
    "se": SeriesStyle(GREEN, "D"),
    "mta": SeriesStyle(PURPLE, "^"),
    "vte": SeriesStyle(GREEN, "8"),
    "zero": SeriesStyle(SKY, "X"),
    "tpt": SeriesStyle(BLUE, "s"),
    "tpt-rce": SeriesStyle(BLUE, (3, 1, 0)),
    "c-tpt": SeriesStyle(ORANGE, "h"),
    "o-tpt": SeriesStyle(PURPLE, "H"),
    "r-tpt": SeriesStyle(BLACK, ">"),
    "rlcf": SeriesStyle(GREY, "<"),
    "ttl": SeriesStyle(GREEN, "d"),
    "tps": SeriesStyle(SKY, (4, 1, 0)),
    "sts": SeriesStyle(BLACK, (6, 1, 0)),
    "rce": SeriesStyle(VERMILION, (5, 0, 180)),
    "use": SeriesStyle(VERMILION, "*"),
}
_MARKERS = tuple(style.marker for style in _STYLES.values())


def series_styles(names: Iterable[str]) -> dict[str, SeriesStyle]:
    """The style of each method, different from those of the others.

    A method without a fixed style gets one derived from its name, so that it is the same in every figure and process;
    `tpt+se` and `use:steps=4` get the colour of their base method. If two derived styles are equal, the second name in
    alphabetical order takes another.
    """
    wanted = list(dict.fromkeys(names))
    styles = {name: _STYLES[name] for name in wanted if name in _STYLES}
    for name in sorted(set(wanted) - set(styles)):
        free = (style for style in _derived_styles(name) if style not in styles.values())
        styles[name] = next(free, next(iter(_derived_styles(name))))
    return {name: styles[name] for name in wanted}


def _derived_styles(name: str) -> Iterable[SeriesStyle]:
    """All styles that a method without a fixed one may have, the preferred one first."""
    number = zlib.crc32(name.encode("utf-8", "surrogatepass"))  # unlike hash(), the same in every process
    base = _STYLES.get(name.partition(":")[0].partition("+")[0])
    for colour in _rotated(COLOURS, COLOURS.index(base.colour) if base else number):
        for marker in _rotated(_MARKERS, number // len(COLOURS)):
            style = SeriesStyle(colour, marker)
            if style not in _STYLES.values():
                yield style


def _rotated(items: Sequence[Any], start: int) -> list[Any]:
    start %= len(items)
    return [*items[start:], *items[:start]]


def text_width(text: str, size: float = SMALL) -> float:
    """In points."""
    width, _, _ = TextToPath().get_text_width_height_descent(text, FontProperties(size=size), False)
    return float(width)


def fit(text: str, width: float, size: float = SMALL) -> str:
    """A name on one line, at most `width` points wide, without characters that an SVG file must not contain."""
    whole = _clean(text)
    kept = min(len(whole), int(width / (0.2 * size)) + 1)  # no letter is narrower
    short = whole if kept == len(whole) else _without_middle(whole, kept)
    while kept > 0 and text_width(short, size) > width:
        kept -= 1
        short = _without_middle(whole, kept)
    return short


def wrap(text: str, width: float, size: float = SMALL) -> str:
    """A name on one line or two, each at most `width` points wide."""
    words = _clean(text).split(" ")
    count = len(words)
    while count > 1 and text_width(" ".join(words[:count]), size) > width:
        count -= 1
    lines = [" ".join(words[:count]), " ".join(words[count:])]
    return "\n".join(fit(line, width, size) for line in lines if line)


def _clean(text: str) -> str:
    """On one line; control characters and lone surrogates, which XML forbids, become a replacement character."""
    return " ".join("".join(c if _is_fine(c) else "\N{REPLACEMENT CHARACTER}" for c in text).split())


def _is_fine(character: str) -> bool:
    return character.isprintable() or character.isspace() or unicodedata.category(character) == "Cf"


def _without_middle(text: str, kept: int) -> str:
    return text[: -(-kept // 2)] + "…" + text[len(text) - kept // 2 :]


def number(value: float | None) -> float:
    """NaN for what is missing."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


def new_figure(width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """In inches; `compressed` for images, which keep their shape."""
    return Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")


def plain(axes: Any, grid: str | None = "y") -> None:
    """Only the two axes that are read, small numbers, and lines to read them by."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)


def name_ticks(panels: Sequence[Any], names: Sequence[Sequence[str]], space: float, longest: float = 110) -> None:
    """Names at 0, 1, … along the x axes, `space` points apart; if one is wider, all are slanted, up to `longest`."""
    level = all(text_width(_clean(name)) <= 0.93 * space for of_panel in names for name in of_panel)
    slant = {} if level else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    for axes, of_panel in zip(panels, names, strict=True):
        labels = [fit(name, space if level else longest) for name in of_panel]
        axes.set_xticks(range(len(of_panel)), labels, fontsize=SMALL, parse_math=False, **slant)
        axes.tick_params(axis="x", length=0)


def legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Above the panels, in as few rows as the width of the figure allows."""
    width = POINTS * float(figure.get_figwidth()) - 20
    beside = 4.5 * SMALL  # the sample and the spaces
    labels = [fit(name, width - beside) for name in names]
    most = max(1, int(width / (beside + max(map(text_width, labels)))))
    columns = math.ceil(len(labels) / math.ceil(len(labels) / most))
    order = [i for column in range(columns) for i in range(column, len(labels), columns)]  # to be read along the rows
    box = figure.legend(
        [handles[i] for i in order],
        [" "] * len(labels),  # matplotlib before 3.10 leaves out names that begin with "_"
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=SMALL,
        handlelength=2.2,
        columnspacing=1.5,
    )
    for text, i in zip(box.get_texts(), order, strict=True):
        text.set(text=labels[i], parse_math=False)


def label_points(axes: Any, x: Floats, y: Floats, names: Sequence[str]) -> None:
    """A name beside each point, clear of other names and points; a thin line leads to names that are not near theirs.

    The layout must be final, since places are computed from it.
    """
    points = POINTS / DPI * axes.transData.transform(np.column_stack([x, y]))
    frame = POINTS / DPI * axes.bbox.get_points()
    taken = np.hstack([points - 6, points + 6])
    crowd = (np.linalg.norm(points[:, None] - points, axis=-1) < 40).sum(axis=1)
    for i in np.argsort(-crowd, kind="stable"):  # points in a crowd have the fewest free places, so they choose first
        size = np.array([text_width(names[i]) + 4, 1.3 * SMALL])
        offset, leader, boxes = _free_place(points[i], size, taken, frame)
        taken = np.vstack([taken, boxes])
        line = {"arrowstyle": "-", "color": DIM, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
        axes.annotate(
            names[i],
            (x[i], y[i]),
            offset,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=SMALL,
            parse_math=False,
            arrowprops=line if leader else None,
        )


def _free_place(point: Floats, size: Floats, taken: Floats, frame: Floats) -> tuple[Floats, bool, Floats]:
    """The nearest offset of a name from its point, or that which covers the least; whether it needs a line; its boxes.

    Boxes are (n, 4), from lower left to upper right; those of a line are dots along it. All in points.
    """
    best, least = None, math.inf
    for distance in (7, 11, 16, 22, 30, 40, 52, 66, 82, 100, 125, 150):
        leader = distance > 12
        for angle in np.radians([0, 180, 90, 270, 30, 330, 150, 210, 60, 300, 120, 240, 15, 345, 165, 195]):
            direction = np.array([np.cos(angle), np.sin(angle)])
            offset = distance * direction + size / 2 * np.clip(2 * direction, -1, 1)
            boxes = np.hstack([offset - size / 2, offset + size / 2])[None]
            if leader:
                along = np.linspace(0.05, 1, 40)[:, None] * offset
                own = (np.abs(along - offset) < size / 2).all(axis=1)
                dots = along[~own & (np.linalg.norm(along, axis=1) > 12)]
                boxes = np.vstack([boxes, np.hstack([dots - 1, dots + 1])])
            boxes = boxes + np.tile(point, 2)
            outside = np.maximum(frame[0] - boxes[0, :2], 0).sum() + np.maximum(boxes[0, 2:] - frame[1], 0).sum()
            common = np.minimum(boxes[:, None, 2:], taken[:, 2:]) - np.maximum(boxes[:, None, :2], taken[:, :2])
            covered = 100 * outside + np.maximum(common, 0).prod(axis=-1).sum()
            if covered < least:
                best, least = (offset, leader, boxes), covered
            if not covered:
                break
        if not least:
            break
    assert best is not None
    return best


def finish(figure: Figure) -> Figure:
    """The figure with its layout as it will stay."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


_SAVING = threading.Lock()


def save(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write `path`.png, at twice the resolution of a page, and `path`.svg, whose text stays text.

    The same figure gives the same bytes.
    """
    base = Path(path)
    base.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (base.with_name(f"{base.name}.{kind}") for kind in ("png", "svg"))
    figure.savefig(png, dpi=2 * DPI, metadata={"Software": None})
    settings: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "usetta", "svg.image_inline": True}
    with _SAVING, matplotlib.rc_context(settings):
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]
