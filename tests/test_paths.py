"""One answer on every path: Python, `eval`, `classify --out` and HTTP; tests/distributed adds a worker of Ray.

On a CPU the views of an image are batched by themselves on every path, so the probabilities are the same to the bit.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import make_image
from evaluate.runs import CLASSES, VIEWS, four_blocks
from serve.conftest import running
from usetta import methods
from usetta.adaptive import Views
from usetta.batch.runner import BatchSettings, classify
from usetta.classifier import Classifier
from usetta.data.dataset import Dataset
from usetta.evaluate.metrics import columns
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import ResultRow, Store
from usetta.images import image_id, open_image
from usetta.models.clip import CLIP
from usetta.prediction import Prediction
from usetta.serve.settings import Settings

METHODS = ("clip", "se", "mta", "zero", "tpt", "c-tpt", "r-tpt", "rlcf", "ttl", "tps", "sts", "use", "tpt+se")
SIZES = ((60, 40), (32, 32), (33, 97), (120, 31))
TEMPLATE = "a photo of a {}."

Probabilities = dict[tuple[str, str], np.ndarray[Any, Any]]
"""(C,) by method and name of the image."""


def make_images(folder: Path) -> list[Path]:
    """Images whose names in a dataset are what their views are keyed by elsewhere, the hash of their pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, size in enumerate(SIZES):
        image = make_image(200 + i, size)
        paths.append(folder / image_id(image))
        image.save(paths[-1], "PNG")
    return paths


def expected_probabilities(model: CLIP, images: Iterable[Path], names: Iterable[str]) -> Probabilities:
    """The answers of `Classifier`, one image after the other."""
    images = list(images)
    return {
        (method, path.name): Classifier(CLASSES, model, method, views=VIEWS)(path).probs
        for method in names
        for path in images
    }


def assert_rows_are_exact(out: Path, method: str, expected: Probabilities, rows: int) -> list[dict[str, Any]]:
    """The predictions in `out` are the expected ones to the bit; returns the rows without an answer."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = parquet.read_table(out).to_pylist()
    assert len({(row["source"], row["key"]) for row in table}) == len(table) == rows, "nothing lost, nothing twice"
    for row in table:
        if row["error"] is None:
            exact = expected[method, row["key"].removesuffix(".png")].tolist()
            probabilities = dict(zip(row["top_labels"], row["top_probabilities"], strict=True))
            assert probabilities == dict(zip(CLASSES, exact, strict=True)), (method, row["key"])
    return [row for row in table if row["error"] is not None]


@pytest.fixture(scope="module")
def model() -> CLIP:
    return four_blocks()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def expected(model: CLIP, images: list[Path]) -> Probabilities:
    return expected_probabilities(model, images, METHODS)


def test_the_images_are_opened_alike_everywhere(images: list[Path]) -> None:
    for path in images:
        assert image_id(open_image(path)) == image_id(open_image(path, for_benchmark=True)) == path.name


def rows_of(model: CLIP, images: list[Path], method: str, out: Path, views: Views, **options: Any) -> list[ResultRow]:
    """What `eval` says, of one method alone, as the other paths ask for one."""
    labels = tuple(i % len(CLASSES) for i in range(len(images)))
    ids = tuple(path.name for path in images)
    dataset = Dataset("same", "Same", "other", CLASSES, ids, labels, images[0].parent, "generated")
    evaluate(model, [dataset], [method], out, EvalSettings(views=views), **options)
    with Store(out, create=False) as store:
        rows = list(store.rows())
    assert len(rows) == len(images)
    return rows


@pytest.mark.parametrize("batch_size", [None, 4])
def test_eval(model: CLIP, images: list[Path], expected: Any, tmp_path: Path, batch_size: int | None) -> None:
    for method in METHODS:
        for row in rows_of(model, images, method, tmp_path / method, VIEWS, batch_size=batch_size):
            exact = {name: value.item() for name, value in columns(expected[method, row.image], row.label).items()}
            answered = {name: getattr(row, name) for name in exact}
            if batch_size:  # images that are answered together differ by rounding
                exact = pytest.approx(exact, abs=1e-5)
            assert answered == exact, (method, row.image)


@pytest.mark.parametrize("method", ["se", "use"])
def test_adaptive_views(model: CLIP, images: list[Path], tmp_path: Path, method: str) -> None:
    """In every command, the same number of views and the same bits."""
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    classifier = Classifier(CLASSES, model, method)  # adaptive by default
    answers = dict(zip([path.name for path in images], classifier(images), strict=True))
    views = {name: len(answer.entropies) for name, answer in answers.items()}
    assert len(set(views.values())) > 1, "the test needs images that are settled early and others that are not"
    for path in images:
        explained = classifier.explain(path)
        assert len(explained.views) == views[path.name]
        assert np.array_equal(explained.prediction.probs, answers[path.name].probs)
    settings = BatchSettings(CLASSES, methods.get(method), (TEMPLATE,), top=len(CLASSES))
    classify(model, settings, [str(path) for path in images], tmp_path / "batch")
    probs = {(method, name): answer.probs for name, answer in answers.items()}
    assert not assert_rows_are_exact(tmp_path / "batch", method, probs, rows=len(images))
    for row in rows_of(model, images, method, tmp_path / "eval", "adaptive"):
        exact = {name: value.item() for name, value in columns(answers[row.image].probs, row.label).items()}
        assert {name: getattr(row, name) for name in exact} == exact
        assert row.views == views[row.image]


def test_classify_to_parquet(model: CLIP, images: list[Path], expected: Probabilities, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for method in METHODS:
        settings = BatchSettings(CLASSES, methods.get(method), (TEMPLATE,), views=VIEWS, top=len(CLASSES))
        done = classify(model, settings, [str(path) for path in images], tmp_path / method)
        assert (done.images, done.failed) == (len(images), 0)
        assert not assert_rows_are_exact(tmp_path / method, method, expected, rows=len(images))


def test_http(model: CLIP, images: list[Path], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in JSON are rounded, so what is compared is what they are rounded from."""
    answered: list[Prediction] = []
    to_dict = Prediction.to_dict

    def recording(self: Prediction, *arguments: Any) -> dict[str, Any]:
        answered.append(self)
        return to_dict(self, *arguments)

    monkeypatch.setattr(Prediction, "to_dict", recording)
    with running(Settings(), model) as server:
        # Every method on one image and one method on every image: what a request costs is mostly not the answer.
        places = [(method, images[i % len(images)]) for i, method in enumerate(METHODS)]
        for method, path in [*places, *(("use", path) for path in images)]:
            response = server.ask(path.read_bytes(), classes=list(CLASSES), method=method, views=VIEWS, top=5)
            assert response.status_code == 200
            probs = expected[method, path.name]
            assert np.array_equal(answered[-1].probs, probs), (method, path.name)
            ranked = {row["label"]: row["probability"] for row in response.json()["ranked"]}
            assert ranked == {name: round(float(p), 6) for name, p in zip(CLASSES, probs, strict=True)}
