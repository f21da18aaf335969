"""The protocol of models: the one that docs/models.md builds works, and views reach a tower as the protocol says."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta import Classifier, ModelError, Prediction, load_model
from usetta.models import Model, TextTower, list_models, registry
from usetta.models.base import HasLastBlocks, encode_views, encode_views_together, require_last_blocks
from usetta.models.clip import CLIP

PAGE = (
    (Path(__file__).parents[2] / "docs" / "models.md")
    .read_text(encoding="utf-8")
    .partition("## A model of your own")[2]
)
COLOURS, SCRIPT = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
CLASSES = ["red", "green", "blue"]


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Prediction]:
    """The reader's model, registered, and its answer about a greenish image."""
    module = ModuleType("colours")
    exec(compile(COLOURS, "colours.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "colours", module)
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).integers(0, 90, (40, 50, 3))
    Image.fromarray((noise + np.array([20, 130, 0])).astype(np.uint8)).save("image.png")
    space: dict[str, object] = {}
    exec(compile(SCRIPT, "models.md", "exec"), space)
    answer = space["answer"]
    assert isinstance(answer, Prediction)
    yield answer
    registry.unregister_model("colours")


def test_the_page_lists_what_the_protocol_requires() -> None:
    table = PAGE.partition("\n\n```")[0].partition("| attribute |")[2]
    rows = re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {*Model.__annotations__, *(name for name in vars(Model) if not name.startswith("_"))}


@pytest.mark.usefixtures("colours")
def test_the_page_s_model_is_a_model() -> None:
    model = load_model("Colours")
    assert isinstance(model, Model)
    assert isinstance(model.text, TextTower)
    assert not isinstance(model, HasLastBlocks)
    assert list_models()[-1] == registry.ModelRow(
        "colours", "mean colour", "colours.py", "red, green or blue", cached=True
    )
    with pytest.raises(ModelError, match="colours has its own image encoder"):
        load_model("colours", precision="bf16")


def test_the_page_s_model_answers_by_every_method_but_ttl(colours: Prediction) -> None:
    assert colours.label == "green"
    model = load_model("colours")
    for method in ("clip", "se", "zero", "mta", "tpt", "tps", "rlcf", "use"):
        answer = Classifier(CLASSES, model, method, views=8)("image.png")
        assert answer.label == "green", method
        assert answer.probs.sum() == pytest.approx(1, abs=1e-5)
    with pytest.raises(
        ValueError, match="the image tower of colours has no attention blocks .* which TTL needs: use a"
    ):
        Classifier(CLASSES, model, "ttl")


def test_an_installed_package_adds_the_page_s_model(tmp_path: Path) -> None:
    (tmp_path / "colours.py").write_text(COLOURS, encoding="utf-8")
    info = tmp_path / "colours-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: colours\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[usetta.models]\ncolours = colours:ENTRY\n")
    code = "from usetta import list_models, load_model; print(list_models()[-1].name, load_model('colours').name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["colours", "colours"], done.stderr


def test_models_of_ours_have_last_blocks_or_say_why_not() -> None:
    for model in (disturbed(TINY_VIT), disturbed(TINY_RESNET)):
        assert isinstance(model, HasLastBlocks)
    vit = disturbed(TINY_VIT)
    assert require_last_blocks(vit) is vit
    with pytest.raises(ValueError, match="the image tower of tiny has no attention blocks"):
        require_last_blocks(disturbed(TINY_RESNET))


class TwoWays:
    """A tower that encodes crops differently, and records the sizes of the batches it gets."""

    embed_dim, image_size = 2, 4

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []

    def encode_images(self, pixels: Tensor) -> Tensor:
        self.batches.append(("images", len(pixels)))
        return torch.stack([pixels.float().mean(dim=(1, 2, 3)), torch.zeros(len(pixels))], dim=1)

    def encode_crops(self, pixels: Tensor) -> Tensor:
        self.batches.append(("crops", len(pixels)))
        return torch.stack([pixels.float().mean(dim=(1, 2, 3)), torch.ones(len(pixels))], dim=1)


def numbered(n: int, first: int = 0, size: int = 4) -> Tensor:
    """Views (n, 3, size, size), each of one number."""
    return torch.arange(first, first + n, dtype=torch.float32).view(n, 1, 1, 1).expand(n, 3, size, size)


@pytest.mark.parametrize(
    ("views", "weak", "batches"),
    [
        (5, 1, [("images", 1), ("crops", 4)]),
        (5, 2, [("images", 2), ("crops", 3)]),
        (3, 0, [("crops", 3)]),  # a later stage of adaptive views has no weak view
        (1, 1, [("images", 1)]),
    ],
)
def test_weak_views_are_images_and_strong_views_crops(views: int, weak: int, batches: list[tuple[str, int]]) -> None:
    model = TwoWays()
    features = encode_views(model, numbered(views), weak=weak)  # type: ignore[arg-type]
    assert model.batches == batches
    assert features.tolist() == [[float(view), float(view >= weak)] for view in range(views)]


def test_the_views_of_several_images_make_two_batches() -> None:
    model = TwoWays()
    features = encode_views_together(model, [numbered(3), numbered(1, 10), numbered(2, 20)])  # type: ignore[arg-type]
    assert model.batches == [("images", 3), ("crops", 3)]
    assert [rows.tolist() for rows in features] == [[[0, 0], [1, 1], [2, 1]], [[10, 0]], [[20, 0], [21, 1]]]
    encode_views_together(model, [numbered(1)])  # type: ignore[arg-type]
    assert model.batches[2:] == [("images", 1)]


def test_a_model_without_another_way_for_crops_encodes_all_alike() -> None:
    model = disturbed(TINY_VIT)
    assert model.encode_crops is None
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        encode_views(model, pixels), torch.cat([model.encode_images(pixels[:1]), model.encode_images(pixels[1:])])
    )


@pytest.mark.parametrize("size", [16, 48])
def test_views_are_brought_to_the_size_of_the_model(tiny_vit: CLIP, size: int) -> None:
    levels = torch.tensor([0, 128, 255], dtype=torch.uint8).view(3, 1, 1, 1)
    flat, fitting = levels.expand(3, 3, size, size), levels.expand(3, 3, 32, 32)
    for features in (encode_views(tiny_vit, flat), encode_views_together(tiny_vit, [flat])[0]):
        torch.testing.assert_close(features, encode_views(tiny_vit, fitting), atol=1e-5, rtol=0)
