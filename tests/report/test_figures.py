import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from usetta.evaluate.metrics import GROUPS, Interval, ece
from usetta.methods.recipe import Recipe
from usetta.report import figures, paper, style, trust_figures
from usetta.report.explain import LabelledView, ViewGridRow, view_grid

NAN = math.nan
LONG = "a name of the kind that goes on and on, with $5 and $6 in it and an under_score, number {}"


def paper_gains(*names: str) -> dict[str, dict[str, Interval]]:
    """The paper's gains by these methods, or all, on all fifteen datasets, give or take half a point."""
    result: dict[str, dict[str, Interval]] = {}
    for table in ("table-1", "table-2"):
        rows = {row.method: row.values for row in paper.table(table).rows if row.method}
        for method, row in rows.items():
            points = {name: value - rows["clip"][name] for name, value in row.items() if name not in GROUPS}
            if method != "clip" and (not names or method in names):
                result.setdefault(method, {}).update({name: interval(value) for name, value in points.items()})
    return result


def interval(points: float) -> Interval:
    return Interval(points, points - 0.5, points + 0.5)


def answers(n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    confidence = random.beta(2, 1, n)
    return confidence, random.random(n) < confidence**1.5


def grid_row(true: str = "cat", *labels: str) -> ViewGridRow:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    views = [LabelledView(image, label, 0.25 * (i + 1)) for i, label in enumerate(labels or ("cat", "dog"))]
    return ViewGridRow(true, views)


BETAS = {
    "0": {"fgvc": 64.3},
    "0.5": {"fgvc": 65.2},
    "1": {"fgvc": 64.7},
    "uniform": {"fgvc": 64.8},
    "adaptive": {"fgvc": 65.35},
}
GAMMAS = {1.0: {"in&o": 63.9, "fgvc": 65.38}, 0.4: {"in&o": 64.18, "fgvc": 65.35}, 0.2: {"in&o": 64.2, "fgvc": 65.2}}
STEPS = {"dtd": {"tpt": {1: 47.05, 2: 46.9}, "use": {1: 47.61, 2: 47.7}}, "pets": {"use": {1: 87.94, 4: 88.0}}}

EXAMPLES: dict[str, Callable[[], Figure]] = {
    "gains": lambda: figures.gains(paper_gains("se", "tpt", "use")),
    "gains of many": lambda: figures.gains(paper_gains()),
    "gains of one": lambda: figures.gains({"use": {"pets": interval(-0.26)}}),
    "beta": lambda: figures.beta_strategies(BETAS),
    "gamma": lambda: figures.gamma_sweep(GAMMAS),
    "steps": lambda: figures.steps(STEPS),
    "skips": lambda: figures.skips({"dtd": 41.2, "pets": 90.0}, {"dtd": 46.45, "pets": 87.86}, {"dtd": 47.61}),
    "reliability": lambda: figures.reliability({"clip": answers()[0]}, {"clip": answers()[1]}),
    "cost": lambda: figures.cost(
        {"clip": 0.017, "se": 0.059, "use": 0.144}, {"clip": 63.67, "se": 65.02, "use": 65.35}
    ),
    "views": lambda: view_grid([grid_row(), grid_row("dog", "dog", "cat", "hen", "dog")]),
    "stream": lambda: trust_figures.over_the_stream({"tda": answers()[1], "dmn": answers()[1][::-1]}, 20),
    "orders": lambda: trust_figures.order_sensitivity({"tda": [60.0, 63.0], "dmn": [50.0, 52.0, 57.0]}),
}
LONG_NAMES: dict[str, Callable[[], Figure]] = {
    "gains": lambda: figures.gains(long({"b": dict.fromkeys("abcdef", interval(1.0))}), LONG.format("")),
    "beta": lambda: figures.beta_strategies(long({"0": dict.fromkeys("abcd", 64.3), "x": dict.fromkeys("abcd", 64.3)})),
    "gamma": lambda: figures.gamma_sweep({0.4: long(dict.fromkeys("abcd", 64.3))}),
    "steps": lambda: figures.steps(long({"dtd": {"tpt": {1: 47.05}, "use": {1: 47.61}}})),
    "skips": lambda: figures.skips(*[long({"a": 60.0, "b": 70.0})] * 3, named=(LONG.format(1), LONG.format(2))),
    "reliability": lambda: figures.reliability(*(long({"a": each, "b": each}) for each in answers())),
    "cost": lambda: figures.cost(*[long(dict.fromkeys("abcdefgh", 1.0))] * 2),
    "views": lambda: view_grid([grid_row(LONG, LONG, "x" * 300, *"abcdefg"), grid_row("y" * 300)]),
    "stream": lambda: trust_figures.over_the_stream(long({"a": answers()[1], "b": answers()[1]}), 20),
    "orders": lambda: trust_figures.order_sensitivity(long({"a": [60.0, 63.0], "b": [50.0]})),
}  # fmt: skip


def long(table: dict[str, Any]) -> dict[str, Any]:
    """The table with long names for its short ones."""
    return {LONG.format(key): long(value) if isinstance(value, dict) and isinstance(next(iter(value)), str) else value
            for key, value in table.items()}  # fmt: skip


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in shown(figure)]


