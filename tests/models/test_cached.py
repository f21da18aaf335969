from pathlib import Path

import torch
from torch import Tensor

from usetta.models.base import Model
from usetta.models.cached import CachedImages
from usetta.models.clip import CLIP


class Counting:
    """A model that counts how often its image tower runs."""

    def __init__(self, model: CLIP) -> None:
        self.model = model
        self.runs = 0
        self.fingerprint = model.fingerprint

    def encode_images(self, pixels: Tensor) -> Tensor:
        self.runs += 1
        return self.model.encode_images(pixels)


def test_the_same_pixels_are_encoded_once(tiny_model: CLIP, tmp_path: Path) -> None:
    counting = Counting(tiny_model)
    cached = CachedImages(counting, tmp_path)  # type: ignore[arg-type]
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    first, again = cached.encode_images(pixels), cached.encode_images(pixels.clone())
    assert counting.runs == 1
    assert torch.equal(first, again)
    cached.encode_images(pixels.flip(-1))
    assert counting.runs == 2


def test_a_damaged_file_is_made_anew(tiny_model: CLIP, tmp_path: Path) -> None:
    cached = CachedImages(tiny_model, tmp_path)
    pixels = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    first = cached.encode_images(pixels)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"cut off")
    assert torch.equal(cached.encode_images(pixels), first)
    assert file.stat().st_size > 100


def test_it_is_a_model_like_any_other(tiny_model: CLIP, tmp_path: Path) -> None:
    cached = CachedImages(tiny_model, tmp_path)
    assert isinstance(cached, Model)
    assert cached.logit_scale == tiny_model.logit_scale
    assert cached.text is tiny_model.text
