"""TTL against a naive forward pass of the whole tower with LoRA in its attention, by plain autograd."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from models.tiny import TINY_VIT, disturbed
from usetta import methods
from usetta.methods.losses import gradient, weighted_entropy
from usetta.methods.recipe import run
from usetta.methods.tune.lora import Hidden, LoraTuner
from usetta.models.clip import CLIP, VisionTransformer
from usetta.prompts import ClassPrompts

SCALE = 20.0
NAMES = ["cat", "dog", "red fox", "old stone bridge", "tabby"]
MODEL = disturbed(TINY_VIT).double()
TEXT = ClassPrompts(MODEL.text, NAMES).features()


def pixels_of(views: int, seed: int, model: CLIP = MODEL) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(views, 3, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, size=(model.image_size, model.image_size))


def episode(views: int, seeds: list[int], model: CLIP = MODEL) -> tuple[Tensor, Hidden]:
    """Features (B, N, D) in the model's precision, and what TTL needs beside them."""
    states = [model.hidden_states(pixels_of(views, seed, model)) for seed in seeds]
    tail = model.last_blocks()
    return torch.stack([tail.encode(each) for each in states]), Hidden(tail, states)


class NaiveAttention(nn.Module):
    """Attention with LoRA on queries and values, head by head."""

    def __init__(self, attention: Any, down: list[Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.down = nn.ParameterList([nn.Parameter(each.double()) for each in down])
        width = attention.out.in_features
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(16, width, dtype=torch.float64)) for _ in down])

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        weight, bias, size = self.attention.qkv.weight, self.attention.qkv.bias, width // self.attention.heads
        q, k, v = (x @ weight[i * width :][:width].T + bias[i * width :][:width] for i in range(3))
        q = q + 32 / 16 * ((x @ self.down[0]) @ self.up[0])
        v = v + 32 / 16 * ((x @ self.down[1]) @ self.up[1])
        heads = []
        for first in range(0, width, size):
            part = slice(first, first + size)
            weights = (q[..., part] @ k[..., part].mT / size**0.5).softmax(dim=-1)
            heads.append(weights @ v[..., part])
        joined: Tensor = self.attention.out(torch.cat(heads, dim=-1))
        return joined


def all_tokens(tower: VisionTransformer, pixels: Tensor) -> Tensor:
    """Features with every block whole, the last one too."""
    hidden = tower.embed_patches(pixels)
    for block in tower.blocks:
        hidden = block(hidden)
    return tower.pool(hidden)


def naive_ttl(pixels: Tensor, model: CLIP, *, seed: int = 0, steps: int = 1) -> dict[str, Any]:
    """TTL of one image (N, 3, S, S): a full forward pass of all views, AdamW, a full forward pass again."""
    tower = copy.deepcopy(model.image_tower)
    assert isinstance(tower, VisionTransformer)
    generator = torch.Generator().manual_seed(seed)
    adapters = []
    for block in list(tower.blocks)[-3:]:
        width = block.attention.out.in_features  # type: ignore[union-attr]
        down = [torch.empty(width, 16) for _ in range(2)]
        for each in down:
            each.normal_(0, (2 / (width + 16)) ** 0.5, generator=generator)
        block.attention = NaiveAttention(block.attention, down)
        adapters.append(block.attention)
    parameters = [p for adapter in adapters for p in (*adapter.down, *adapter.up)]
    before = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01)
    for _ in range(steps):
        logits = SCALE * normalize(all_tokens(tower, model.normalize(pixels)), dim=-1) @ TEXT.T
        loss = 0.0
        for view in logits:
            p = view.softmax(dim=0)
            entropy = -(p * p.log()).sum()
            loss = loss + (-(entropy.detach() - 0.4)).exp() * entropy / len(logits)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[attr-defined]
        optimizer.step()
    with torch.no_grad():
        features = normalize(all_tokens(tower, model.normalize(pixels)), dim=-1)
    return {"features": features, "probs": (SCALE * features @ TEXT.T).softmax(dim=-1), "was": before, "is": parameters}


@pytest.mark.parametrize(("views", "steps"), [(2, 1), (11, 1), (11, 2)])
def test_ttl_is_its_definition(views: int, steps: int) -> None:
    features, hidden = episode(views, [0, 1])
    result = run(methods.get("ttl", steps=steps), features, TEXT, SCALE, hidden=hidden)
    for i in range(2):
        naive = naive_ttl(pixels_of(views, i), MODEL, steps=steps)
        torch.testing.assert_close(result.probs[i], naive["probs"][0], atol=1e-9, rtol=0)
        assert (result.probs[i] - result.weak_probs[i]).abs().max() > 1e-4


