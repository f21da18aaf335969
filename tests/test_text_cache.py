"""Text features on disk: the same bits as computed ones, for the same prompts of the same tower alone."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.tiny import TINY_VIT, disturbed
from usetta import text_cache
from usetta.classifier import Classifier
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.text_cache import TextCache

NAMES = [f"thing {i}" for i in range(120)]


@pytest.fixture
def model() -> CLIP:
    return disturbed(TINY_VIT)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("USETTA_CACHE", str(tmp_path))
    return tmp_path / "texts"


class CountedPrompts(ClassPrompts):
    """Counts how often the tower was needed."""

    encoded = 0

    def _encode(self) -> Tensor:
        type(self).encoded += 1
        return super()._encode()


def features(model: CLIP, names: list[str] = NAMES, **how: object) -> tuple[Tensor, bool]:
    """Text features, and whether they were computed for it."""
    before = CountedPrompts.encoded
    prompts = CountedPrompts(model.text, names, cache=TextCache(model.text, model.describe()), **how)  # type: ignore[arg-type]
    return prompts.features(), CountedPrompts.encoded > before


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.is_dir() else []


def test_a_second_process_finds_the_same_bits(model: CLIP, folder: Path) -> None:
    plain = ClassPrompts(model.text, NAMES).features()
    first, computed = features(model)
    second, again = features(model)
    assert (computed, again) == (True, False)
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert len(files(folder)) == 1


def test_whatever_the_features_depend_on_makes_another_file(model: CLIP, folder: Path) -> None:
    other_weights = disturbed(TINY_VIT)
    with torch.no_grad():
        other_weights.text.projection[0, 0] += 1e-3
    context = torch.zeros(4, model.text.width)
    lists = [
        features(model),
        features(model, NAMES[::-1]),
        features(model, NAMES[:-1]),
        features(other_weights),
        features(model, templates="a bad photo of a {}."),
        features(model, templates=["a photo of a {}.", "a bad photo of a {}."]),
        features(model, context=context),
    ]
    assert all(computed for _, computed in lists)
    assert len(files(folder)) == len(lists)


def test_the_number_of_threads_counts_because_bits_depend_on_it(model: CLIP) -> None:
    features(model)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert features(model)[1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_file_is_computed_again_and_replaced(model: CLIP, folder: Path, damage: str) -> None:
    expected, _ = features(model)
    (path,) = files(folder)
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-3] ^= 1
    path.write_bytes({"cut": content[:-5], "flipped": content, "empty": b"", "other": b"no tensors" * 99}[damage])
    found, computed = features(model)
    assert computed
    assert torch.equal(found, expected)
    assert not features(model)[1]


def test_short_lists_are_not_kept(model: CLIP, folder: Path) -> None:
    assert features(model, NAMES[:20])[1]
    assert features(model, NAMES[:20])[1]
    assert not files(folder)


def test_a_cache_that_cannot_be_written_is_done_without(model: CLIP, folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    found, computed = features(model)
    assert computed
    assert torch.equal(found, ClassPrompts(model.text, NAMES).features())


def test_only_the_latest_lists_are_kept(model: CLIP, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cache, "_KEPT", 2)
    for number, names in enumerate((NAMES, NAMES[1:], NAMES, NAMES[2:])):
        features(model, names)
        for path in files(folder):  # clocks of file systems are coarse
            os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9 * (10 - number)))
    assert len(files(folder)) == 2
    assert not features(model, NAMES[2:])[1]
    assert not features(model)[1], "used after the second"
    assert features(model, NAMES[1:])[1]


def test_a_classifier_uses_it(model: CLIP, folder: Path) -> None:
    Classifier(NAMES, model).predict_proba([torch.zeros(3, 40, 40, dtype=torch.uint8).numpy().transpose(1, 2, 0)])
    assert len(files(folder)) == 1
