"""Every memory against a loop over its images, and what holds for all of them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from methods.memory import naive
from usetta.methods import get
from usetta.methods.memory import MEMORIES, Answers, State, Stream, Views

SCALE = 30.0
OPTIONS = {
    "tda": [{}, {"capacity": 1, "alpha": 5.0, "sharpness": 8.0}],
    "boostadapter": [{}, {"boosted": 0}, {"boosted": 3, "capacity": 1}],
    "dmn-weak": [{}, {"capacity": 1}, {"capacity": 3}],
    "dmn": [{"capacity": 2}],
    "dpe": [{}, {"align": 0.0}, {"capacity": 1}],
    "ecalp": [{}, {"nodes": 5}, {"nodes": 1}],
    "onzeta": [{}, {"balance": 0.0}],
    "dota": [{}],
    "bca": [{}, {"text_count": 1.0}],
}
IN_SINGLE_PRECISION = {"dmn": 1e-4, "onzeta": 3e-5, "ecalp": 1e-4}
"""Where rounding alone is more than 1e-5, for the loop as well: OnZeta's first rates are 20 and 0.5 / 0.04, ECALP
multiplies by 10 000, and of two images whose entropies are equal but for rounding DMN may drop the other one."""
SHAPES = {"plain": (40, 20, 6, 8), "one view": (30, 1, 5, 6), "one class": (6, 12, 1, 4), "one image": (1, 30, 4, 5)}


def clustered(images: int, views: int, classes: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Views around the text of a class, so that some images are confident and others not; two of them are equal."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.nn.functional.normalize(torch.randn(classes, dim, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.randint(classes, (images,), generator=generator)
    noise = torch.rand(images, 1, 1, generator=generator, dtype=torch.float64) * 1.2
    around = text[labels][:, None] + noise * torch.randn(images, views, dim, generator=generator, dtype=torch.float64)
    features = torch.nn.functional.normalize(around, dim=-1)
    if images > 4:
        features[4] = features[2]  # equal entropies
    return features, text


def answer(
    name: str, features: Tensor, text: Tensor, batch: int = 16, state: State | None = None, **options: object
) -> Tensor:
    """Probabilities (T, C) of a stream, in batches."""
    return torch.cat([probs for probs, _ in steps(name, features, text, batch, state, **options)])


def steps(
    name: str, features: Tensor, text: Tensor, batch: int, state: State | None = None, **options: object
) -> Iterator[tuple[Tensor, State]]:
    memory, stream = MEMORIES[name], Stream(text, SCALE, length=len(features))
    for first in range(0, len(features), batch):
        part = features[first : first + batch]
        logits = SCALE * part @ text.T
        seen = Views(part, logits) if memory.sees == "views" else Answers(part[:, 0], logits[:, 0])
        out, state = memory.step(state, seen, stream, **options)
        yield out.softmax(dim=-1), state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "options"), [(name, options) for name in OPTIONS for options in OPTIONS[name]])
def test_a_memory_is_the_loop_over_its_images(name: str, options: dict[str, object], shape: str) -> None:
    features, text = clustered(*SHAPES[shape])
    expected = getattr(naive, name.replace("-", "_"))(features, text, SCALE, **options)
    torch.testing.assert_close(answer(name, features, text, **options), expected, atol=1e-8, rtol=0)
    single = answer(name, features.float(), text.float(), batch=64, **options)
    torch.testing.assert_close(single.double(), expected, atol=IN_SINGLE_PRECISION.get(name, 1e-5), rtol=0)


@pytest.mark.parametrize("name", MEMORIES)
def test_properties(name: str) -> None:
    features, text = clustered(50, 12, 5, 6, seed=1)
    zero_shot = (features[:, 0] @ text.T).argmax(dim=-1)
    sizes = []
    first = None
    for probs, state in steps(name, features, text, 10):
        first = probs[0] if first is None else first
        sizes.append(sum(tensor.numel() for tensor in state.values()))
        assert torch.isfinite(probs).all()
    assert first is not None
    if MEMORIES[name].sees == "answer":
        assert int(first.argmax()) == int(zero_shot[0]), "an empty memory is zero-shot"
    # From one view also those that choose among several; ECALP's even power of cosines makes negative ones positive.
    for image in range(len(features)) if name != "ecalp" else ():
        alone = answer(name, features[image : image + 1, :1], text)
        assert int(alone.argmax()) == int(zero_shot[image])
    if name != "ecalp":  # whose graph grows
        assert len(set(sizes)) == 1, "the state never grows"
    order = torch.tensor([3, 0, 4, 1, 2])
    permuted = answer(name, features, text[order])
    torch.testing.assert_close(permuted, answer(name, features, text)[:, order], atol=1e-8, rtol=0)


@pytest.mark.parametrize("name", [*MEMORIES, "ecalp:nodes=8"])
def test_how_many_numbers_a_state_may_have_is_known_beforehand(name: str) -> None:
    recipe, (features, text) = get(name), clustered(60, 12, 7, 6)
    options = dict(recipe.options)
    known = MEMORIES[recipe.memory].numbers(*text.shape, options)
    if name == "ecalp":
        assert known == float("inf")
        return
    most = max(
        sum(t.numel() * t.element_size() for t in state.values())
        for _, state in steps(recipe.memory, features.float(), text.float(), 10, **options)
    )
    assert most / 4 <= known <= 1.5 * most / 4


def test_a_bounded_graph_keeps_its_size() -> None:
    features, text = clustered(60, 1, 5, 6)
    sizes = [sum(t.numel() for t in state.values()) for _, state in steps("ecalp", features, text, 10, nodes=8)]
    assert len(set(sizes[1:])) == 1


def test_onzeta_without_a_length_says_what_to_give() -> None:
    features, text = clustered(2, 1, 3, 4)
    with pytest.raises(ValueError, match="onzeta:length=1000"):
        MEMORIES["onzeta"].step(None, Answers(features[:, 0], features[:, 0] @ text.T), Stream(text, SCALE))