def test_single_precision_is_close() -> None:
    model = disturbed(TINY_VIT)
    features, hidden = episode(11, [0, 1], model)
    assert features.dtype == torch.float32
    result = run(methods.get("ttl"), features, TEXT.float(), SCALE, hidden=hidden)
    for i in range(2):
        naive = naive_ttl(pixels_of(11, i), MODEL)
        torch.testing.assert_close(result.probs[i].double(), naive["probs"][0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", [0, 3])
def test_every_view_goes_through_the_adapted_tower_if_the_readout_wants_them(seed: int) -> None:
    features, hidden = episode(11, [4])
    naive = naive_ttl(pixels_of(11, 4), MODEL, seed=seed)
    adapted = naive["features"][None]
    for readout in ("se", "uniform", "mode", "vote", "reliability"):
        plugged = run(methods.get(f"ttl+{readout}", seed=seed), features, TEXT, SCALE, hidden=hidden)
        expected = run(methods.get(f"clip+{readout}"), adapted, TEXT, SCALE)
        torch.testing.assert_close(plugged.probs, expected.probs, atol=1e-9, rtol=0)
        torch.testing.assert_close(plugged.weights, expected.weights, atol=1e-9, rtol=0)


def test_the_gradient_with_respect_to_logits_is_the_published_formula() -> None:
    logits = 3 * torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = logits.softmax(dim=-1)
    entropy = -(p * p.log()).sum(dim=-1, keepdim=True)
    formula = -(0.4 - entropy).exp() * p * (p.log() + entropy) / 7
    torch.testing.assert_close(gradient(weighted_entropy, logits), formula, atol=1e-12, rtol=0)


def test_a_batch_is_its_images_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    features, hidden = episode(5, [0, 1, 2])
    for name in ("ttl", "ttl+se", "ttl:skip=true", "use:tune=lora"):
        together = run(methods.get(name), features, TEXT, SCALE, hidden=hidden)
        stacked = Hidden(hidden.blocks, torch.stack(list(hidden.states)))
        with monkeypatch.context() as patch:
            patch.setattr("usetta.methods.recipe._MEMORY", 0)
            apart = run(methods.get(name), features, TEXT, SCALE, hidden=stacked)
        torch.testing.assert_close(together.probs, apart.probs, atol=1e-12, rtol=0)
        for i in range(3):
            alone = Hidden(hidden.blocks, [hidden.states[i]])
            one = run(methods.get(name), features[i : i + 1], TEXT, SCALE, hidden=alone)
            torch.testing.assert_close(together.probs[i], one.probs[0], atol=1e-12, rtol=0)


def test_what_is_said_about_the_strong_views_is_from_before() -> None:
    features, hidden = episode(11, [0, 1])
    tuned, untuned = (
        run(methods.get("ttl"), features, TEXT, SCALE, hidden=hidden),
        run(methods.get("clip"), features, TEXT, SCALE),
    )
    assert torch.equal(tuned.delta, untuned.delta)
    assert torch.equal(tuned.chosen, untuned.chosen)
    assert torch.equal(tuned.before, untuned.probs)


def test_the_given_features_and_weights_are_left_as_they_were() -> None:
    features, hidden = episode(5, [0])
    kept, fingerprint = features.clone(), MODEL.fingerprint
    first, second = (run(methods.get("ttl"), features, TEXT, SCALE, hidden=hidden).probs for _ in range(2))
    MODEL.forget_fingerprint()
    assert torch.equal(features, kept)
    assert MODEL.fingerprint == fingerprint
    assert torch.equal(first, second)


def test_weights_in_half_precision_are_adapted_in_single() -> None:
    model = disturbed(TINY_VIT).to(torch.bfloat16)
    features, hidden = episode(5, [0], model)
    assert LoraTuner(hidden, lr=5e-3, weight_decay=0.01).weights[0][0].dtype == torch.float32
    result = run(methods.get("ttl"), features, TEXT.float(), SCALE, hidden=hidden)
    naive = naive_ttl(pixels_of(5, 0), MODEL)
    torch.testing.assert_close(result.probs[0].double(), naive["probs"][0], atol=0.1, rtol=0)


def test_missing_hidden_states_are_asked_for() -> None:
    features, hidden = episode(3, [0, 1])
    assert methods.get("ttl").needs_hidden
    assert not methods.get("tpt").needs_hidden
    with pytest.raises(ValueError, match=r"'ttl' tunes the image encoder, so it needs the hidden states"):
        run(methods.get("ttl"), features, TEXT, SCALE)
    with pytest.raises(ValueError, match="hidden states of 1 images and features of 2"):
        run(methods.get("ttl"), features, TEXT, SCALE, hidden=Hidden(hidden.blocks, hidden.states[:1]))


def test_settings_about_text_features_are_refused() -> None:
    with pytest.raises(ValueError, match="needs text features that are tuned, which tune=lora does not do"):
        methods.get("ttl", dispersion=1.0)
    with pytest.raises(ValueError, match="active saves work in the text encoder, which tune=lora does not use"):
        methods.get("ttl", active=3)


def test_rank_alpha_and_seed_are_options() -> None:
    features, hidden = episode(5, [0])
    usual = run(methods.get("ttl"), features, TEXT, SCALE, hidden=hidden).probs
    assert LoraTuner(hidden, lr=5e-3, weight_decay=0.01, rank=4).weights[0][0].shape[1] == 4
    for name in ("ttl:rank=4", "ttl:alpha=8", "ttl:seed=1"):
        assert (run(methods.get(name), features, TEXT, SCALE, hidden=hidden).probs - usual).abs().max() > 1e-6
    assert torch.equal(run(methods.get("ttl:rank=16:alpha=32"), features, TEXT, SCALE, hidden=hidden).probs, usual)
