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
from usetta.batch import run as bulk
from usetta.classifier import Classifier
from usetta.data.dataset import Dataset
from usetta.distributed import RayEngine
from usetta.evaluate.metrics import columns
from usetta.evaluate.runner import EvalSettings, evaluate
from usetta.evaluate.store import Store
from usetta.images import image_id, open_image
from usetta.models import Model
from usetta.models.clip import CLIP
from usetta.prediction import Prediction
from usetta.serve.settings import Settings

METHODS = ("clip", "se", "mta", "zero", "tpt", "c-tpt", "r-tpt", "rlcf", "ttl", "tps", "sts", "use", "tpt+se")
SIZES = ((60, 40), (32, 32), (33, 97), (120, 31))
TEMPLATE = "a photo of a {}."

Probabilities = dict[str, np.ndarray[Any, Any]]
"""(C,) by method, of each image."""


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


@pytest.mark.parametrize("batch_size", [1, 4])
def test_eval(model: CLIP, images: list[Path], expected: Any, tmp_path: Path, batch_size: int) -> None:
    labels = tuple(i % len(CLASSES) for i in range(len(images)))
    ids = tuple(path.name for path in images)
    dataset = Dataset("same", "Same", "other", CLASSES, ids, labels, images[0].parent, "generated")
    for method in METHODS:  # each in a run of its own, as the other paths ask for one method
        out = tmp_path / method
        evaluate(model, [dataset], [method], out, EvalSettings(views=VIEWS), batch_size=batch_size)
        with Store(out, create=False) as store:
            rows = list(store.rows())
        assert len(rows) == len(images)
        for row in rows:
            exact = {name: value.item() for name, value in columns(expected[method, row.image], row.label).items()}
            found = {name: getattr(row, name) for name in exact}
            if batch_size > 1:  # images that are answered together differ by rounding
                exact = pytest.approx(exact, abs=1e-5)
            assert found == exact, (method, row.image)


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
        setting = bulk.EvalSettings(CLASSES, methods.get(method), (TEMPLATE,), views=VIEWS, top=len(CLASSES))
        out = tmp_path / method
        done = bulk.classify(model, setting, [str(path) for path in images], out, engine=where, load=load_model)
        assert (done.images, done.bad) == (len(images), 0)
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