def shown(figure: Figure) -> list[Text]:
    """All that is written, at its place, without what belongs to axes that are off and to ticks beyond the ends."""
    figure.draw_without_rendering()
    hidden: list[Text] = []
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if not axis.axes.axison:
            hidden += axis.findobj(Text)
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden += tick.findobj(Text)
    written = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in written if text not in hidden]


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    """Places and values of lines and markers, without those across the panel."""
    return [
        (np.asarray(line.get_xdata(), dtype=float).tolist(), np.asarray(line.get_ydata(), dtype=float).tolist())
        for line in axes.lines
        if line.get_marker() not in ("None", "_")  # a line across, an end of an error bar
    ]


@cache
def example(name: str) -> Figure:
    """A figure that several tests share, since drawing takes long; no test changes more than its resolution."""
    return EXAMPLES[name]()


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "gains of many"])
def test_figures_are_saved_as_png_and_svg(name: str, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    figure = example(name)
    paths = style.save(figure, tmp_path / "new" / "v1.0")
    assert paths == [tmp_path / "new" / "v1.0.png", tmp_path / "new" / "v1.0.svg"]
    with Image.open(paths[0]) as image:
        # Versions of matplotlib round differently.
        np.testing.assert_allclose(image.size, 200 * figure.get_size_inches(), rtol=0, atol=1)
        assert image.width <= 1800
        assert "Software" not in image.info
    svg = ElementTree.parse(paths[1])
    assert {"".join(each.itertext()) for each in svg.iter("{http://www.w3.org/2000/svg}text")} >= {
        line for text in texts(figure) for line in text.split("\n")
    }
    links = [value for each in svg.iter() for key, value in each.attrib.items() if key.endswith("href")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "<dc:date>" not in paths[1].read_text()
    assert dict(matplotlib.rcParams) == before


def test_a_figure_has_the_same_bytes_each_time_and_in_every_thread(tmp_path: Path) -> None:
    def written(i: int) -> list[bytes]:
        return [path.read_bytes() for path in style.save(EXAMPLES["gains of one"](), tmp_path / str(i))]

    alone = written(0)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(written, (1, 2))) == [alone] * 2


@pytest.mark.parametrize(
    "build",
    [*(partial(example, name) for name in EXAMPLES), *LONG_NAMES.values()],
    ids=[*EXAMPLES, *(f"long names: {name}" for name in LONG_NAMES)],
)
def test_all_is_written_within_the_figure_legibly_and_never_as_a_formula(build: Callable[[], Figure]) -> None:
    figure = build()
    for dpi in (72, 200):
        figure.set_dpi(dpi)
        there = shown(figure)
        for text in there:
            box, written = Text.get_window_extent(text), text.get_text()
            assert min(box.x0, box.y0) > -1, written
            assert box.x1 < figure.bbox.x1 + 1, written
            assert box.y1 < figure.bbox.y1 + 1, written
            assert text.get_fontsize() >= 9
            assert "$" not in written or not text.get_parse_math()
    for axes in figure.axes:
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            for one, other in combinations([label for label in labels if label in there], 2):
                assert clearance(one, other) > 0, (one.get_text(), other.get_text())


def clearance(one: Text, other: Text) -> float:
    """How many pixels there are between two lines of text; slanted ones have overlapping boxes, and are turned back."""
    angle = math.radians(one.get_rotation())
    box, its = (Text.get_window_extent(each) for each in (one, other))
    if not angle:
        return max(box.x0 - its.x1, its.x0 - box.x1, box.y0 - its.y1, its.y0 - box.y1)
    (x, y), (its_x, its_y) = (each.get_transform().transform(each.get_position()) for each in (one, other))
    line = 1.2 * one.get_fontsize() / 72 * one.get_figure().dpi
    return abs((its_x - x) * math.sin(angle) - (its_y - y) * math.cos(angle)) - line


EMPTY: list[tuple[Callable[[], Figure], str]] = [
    (lambda: figures.gains({}), "no methods"),
    (lambda: figures.beta_strategies({}), "no strategies"),
    (lambda: figures.beta_strategies({"adaptive": {}}), "no datasets"),
    (lambda: figures.gamma_sweep({}), "no values of γ"),
    (lambda: figures.steps({}), "no datasets"),
    (lambda: figures.steps({"dtd": {}}), "no methods"),
    (lambda: figures.steps({"dtd": {"use": {}}}), "no numbers of steps"),
    (lambda: figures.skips({}, {}, {}), "no datasets"),
    (lambda: figures.reliability({}, {}), "no methods"),
    (lambda: figures.cost({"se": 1.0}, {"use": 1.0}), "no method with both seconds per image and an accuracy"),
    (lambda: view_grid([]), "no images"),
    (lambda: view_grid([grid_row(), ViewGridRow("hen", [])]), r"image 2 \(hen\) has no views"),
]


@pytest.mark.parametrize(("build", "message"), EMPTY, ids=[message for _, message in EMPTY])
def test_nothing_to_show_is_an_error_that_says_what_is_missing(build: Callable[[], Figure], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_gains_are_points_with_intervals_in_the_given_order() -> None:
    gain = {"se": {"b": Interval(1.5, 1.25, 2.0), "a": interval(-1.0)}, "use": {"a": interval(2.0), "c": interval(NAN)}}
    figure = figures.gains(gain, "tpt")
    (axes,) = figure.axes
    se, use = (np.array(points) for points in lines(axes))
    assert se == pytest.approx(np.array([[-1 / 6, 5 / 6, 11 / 6], [1.5, -1.0, NAN]]), nan_ok=True)
    assert use == pytest.approx(np.array([[1 / 6, 7 / 6, 13 / 6], [NAN, 2.0, NAN]]), nan_ok=True), "gaps"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["b", "a", "c"]
    of_se, of_use = (container[2][0].get_segments() for container in axes.containers)
    assert np.array(of_se)[:, :, 1] == pytest.approx(np.array([[1.25, 2.0], [-1.5, -0.5]]))
    assert np.array(of_use)[:, :, 1] == pytest.approx(np.array([[1.5, 2.5]]))
    assert axes.get_ylabel() == "gain over tpt, points"
    assert 0.0 in [line.get_ydata()[0] for line in axes.lines]
    assert {"+1.50", "−1.00", "+2.00", "se", "use"} <= set(texts(figure))


def test_gains_of_many_methods_go_on_in_a_second_row() -> None:
    gain = paper_gains()
    panels = example("gains of many").axes
    assert len(panels) > 1
    written = [label.get_text() for axes in panels for label in axes.get_xticklabels()]
    assert written == list(gain["use"])
    assert len({axes.get_ylim() for axes in panels}) == 1
    drawn = [value for axes in panels for value in lines(axes)[list(gain).index("use")][1]]
    assert drawn == pytest.approx([one.estimate for one in gain["use"].values()])


def test_beta_strategies_join_the_fixed_ones_and_mark_the_others() -> None:
    table = {**BETAS, "β = 0.7": {"fgvc": NAN}}
    figure = figures.beta_strategies(table, std={"adaptive": {"fgvc": 0.1}})
    (axes,) = figure.axes
    fixed, uniform, adaptive = lines(axes)
    assert fixed[0] == [0, 1, 2, 5]
    assert fixed[1] == pytest.approx([64.3, 65.2, 64.7, NAN], nan_ok=True)
    assert (uniform, adaptive) == (([3], [64.8]), ([4], [65.35]))
    assert [label.get_text() for label in axes.get_xticklabels()] == list(table)
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [65.35]
    assert [line.get_color() for line in axes.lines if line.get_marker() == "D"] == [
        style.series_styles(["se"])["se"].colour
    ]
    (error,) = axes.containers
    assert error[2][0].get_segments()[0] == pytest.approx(np.array([[4, 65.25], [4, 65.45]]))


def test_gamma_is_sorted_and_its_default_marked() -> None:
    figure = figures.gamma_sweep(GAMMAS, method="se")
    for axes, group in zip(figure.axes, ("in&o", "fgvc"), strict=True):
        every, default = lines(axes)
        assert every == ([0.2, 0.4, 1.0], [GAMMAS[gamma][group] for gamma in (0.2, 0.4, 1.0)])
        assert default == ([0.4], [GAMMAS[0.4][group]])
        assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [0.4]
        assert axes.get_title() == group
    (declared,) = [each.default for each in fields(Recipe) if each.name == "gamma"]
    assert f"γ (dotted: the default, {declared})" in texts(figure)


def test_panels_have_their_own_level_and_the_same_span() -> None:
    limits = [axes.get_ylim() for axes in figures.gamma_sweep(GAMMAS).axes]
    spans = [high - low for low, high in limits]
    assert spans[0] == pytest.approx(spans[1])
    assert limits[0][0] < 63.9 < 64.2 < limits[0][1]
    assert sum(limits[1]) / 2 == pytest.approx((65.2 + 65.38) / 2)


def test_steps_have_a_panel_for_each_dataset_and_a_gap_for_what_is_missing() -> None:
    figure = figures.steps(STEPS, std={"dtd": {"use": {1: 0.2, 2: 0.3}}})
    dtd, pets = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["dtd", "pets"]
    assert lines(dtd)[0][0] == [1, 2, 4]
    assert lines(dtd)[0][1] == pytest.approx([47.05, 46.9, NAN], nan_ok=True)
    assert lines(pets)[0][1] == pytest.approx([NAN, NAN, NAN], nan_ok=True)
    assert lines(pets)[1][1] == pytest.approx([87.94, NAN, 88.0], nan_ok=True)
    (error,) = dtd.containers
    assert np.array(error[2][0].get_segments())[:, :, 1] == pytest.approx(np.array([[47.41, 47.81], [47.4, 48.0]]))
    assert {"tpt", "use", "steps", "accuracy, %"} <= set(texts(figure))


def test_skips_show_shares_as_bars_and_both_accuracies() -> None:
    figure = figures.skips(
        {"dtd": 41.23, "pets": 90.0}, {"dtd": 46.456}, {"dtd": 47.61, "pets": NAN}, named=("without", "with")
    )
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.containers[0]] == [41.23, 90.0]
    before, after = lines(axes)
    assert before[0] == pytest.approx([46.456, NAN], nan_ok=True)
    assert after[0] == pytest.approx([47.61, NAN], nan_ok=True)
    written = texts(figure)
    assert {"41.2", "46.46", "47.61", "90.0", "accuracy without", "accuracy with"} <= set(written)
    assert written.count("–") == 2


def test_reliability_adds_up_to_the_ece_and_counts_every_image() -> None:
    confidence = np.array([0.05, 0.55, 0.58, 0.95, 1.0, NAN])
    right = np.array([0, 1, 0, 1, 1, 1])
    figure = figures.reliability({"use": confidence}, {"use": right}, bins=10)
    above, below = figure.axes
    assert [bar.get_height() for bar in above.containers[0]] == pytest.approx([0, 50, 100])
    assert [bar.get_x() for bar in above.containers[0]] == pytest.approx([0, 50, 90])
    gaps = [bar.get_height() for bar in above.containers[1]]
    assert gaps == pytest.approx([5, 6.5, 2.5])
    counts = [bar.get_height() for bar in below.containers[0]]
    assert counts == [1, 0, 0, 0, 0, 2, 0, 0, 0, 2]
    expected = float(ece(right[:5], np.ones(5), confidence[:5], 10))
    assert np.dot(gaps, [1, 2, 2]) / 5 == pytest.approx(expected)
    assert f"ECE {expected:.2f} %" in texts(figure)
    assert ([0, 100], [0, 100]) in [(list(line.get_xdata()), list(line.get_ydata())) for line in above.lines]


def test_reliability_of_a_method_without_images_is_an_empty_panel() -> None:
    figure = figures.reliability({"use": [0.5], "tpt": []}, {"use": [True], "se": [True]})
    assert texts(figure).count("no images") == 2
    with pytest.raises(ValueError, match=r"use: confidence \(2,\) and right \(1,\) must have one value for each image"):
        figures.reliability({"use": [0.5, 0.6]}, {"use": [True]})
    with pytest.raises(ValueError, match="at least one bin"):
        figures.reliability({"use": [0.5]}, {"use": [True]}, bins=0)


def efficiency(column: str) -> dict[str, float]:
    return {row.method or row.name: row.values[column] for row in paper.table("table-10").rows}


CROWD = {f"use:steps={i}:gamma=0.{i}": 1 + 0.002 * math.sin(i) for i in range(17)}
HEAP = {f"m{i}": 1.0 for i in range(9)} | {"far away": 3.0}


@pytest.mark.parametrize(
    ("seconds", "right"),
    [
        (efficiency("seconds"), efficiency("fgvc")),
        (CROWD, {name: 65 + 0.1 * math.cos(i) for i, name in enumerate(CROWD)}),
        (HEAP, HEAP),
    ],
    ids=["paper", "crowd", "heap"],
)
def test_labels_of_costs_touch_neither_each_other_nor_the_edge(
    seconds: dict[str, float], right: dict[str, float]
) -> None:
    figure = figures.cost(seconds, right)
    (axes,) = figure.axes
    for dpi in (72, 200):
        figure.set_dpi(dpi)
        figure.draw_without_rendering()
        boxes = {text.get_text(): Text.get_window_extent(text) for text in axes.texts}
        assert set(boxes) == set(seconds)
        for (one, box), (other, its) in combinations(boxes.items(), 2):
            assert not box.overlaps(its), (one, other)
        points = axes.transData.transform([*zip(seconds.values(), right.values(), strict=True)])
        for name, box in boxes.items():
            assert axes.bbox.count_contains(box.corners()) == 4, name
            assert not box.count_contains(points), f"{name} hides a point"


def test_cost_draws_methods_with_both_numbers_and_chooses_the_axis() -> None:
    figure = figures.cost({"clip": 0.02, "se": 0.1, "tpt": None, "use": 0.19}, {"use": 65.0, "clip": 63.0, "se": NAN})
    (axes,) = figure.axes
    assert lines(axes) == [([0.02], [63.0]), ([0.19], [65.0])]
    assert axes.get_xscale() == "linear"
    (axes,) = figures.cost({"clip": 0.02, "use": 0.21}, {"clip": 63.0, "use": 65.0}).axes
    assert axes.get_xscale() == "log"
    assert {"0.02", "0.05", "0.1", "0.2"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert figures.cost({"clip": 0.0, "use": 0.21}, {"clip": 63.0, "use": 65.0}).axes[0].get_xscale() == "linear"


def test_risk_grows_with_the_share_that_is_answered() -> None:
    figure = trust_figures.risk_coverage_curves({"clip": [0.9, 0.5, 0.8, 0.6]}, {"clip": [True, False, True, False]})
    (axes,) = figure.axes
    ((coverage, risk),) = lines(axes)
    assert coverage == [25, 50, 75, 100]
    assert risk == pytest.approx([0, 0, 100 / 3, 50])
    assert "clip (20.8)" in texts(figure), "the area is the mean of the four"


def test_over_the_stream_is_the_mean_of_the_last_images_over_all_orders() -> None:
    right = {"tda": [[True, False, True, True], [True, True, False, True]], "dmn": [False, False, True]}
    figure = trust_figures.over_the_stream(right, 2)
    (axes,) = figure.axes
    tda, dmn = lines(axes)
    assert tda == ([2, 3, 4], pytest.approx([75, 50, 75]))
    assert dmn == ([2, 3], pytest.approx([0, 50])), "a single order"
    assert {"tda", "dmn", "images so far", "accuracy of the last 2 images, %"} <= set(texts(figure))
    (axes,) = trust_figures.over_the_stream(right, 10).axes
    assert lines(axes) == [([4], [75]), ([3], pytest.approx([100 / 3]))], "a stream that is shorter than the window"


def test_order_sensitivity_has_a_point_for_each_order_and_their_mean() -> None:
    figure = trust_figures.order_sensitivity({"tda": [60.0, 63.0], "dmn": [50.0, 52.0, 57.0]})
    (axes,) = figure.axes
    assert lines(axes) == [([60, 63], [0, 0]), ([50, 52, 57], [1, 1, 1])]
    means = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "None"]
    assert means == [[61.5, 61.5], [53, 53]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["tda", "dmn"]
    assert axes.get_ylim() == (1.5, -0.5), "the first method is at the top"


@pytest.mark.parametrize(
    "build",
    [
        lambda: figures.gains({"use": {"a": interval(NAN)}}),
        lambda: figures.beta_strategies({"0.5": {"a": NAN}, "adaptive": {"a": None}}),
        lambda: figures.gamma_sweep({0.2: {"a": NAN}, 0.4: {}}),
        lambda: figures.steps({"a": {"use": {1: NAN}}}, std={"a": {"use": {1: 0.5}}}),
        lambda: figures.skips({"a": NAN}, {}, {}),
        lambda: figures.cost({"use": NAN}, {"use": 1.0}),
    ],
)
def test_where_every_number_is_missing_nothing_is_drawn(build: Callable[[], Figure]) -> None:
    for axes in build().axes:
        assert not [bar for series in axes.containers for bar in series]
        points = [point for places, values in lines(axes) for point in zip(places, values, strict=True)]
        assert not [point for point in points if np.isfinite(point).all()]


def test_views_are_framed_by_whether_they_are_right_and_say_so() -> None:
    figure = view_grid(
        [
            grid_row("cat", "cat", "dog", "cat"),
            ViewGridRow("dog", [LabelledView(np.zeros((4, 8, 3), np.uint8), "hen", NAN)]),
        ]
    )
    grid = np.array(figure.axes).reshape(2, 3)
    assert [axes.get_xlabel() for axes in grid[0]] == [
        "✓ cat\nentropy 0.25",
        "✗ dog\nentropy 0.50",
        "✓ cat\nentropy 0.75",
    ]
    frames = [matplotlib.colors.to_hex(axes.spines["left"].get_edgecolor()) for axes in grid[0]]
    assert frames == ["#009e73", "#d55e00", "#009e73"]
    assert grid[1, 0].get_xlabel() == "✗ hen\nentropy –"
    assert [axes.axison for axes in grid[1]] == [True, False, False]
    assert [axes.get_title() for axes in grid[0]] == ["weak view", "strong view 1", "strong view 2"]
    assert [axes.get_ylabel() for axes in grid[:, 0]] == ["true: cat", "true: dog"]
    assert np.array_equal(grid[0, 0].images[0].get_array(), grid_row().views[0].image)
