"""The exported image tower gives the features of the library, in the reference of onnx and in onnxruntime."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import load as load_onnx
from onnx.reference import ReferenceEvaluator
from typer.testing import CliRunner

from conftest import make_image
from models.tiny import TINY_RESNET, disturbed
from usetta import Classifier
from usetta.cli import app
from usetta.images import image_id
from usetta.models import ModelError
from usetta.models.base import view_recipe
from usetta.models.checkpoints import save_model
from usetta.models.clip import CLIP
from usetta.models.export import OPSET, export_model
from usetta.views import make_views

CLASSES = ["tabby cat", "red fox", "golden retriever"]


@pytest.fixture
def exported(tiny_vit: CLIP, tmp_path: Path) -> Path:
    weights = save_model(tiny_vit, tmp_path / "model")
    folder = tmp_path / "exported"
    options = ["--classes", ",".join(CLASSES), "--model", str(weights.parent)]
    result = CliRunner().invoke(app, ["export-model", str(folder), *options])
    assert result.exit_code == 0, result.stderr
    assert "ONNX opset 18, any number of images" in result.stdout
    return folder


def test_features_are_those_of_the_library_for_any_number_of_images(exported: Path, tiny_vit: CLIP) -> None:
    graph = load_onnx(exported / "image.onnx")
    assert [entry.version for entry in graph.opset_import if not entry.domain] == [OPSET]
    evaluator = ReferenceEvaluator(graph)
    for count in (1, 3):
        pixels = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(count))
        (features,) = evaluator.run(None, {"pixels": pixels.numpy()})
        np.testing.assert_allclose(features, tiny_vit.encode_images(pixels).numpy(), atol=1e-4)
    described = json.loads((exported / "model.json").read_text())
    assert described["classes"] == CLASSES
    assert described["logit_scale"] == pytest.approx(tiny_vit.logit_scale)
    ids = tiny_vit.text.tokenize([f"a photo of a {name}." for name in CLASSES])
    expected = tiny_vit.text.encode(tiny_vit.text.embed(ids), ids)
    np.testing.assert_allclose(np.load(exported / "text.npy"), expected.numpy(), atol=1e-5)


def test_a_residual_network(tmp_path: Path) -> None:
    model = disturbed(TINY_RESNET)
    export_model(model, ["a"], torch.ones(1, 24), tmp_path)
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    (features,) = ReferenceEvaluator(str(tmp_path / "image.onnx")).run(None, {"pixels": pixels.numpy()})
    np.testing.assert_allclose(features, model.encode_images(pixels).numpy(), atol=1e-4)


def test_the_example_answers_as_se(exported: Path, tiny_vit: CLIP) -> None:
    pytest.importorskip("onnxruntime", reason="the example needs onnxruntime: pip install 'usetta[onnx]'")
    spec = importlib.util.spec_from_file_location("onnx_se", Path(__file__).parents[2] / "examples" / "onnx_se.py")
    assert spec
    assert spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    image = make_image(3)
    views = make_views(image, image_id(image), view_recipe(tiny_vit, 32)).numpy().astype(np.float32) / 255
    expected = Classifier(CLASSES, tiny_vit, "se", views=32)(image).probs
    np.testing.assert_allclose(example.predict(exported, views), expected, atol=1e-4)
    drawn = example.make_views(image, 32, count=8)
    assert drawn.shape == (8, 3, 32, 32)
    np.testing.assert_allclose(drawn[0], views[0], atol=0.03)


def test_a_model_without_a_tower_cannot_be_exported(tmp_path: Path) -> None:
    class Other:
        name = "colours"

    with pytest.raises(ModelError, match="colours has its own image encoder, which cannot be exported"):
        export_model(Other(), ["a"], torch.ones(1, 3), tmp_path)  # type: ignore[arg-type]
