"""Packed texts against the tower itself; tests/test_prompts.py has their gradients."""

import pytest
import torch

from usetta.models.clip import CLIP
from usetta.models.packed import PackedTexts

TEXTS = [
    "so it is",
    "so it is a cat",
    "so it is a dog",
    "so it is an axolotl, really",
    "so it is " + "very " * 60 + "long",
]


@pytest.mark.parametrize("context_tokens", [0, 1, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 5), (0, 1), (1, 3), (2, 5)])
def test_features_are_the_tower_s_own(tiny: CLIP, context_tokens: int, first: int, last: int) -> None:
    ids = tiny.text.tokenize(TEXTS)
    words = tiny.text.embed(ids)
    packed = PackedTexts(tiny.text, ids, context_tokens)
    assert packed.shared == 1 + context_tokens
    assert [packed.shared + length for length in packed.lengths] == [5, 7, 7, *(ids[3:].argmax(-1) + 1).tolist()]
    others = torch.randn(3, context_tokens, tiny.text.width, generator=torch.Generator().manual_seed(0))
    features = packed.encode(others, first, last)
    for context, ours in zip(others, features, strict=True):
        spliced = torch.cat([words[:, :1], context.expand(5, -1, -1), words[:, 1 + context_tokens :]], 1)
        torch.testing.assert_close(ours, tiny.text.encode(spliced, ids)[first:last], atol=1e-6, rtol=0)


def test_weights_in_float64_stay_so(tiny_vit: CLIP) -> None:
    tower = tiny_vit.double().text
    packed = PackedTexts(tower, tower.tokenize(TEXTS), 3)
    features = packed.encode(torch.zeros(1, 3, tower.width), 0, 5)
    assert features.dtype == torch.float64
    torch.testing.assert_close(features.norm(dim=-1), torch.ones(1, 5, dtype=torch.float64), atol=1e-15, rtol=0)
