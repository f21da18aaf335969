"""What several tests share. No test reaches a network: the hub is set to offline before anything loads it."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "agg")
if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores, so one thread each, and in their children
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from usetta.models.clip import CLIP, random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the variable comes too late where a plugin has imported torch already

NEXT_DOOR = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def auto_is_fp32_on_the_cpu() -> Iterator[None]:
    """`device="auto", precision="auto"` mean the same on every machine, because tests compare bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.backends.mps, "is_available", lambda: False)
        patch.setattr("usetta.models.precision.computes_in_bf16", lambda: False)
        yield


@pytest.fixture(scope="session")
def real_images() -> Path:
    """A folder of datasets with real images, which cannot be published."""
    folder = Path(os.environ.get("USETTA_TEST_IMAGES", NEXT_DOOR / "data"))
    if not folder.is_dir():
        pytest.skip("real images not found (set USETTA_TEST_IMAGES)")
    return folder


@pytest.fixture(scope="session")
def reference_files() -> Path:
    """A folder with what other people's code computed (`views`, `align`) and the text of the paper (`paper`)."""
    folder = Path(os.environ.get("USETTA_TEST_FEATURES", NEXT_DOOR))
    if not folder.is_dir():
        pytest.skip("reference features not found (set USETTA_TEST_FEATURES)")
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> CLIP:
    """A CLIP small enough to run in milliseconds; its answers mean nothing."""
    config = CLIPConfig(
        embed_dim=32,
        vision=ViTConfig(image_size=32, patch_size=8, width=64, layers=2, heads=1),
        text=TextConfig(width=64, layers=2, heads=1),
    )
    return random_model(config, name="tiny-random", seed=0)


def make_image(seed: int = 0, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """An image with structure at several scales, so that crops of it differ."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = rng.integers(-20, 20, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + noise, 0, 255).astype(np.uint8))


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Five images in a folder."""
    paths = [tmp_path / "images" / f"image-{i}.png" for i in range(5)]
    paths[0].parent.mkdir()
    for i, path in enumerate(paths):
        make_image(i).save(path)
    return paths


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_model: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a folder of weights, which the command line takes as a model."""
    from usetta.models.checkpoints import save_model

    return save_model(tiny_model, tmp_path_factory.mktemp("tiny")).parent
