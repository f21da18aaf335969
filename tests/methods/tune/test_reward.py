"""RLCF against its definition: rewards for the best classes of each confident view, three steps on the prompt."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from models.tiny import TINY_VIT, disturbed
from usetta import methods
from usetta.methods.losses import Reward, reward_loss
from usetta.methods.recipe import run
from usetta.models.clip import TextTransformer
from usetta.prompts import ClassPrompts

SCALE = 20.0
NAMES = ["cat", "dog", "red fox", "old stone bridge", "tabby", "ship", "tree"]
TOWER = disturbed(TINY_VIT).double().text


def views_of(count: int, seed: int, images: int = 2, dim: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(images, 1, dim, generator=generator, dtype=torch.float64)
    features = centre + 0.8 * torch.randn(images, count, dim, generator=generator, dtype=torch.float64)
    return normalize(features, dim=-1)


def probabilities(view: Tensor, text: Tensor) -> Tensor:
    powers = (SCALE * (text @ view) - SCALE).exp()
    return powers / powers.sum()


def naive_rlcf(
    features: Tensor, reward_features: Tensor, reward_text: Tensor | None, names: list[str], tower: TextTransformer
) -> Tensor:
    """The answer for one image (N, D), whose rewards come from other features of its views and of the classes."""
    ids = tower.tokenize([f"a photo of a {name}." for name in names])
    words = tower.embed(ids)

    def encode(context: Tensor) -> Tensor:
        spliced = torch.cat([words[:, :1], context.expand(len(names), -1, -1), words[:, 5:]], dim=1)
        return tower.encode(spliced, ids)

    context = words[0, 1:5].clone()
    start = encode(context)
    reward_text = start if reward_text is None else reward_text
    entropies = []
    for view in features:
        p = probabilities(view, start)
        entropies.append(float(-(p * p.log()).sum()))
    confident = sorted(range(len(features)), key=lambda i: entropies[i])[: max(1, int(0.1 * len(features)))]
    first, second = torch.zeros_like(context), torch.zeros_like(context)
    for step in (1, 2, 3):
        leaf = context.clone().requires_grad_()
        text, terms = encode(leaf), []
        for i in confident:
            p = probabilities(features[i], text)
            best = sorted(range(len(names)), key=lambda c: -p[c].item())[:3]
            rewards = [max(0.0, 2.5 * float(reward_features[i] @ reward_text[c])) for c in best]
            baseline = sum(rewards) / len(rewards)
            terms += [(reward - baseline) * -p[c].log() for reward, c in zip(rewards, best, strict=True)]
        (grad,) = torch.autograd.grad(sum(terms) / len(terms), leaf)
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        context = context * (1 - 7e-3 * 5e-4)
        context = context - 7e-3 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return probabilities(features[0], encode(context))


@pytest.mark.parametrize("count", [2, 11, 64])
@pytest.mark.parametrize("classes", [1, 2, 3, 7])
def test_rlcf_is_its_definition(count: int, classes: int) -> None:
    features, names = views_of(count, seed=count + classes), NAMES[:classes]
    prompts = ClassPrompts(TOWER, names)
    result = run(methods.get("rlcf"), features, prompts, SCALE)
    for i, image in enumerate(features):
        torch.testing.assert_close(result.probs[i], naive_rlcf(image, image, None, names, TOWER), atol=1e-8, rtol=0)


def test_another_model_can_be_the_reward_model() -> None:
    features, rewarding = views_of(12, seed=0), views_of(12, seed=1, dim=9)
    reward_text = views_of(len(NAMES), seed=2, images=1, dim=9)[0]
    prompts = ClassPrompts(TOWER, NAMES)
    result = run(methods.get("rlcf"), features, prompts, SCALE, reward=Reward(rewarding, reward_text))
    for i, image in enumerate(features):
        naive = naive_rlcf(image, rewarding[i], reward_text, NAMES, TOWER)
        torch.testing.assert_close(result.probs[i], naive, atol=1e-8, rtol=0)
    assert (result.probs - run(methods.get("rlcf"), features, prompts, SCALE).probs).abs().max() > 1e-6


def test_reward_features_go_with_their_images_when_these_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    features, rewarding = views_of(12, seed=0, images=3), views_of(12, seed=1, images=3, dim=9)
    reward = Reward(rewarding, views_of(len(NAMES), seed=2, images=1, dim=9)[0])
    prompts = ClassPrompts(TOWER, NAMES)
    together = run(methods.get("rlcf"), features, prompts, SCALE, reward=reward)
    monkeypatch.setattr("usetta.methods.recipe._MEMORY", 0)
    apart = run(methods.get("rlcf"), features, prompts, SCALE, reward=reward)
    torch.testing.assert_close(together.probs, apart.probs, atol=1e-9, rtol=0)


def test_fewer_than_three_classes_are_all_ranked() -> None:
    logits = torch.tensor([[[2.0, 0.0]]])
    value = reward_loss(logits, torch.tensor([[[0.5, 0.1]]]))
    p = logits[0, 0].softmax(dim=0)
    assert value.item() == pytest.approx((0.2 * -p[0].log() - 0.2 * -p[1].log()).item() / 2)
    assert reward_loss(torch.zeros(1, 2, 1), torch.ones(1, 2, 1)).tolist() == [0.0]


def test_a_reward_is_a_clip_score_and_never_negative() -> None:
    text = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]])
    reward = Reward(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), text)
    scores = reward.scores(torch.tensor([0]), torch.tensor([[1]]))
    assert scores.tolist() == [[pytest.approx([2.5, 0.0, 1.5])]]


def test_a_reward_model_of_other_views_or_classes_is_refused() -> None:
    features, prompts = views_of(4, seed=0), ClassPrompts(TOWER, NAMES)
    with pytest.raises(ValueError, match=r"the same \(2, 4\) views and 7 classes, not \(2, 5\) and 7"):
        run(methods.get("rlcf"), features, prompts, SCALE, reward=Reward(views_of(5, seed=0), prompts.features()))
    with pytest.raises(ValueError, match=r"not \(2, 4\) and 6"):
        run(methods.get("rlcf"), features, prompts, SCALE, reward=Reward(features, prompts.features()[:6]))


def test_how_many_classes_are_rewarded_is_an_option() -> None:
    features, prompts = views_of(12, seed=3), ClassPrompts(TOWER, NAMES)
    assert methods.get("rlcf").needs_reward
    assert not methods.get("tpt").needs_reward
    assert not methods.get("clip", loss="reward").needs_reward
    usual, same, one = (
        run(methods.get(name), features, prompts, SCALE).probs for name in ("rlcf", "rlcf:top_k=3", "rlcf:top_k=1")
    )
    assert torch.equal(usual, same)
    assert (usual - one).abs().max() > 1e-4
