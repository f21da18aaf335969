"""One answer, whichever way an image takes: Python, `eval`, `classify --out`, HTTP, and a worker of Ray.

On a CPU the views of an image are batched by themselves on every path, so the probabilities are the same to the bit.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import make_image
from evaluate.runs import CLASSES, VIEWS, four_blocks
from serve.conftest import running
from usetta import methods
from usetta.adaptive import Views
from usetta.batch.runner import BatchSettings, classify
from usetta.classifier import Classifier
from usetta.data.dataset import Dataset
from usetta.distributed import RayEngine
from usetta.evaluate.metrics import columns
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import ResultRow, Store
from usetta.images import image_id, open_image
from usetta.models import Model
from usetta.models.clip import CLIP
from usetta.prediction import Prediction
from usetta.serve.settings import Settings

METHODS = ("clip", "se", "mta", "zero", "tpt", "c-tpt", "r-tpt", "rlcf", "ttl", "tps", "sts", "use", "tpt+se")
SIZES = ((60, 40), (32, 32), (33, 97), (120, 31))
TEMPLATE = "a photo of a {}."


@pytest.fixture(scope="module")
def model() -> CLIP:
    return four_blocks()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images whose names in a dataset are what their views are keyed by elsewhere, the hash of their pixels."""
    folder = tmp_path_factory.mktemp("images")
    paths = []
    for i, size in enumerate(SIZES):
        image = make_image(200 + i, size)
        paths.append(folder / image_id(image))
        image.save(paths[-1], "PNG")
    return paths


@pytest.fixture(scope="module")
def expected(model: CLIP, images: list[Path]) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    """Probabilities (C,) by method and name of the image, by `Classifier`, one image after the other."""
    return {
        (method, path.name): Classifier(CLASSES, model, method, views=VIEWS)(path).probs
        for method in METHODS
        for path in images
    }


def load_model() -> Model:
    """What a worker calls: a model of its own."""
    return four_blocks()


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
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
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
    for row in parquet.read_table(tmp_path / "batch").to_pylist():
        exact = dict(zip(CLASSES, answers[row["key"]].probs.tolist(), strict=True))
        assert dict(zip(row["top_labels"], row["top_probabilities"], strict=True)) == exact
        assert row["views"] == views[row["key"]]
    for row in rows_of(model, images, method, tmp_path / "eval", "adaptive"):
        exact = {name: value.item() for name, value in columns(answers[row.image].probs, row.label).items()}
        assert {name: getattr(row, name) for name in exact} == exact
        assert row.views == views[row.image]


@pytest.mark.parametrize("engine", [None, "ray"])
def test_classify_to_parquet(
    model: CLIP, images: list[Path], expected: Any, tmp_path: Path, engine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    where = None
    if engine:
        pytest.importorskip("ray", reason="Ray is not installed")
        tests = str(Path(__file__).parent)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))
        where = RayEngine("local", workers=1, cpus=torch.get_num_threads())
    for method in METHODS if engine is None else ("use",):
        settings = BatchSettings(CLASSES, methods.get(method), (TEMPLATE,), views=VIEWS, top=len(CLASSES))
        out = tmp_path / method
        done = classify(model, settings, [str(path) for path in images], out, engine=where, load=load_model)
        assert (done.images, done.failed) == (len(images), 0)
        for row in parquet.read_table(out).to_pylist():
            exact = dict(zip(CLASSES, expected[method, row["key"]].tolist(), strict=True))
            assert dict(zip(row["top_labels"], row["top_probabilities"], strict=True)) == exact, (method, row["key"])


def test_http(model: CLIP, images: list[Path], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in JSON are rounded, so what is compared is what they are rounded from."""
    answered: list[Prediction] = []
    as_dict = Prediction.as_dict

    def recording(self: Prediction, *arguments: Any) -> dict[str, Any]:
        answered.append(self)
        return as_dict(self, *arguments)

    monkeypatch.setattr(Prediction, "as_dict", recording)
    with running(Settings(), model) as server:
        for method in METHODS:
            for path in images:
                response = server.ask(path.read_bytes(), classes=list(CLASSES), method=method, views=VIEWS, top=5)
                assert response.status_code == 200
                probs = expected[method, path.name]
                assert np.array_equal(answered[-1].probs, probs), (method, path.name)
                ranked = {row["label"]: row["probability"] for row in response.json()["ranked"]}
                assert ranked == {name: round(float(p), 6) for name, p in zip(CLASSES, probs, strict=True)}
