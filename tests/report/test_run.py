"""The report of a run: one file that holds all, whatever the run has and whatever names are in it."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from conftest import make_image
from report.pages import Page, leave_figures_empty
from usetta.cli import results as command  # noqa: F401  (it registers the command)
from usetta.cli.app import app
from usetta.evaluate.store import FailedImage, ResultRow, ShownViews, Store, StoreError, ViewRecord
from usetta.report.run import write_report

CLASSES = ("tabby cat", "red fox", "church")
VIEWS = {"views": 6, "size": 32, "scale": [0.08, 1.0], "ratio": [0.75, 1.3333333333333333], "severity": 1.0}


def fill(
    store: Store,
    root: Path,
    *,
    dataset: str = "animals",
    methods: tuple[str, ...] = ("clip", "se", "use"),
    seeds: tuple[int, ...] = (0,),
    classes: tuple[str, ...] = CLASSES,
    names: tuple[str, ...] = ("a.png", "b.png", "c.png", "d.png"),
    augmix: bool = False,
) -> None:
    """A run on four images that show class 0: clip is right on the first two, the others on all but the second."""
    root.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        make_image(i).save(root / name)
    store.fix("run", "model", {"name": "tiny-random", "fingerprint": "abc123"})
    store.fix("run", "views", VIEWS)
    facts = {"title": dataset.title(), "family": "other", "augmix": augmix, "fingerprint": "f00", "images": 40}
    store.fix("dataset", dataset, {**facts, "classes": len(classes)})
    store.note("classes", dataset, classes)
    store.note("root", dataset, str(root))
    rows, seen = [], []
    for seed in seeds:
        for i, name in enumerate(names):
            seen.append(
                ShownViews(dataset, name, seed, (ViewRecord(0, 1, 1.05), ViewRecord(4, 0, 0.25), ViewRecord(2, 2, 0.5)))
            )
            for method in methods:
                right = i < 2 if method == "clip" else i != 1
                row = ResultRow(
                    dataset=dataset,
                    image=name,
                    seed=seed,
                    method=method,
                    label=0,
                    prediction=0 if right else 1,
                    confidence=0.75,
                    true_probability=(0.75 if right else 0.125) + 0.01 * i,
                    rank=0 if right else 1,
                    sum_of_squares=0.6,
                    delta=0.4,
                    beta=0.5,
                    before=0 if method == "use" else None,
                    skipped=i == 0 if method == "use" else None,
                    views=64,
                    seconds=1.25 if method == "use" else 0.25,
                )
                rows.append(row)
    store.add(rows, seen)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_figures_empty(monkeypatch)


def report(store: Store, path: Path, **settings: object) -> Page:
    write_report(store, path, **settings)  # type: ignore[arg-type]
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    """The report of a run on two datasets, and its source."""
    folder = tmp_path_factory.mktemp("usual")
    with Store(folder / "run") as store:
        fill(store, folder / "animals")
        fill(store, folder / "houses", dataset="houses", augmix=True)
        path = write_report(store, folder / "out" / "report.html")
    html = path.read_text(encoding="utf-8")
    return Page(html), html


def test_it_says_what_was_measured(usual: tuple[Page, str]) -> None:
    page, _ = usual
    assert "3 methods on 2 datasets" in page.text
    assert "Model tiny-random classified 8 images by clip, se, use" in page.text
    assert "Of 8 answers of clip , use turned 4 from wrong to right and 2 from right to wrong." in page.text
    assert "clip 50.0 % se 75.0 % use 75.0 % Share of right answers, as the mean over the datasets." in page.text
    assert "Animals (4 of 40 images, 3 classes), Houses (4 of 40 images, 3 classes)" in page.text
    assert "6 of each image: the image itself, called the weak view, and 5 random crops" in page.text


def test_it_has_the_tables_of_the_run(usual: tuple[Page, str]) -> None:
    page, _ = usual
    assert re.search(
        r"Accuracy, % \(tiny-random\) method Animals a Houses a clip 50\.00 50\.00 se 75\.00 75\.00", page.text
    )
    assert "Accuracy gain over clip, points (tiny-random)" in page.text
    assert re.search(r"Houses se 25\.00 −50\.00 100\.00", page.text)
    assert "Too few images to draw: Animals (4), Houses (4). With fewer than 100 images" in page.text
    assert "Animals: all metrics" in page.text
    assert "Houses: all metrics" in page.text


def test_nothing_is_loaded_from_elsewhere_and_no_script_can_run(usual: tuple[Page, str]) -> None:
    page, html = usual
    assert not {"script", "link", "iframe", "object", "embed", "base", "form", "video", "source"} & {
        tag for tag, _ in page.elements
    }
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "srcset", "poster", "data"):
                assert value.startswith("data:image/")
            if name == "href":
                assert value.startswith("#")
    assert "url(" not in html
    assert "@import" not in html
    (policy,) = (meta for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"] == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )


def test_links_lead_somewhere_and_ids_are_unique(usual: tuple[Page, str]) -> None:
    page, _ = usual
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) == 10
    assert [link["href"] for link in page.all("a")] == [f"#{name}" for name in ids]


def test_every_image_has_words_or_stands_beside_them(usual: tuple[Page, str]) -> None:
    page, _ = usual
    figures = [image for image in page.all("img") if "width" in image]
    assert len(figures) == 6
    assert all(image["alt"] for image in figures)
    assert all("alt" in image for image in page.all("img"))


def test_the_changed_images_are_shown_with_answers_and_views(usual: tuple[Page, str]) -> None:
    page, _ = usual
    _, _, changed = page.text.partition("clip → use")
    changed, _, folded = changed.partition("clip → se: 4 became right, 2 wrong")
    assert "Wrong → right: 4 of 8 answers tabby cat clip: ✗ red fox 75 % use: ✓ tabby cat 75 %" in changed
    assert "Right → wrong: 2 of 8 answers tabby cat clip: ✓ tabby cat 75 % use: ✗ red fox 75 %" in changed
    assert "true class: 14 % → 76 %" not in changed
    assert "true class: 76 % → 14 % Animals, b.png" in changed
    assert changed.count("weak view ✗ red fox entropy 1.05 strong view 4 ✓ tabby cat entropy 0.25") == 6
    assert changed.count("strong view 2 ✗ church entropy 0.50") == 6
    assert "seed" not in changed
    assert folded.count("weak view") == 6


def test_the_file_is_small(usual: tuple[Page, str]) -> None:
    page, html = usual
    for image in page.all("img"):
        if "width" not in image:
            with Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2]))) as small:
                assert small.format == "JPEG"
                assert max(small.size) <= 160
    assert len(html) < 2_000_000


@pytest.mark.usefixtures("undrawn")
def test_it_shows_where_the_numbers_come_from(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals")
        store.fix("run", "prompt", {"templates": ["a photo of a {}."], "context": None})
        store.fix("recipe", "use on other", {"name": "use", "steps": 1, "skip": True})
        invocation = {
            "command": "usetta eval -m clip,use",
            "commit": "deadbeef+",
            "torch": "2.9.1",
            "peak_memory": 1.5e9,
        }
        store.note("invocation", "1", invocation)
        page = report(store, tmp_path / "report.html")
    for text in (
        "model fingerprint abc123 name tiny-random",
        "prompt context – templates a photo of a {}.",
        "use on other name use skip yes steps 1",
        "command usetta eval -m clip,use commit deadbeef+ torch 2.9.1 peak memory 1.50 GB",
        "animals augmix no classes 3 family other fingerprint f00 images 40 title Animals",
        f"folder {tmp_path / 'animals'}",
        "3 class names tabby cat, red fox, church",
    ):
        assert text in page.text
    assert {"name": "color-scheme", "content": "light dark"} in page.all("meta")


@pytest.mark.usefixtures("undrawn")
def test_images_that_could_not_be_read_are_listed_with_their_reasons(tmp_path: Path, usual: tuple[Page, str]) -> None:
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals")
        store.add([], failed=[FailedImage("animals", f"bad-{i:03}.png", f"reason {i}") for i in range(120)])
        store.add([], failed=[FailedImage("other", "x.png", "empty")])
        page = report(store, tmp_path / "report.html")
    assert "Animals: 120 bad-000.png : reason 0" in page.text
    assert "bad-099.png : reason 99 and 20 more, which usetta export lists" in page.text
    assert "bad-100.png" not in page.text
    assert "other: 1 x.png : empty" in page.text
    assert "None: every image could be read." not in page.text
    assert "None: every image could be read." in usual[0].text


@pytest.mark.usefixtures("undrawn")
def test_names_of_all_kinds_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    with Store(tmp_path / "run") as store:
        fill(
            store,
            tmp_path / "<img onerror=alert(2)>",
            dataset="<iframe>",
            classes=(bad, '"><b onclick=alert(3)>', "$x^2$ & {{ 7 * 7 }}"),
            names=("<script>.png", "'\"><svg>.png", "c&d.png", "é.png"),
        )
        store.add([], failed=[FailedImage("<iframe>", "<video>.png", "<audio> is no image")])
        store.note("invocation", "1", {"command": "<object> caf\udce9"})  # no text, but no reason to stop
        page = report(store, tmp_path / "report.html")
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "svg", "video", "audio", "object"}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    for text in (bad, "<iframe>", "'\"><svg>.png", "<video>.png", "<audio> is no", "<object> caf?", "{{ 7 * 7 }}"):
        assert text in page.text
    assert f"Image: {bad}" in [image["alt"] for image in page.all("img")]


@pytest.mark.usefixtures("undrawn")
def test_an_image_that_is_gone_is_replaced_by_the_reason(tmp_path: Path) -> None:
    messages: list[str] = []
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals")
        (tmp_path / "animals" / "b.png").unlink()
        (tmp_path / "animals" / "c.png").write_bytes(b"not an image")
        page = report(store, tmp_path / "report.html", log=messages.append)
    assert "no image: no such file tabby cat clip: ✓ tabby cat" in page.text
    assert page.text.count("no image: ") == 4  # in what se changed as well
    assert len(messages) == 1
    assert messages[0].startswith(f"2 images cannot be shown, such as {tmp_path / 'animals' / 'c.png'}: ")
    with Store(tmp_path / "run") as store:
        store.note("root", "animals", str(tmp_path / "moved"))
        page = report(store, tmp_path / "report.html")
    assert "What do the views see?" not in page.text
    assert [image for image in page.all("img") if "width" not in image] == []


@pytest.mark.usefixtures("undrawn")
def test_one_method_alone_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    for method, notices in (("clip", 0), ("use", 1)):
        with Store(tmp_path / method) as store:
            fill(store, tmp_path / "animals", methods=(method,))
            page = report(store, tmp_path / f"{method}.html")
        assert "1 method on 1 dataset" in page.text
        assert "Which images changed" not in page.text
        assert "Are the differences" not in page.text
        assert "What does it cost?" not in page.text
        assert ("Which images were left alone?" in page.text) == (method == "use")
        assert page.text.count("The run has no answers of clip, so nothing is compared with it.") == notices
        assert {link["href"][1:] for link in page.all("a")} == {
            attributes["id"] for _, attributes in page.elements if "id" in attributes
        }


@pytest.mark.usefixtures("undrawn")
def test_several_seeds_are_means_and_a_changed_image_names_its_own(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals", seeds=(0, 7), methods=("clip", "use"))
        first = next(store.rows({"image": "c.png", "seed": 7, "method": "use"}))
        store.add([replace(first, true_probability=0.99)])
        page = report(store, tmp_path / "report.html")
    assert "random draws seeds 0, 7" in page.text
    assert "75.00 ±0.00" in page.text
    assert "Wrong → right: 4 of 8 answers; the most changed images" in page.text
    assert "true class: 14 % → 99 % Animals, c.png, seed 7" in page.text
    assert page.text.count("Animals, c.png") == 1


@pytest.mark.usefixtures("undrawn")
def test_any_method_can_be_compared_with_and_a_wrong_name_is_an_error(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals", methods=("se", "tpt", "use"))
        page = report(store, tmp_path / "report.html", baseline="se")
        assert "se → use" in page.text
        assert "se → tpt: 0 became right, 0 wrong" in page.text
        with pytest.raises(ValueError, match="unknown method 'ues'; did you mean 'use'"):
            report(store, tmp_path / "none.html", baseline="ues")
        with pytest.raises(ValueError, match="no answers of zero to compare with, only of se, tpt, use"):
            report(store, tmp_path / "none.html", baseline="zero")
    assert not (tmp_path / "none.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_fewer_images_are_shown_on_demand_and_a_third_of_them_in_folds(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals")  # two methods make the same two images right, and one wrong
        assert len(report(store, tmp_path / "2.html", shown=2).all("article")) == (2 + 1) + (1 + 1)
        assert len(report(store, tmp_path / "0.html", shown=0).all("article")) == 0


@pytest.mark.usefixtures("undrawn")
def test_the_method_that_was_asked_for_last_is_shown_in_full(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        fill(store, tmp_path / "animals")
        for method in ("clip", "use", "se", "zero"):
            store.fix("recipe", f"{method} on other", {"name": method})
        page = report(store, tmp_path / "report.html")
    assert "clip → se Wrong → right: 2 of 4 answers" in page.text
    assert "clip → use: 2 became right, 1 wrong" in page.text


def test_an_empty_run_is_an_error(tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store, pytest.raises(StoreError, match="no results yet"):
        write_report(store, tmp_path / "report.html")


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_into_the_run_or_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store(run) as store:
        fill(store, tmp_path / "animals")
    done = CliRunner().invoke(app, ["report", str(run)])
    assert (done.exit_code, done.stdout) == (0, f"report: {run / 'report.html'}\n")
    out = tmp_path / "elsewhere" / "page.html"
    done = CliRunner().invoke(app, ["report", str(run), "--out", str(out), "--baseline", "se", "--shown", "1"])
    assert (done.exit_code, done.stdout) == (0, f"report: {out}\n")
    page = Page(out.read_text(encoding="utf-8"))
    assert "se → use" in page.text

    wrong = CliRunner().invoke(app, ["report", str(run), "--baseline", "zero"])
    assert wrong.exit_code == 2
    assert "no answers of zero" in wrong.stderr
    absent = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert absent.exit_code == 2
    assert f"there is no run in {tmp_path / 'nothing'}" in absent.stderr
    assert not (tmp_path / "nothing").exists()
