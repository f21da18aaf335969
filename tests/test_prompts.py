"""Prompts against the definition: every text in full length through the whole tower, differentiated by autograd."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import normalize

from models.tiny import TINY_VIT, disturbed
from usetta import prompts as prompts_module
from usetta.models.clip import CLIP, TextTransformer, make_blocks, random_model
from usetta.models.config import CLIPConfig, TextConfig, ViTConfig
from usetta.prompts import ClassPrompts

VISION = ViTConfig(image_size=8, patch_size=8, width=8, layers=1, heads=1)
SMALL = CLIPConfig(embed_dim=24, vision=VISION, text=TextConfig(width=32, layers=3, heads=2))
WORDS = ["cat", "dog", "red-breasted_merganser", "kite", "(bird of prey)", "hen", "Boeing", "747-400", "axolotl", "owl"]


class Bidirectional(nn.Module):
    """A tower like SigLIP's: no start token unless asked for, all positions see each other, the last is read out."""

    causal = False
    width = 16
    context_length = 20

    def __init__(self, start_token: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = [2] if start_token else []
        self.vocabulary: dict[str, int] = {}
        self.table = nn.Embedding(500, 16)
        self.positions = nn.Parameter(torch.randn(20, 16))
        self.blocks = make_blocks(16, 2, 2, "gelu", causal=False)
        self.head = nn.Linear(16, 12)
        self.requires_grad_(False)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        rows = torch.ones(len(texts), 20, dtype=torch.long)
        for row, text in zip(rows, texts, strict=True):
            words = [self.vocabulary.setdefault(w, 3 + len(self.vocabulary)) for w in text.replace(".", " .").split()]
            tokens = torch.tensor([*self.start, *words, 0])
            row[: len(tokens)] = tokens
        return rows

    def embed(self, ids: Tensor) -> Tensor:
        return self.table(ids)

    def encode(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        assert embeddings.shape[1] == ids.shape[1] == 20
        hidden = embeddings + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return normalize(self.head(hidden[:, -1]), dim=-1)


Tower = TextTransformer | Bidirectional


def small_tower(config: CLIPConfig = SMALL) -> TextTransformer:
    """Random weights, with biases and normalisations random too."""
    tower = random_model(config, name="small").text
    generator = torch.Generator().manual_seed(1)
    for tensor in tower.state_dict().values():
        if tensor.ndim == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
    return tower


TOWERS: dict[str, Callable[[], Tower]] = {
    "causal": small_tower,
    "causal-gelu": lambda: small_tower(replace(SMALL, activation="gelu")),
    "one block": lambda: small_tower(replace(SMALL, text=TextConfig(width=32, layers=1, heads=2))),
    "bidirectional": lambda: Bidirectional(start_token=False),
    "bidirectional with a start token": lambda: Bidirectional(start_token=True),
}


@pytest.fixture(params=TOWERS)
def tower(request: pytest.FixtureRequest) -> Tower:
    return TOWERS[request.param]()


def names_of(count: int, longest: int = 11) -> list[str]:
    """Names of 1 to `longest` words, two of them equal."""
    names = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(1 + i * i % longest)) for i in range(count)]
    return [*names[:-1], names[0]]


def naive(tower: Tower, names: Sequence[str], context: Tensor) -> Tensor:
    """Features (C, D) of "a photo of a {}." with `context` (4, W) in place of its words, by the definition."""
    ids = tower.tokenize([f"a photo of a {name.replace('_', ' ')}." for name in names])
    start = 0 if isinstance(tower, Bidirectional) and not tower.start else 1
    words = tower.embed(ids)
    spliced = torch.cat([words[:, :start], context.expand(len(ids), -1, -1), words[:, start + 4 :]], 1)
    if isinstance(tower, Bidirectional):
        return tower.encode(spliced, ids)
    hidden = spliced + tower.positional_embedding[: ids.shape[1]]
    for block in tower.blocks:
        hidden = block(hidden)
    last = hidden[torch.arange(len(ids)), ids.argmax(-1)]
    return normalize(tower.ln_final(last) @ tower.projection, dim=-1)


def naive_gradient(tower: Tower, names: Sequence[str], context: Tensor, grad: Tensor) -> Tensor:
    leaf = context.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(naive(tower, names, leaf), leaf, grad)
    return gradient


def random_like(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def moved(context: Tensor, count: int) -> Tensor:
    """`count` contexts a sign step and more away from `context`."""
    return context + 0.02 * random_like(count, *context.shape, dtype=context.dtype)


def assert_same_gradient(ours: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if ours.dtype == torch.float32 else 1e-9
    assert (ours - expected).norm() <= tolerance * expected.norm()
    clear = expected.abs() > 10 * tolerance * expected.abs().max()
    assert clear.float().mean() > 0.95
    assert torch.equal(ours.sign()[clear], expected.sign()[clear])


def assert_same_features(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, atol=1e-6 if ours.dtype == torch.float32 else 1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 37])
def test_all_three_operations_follow_the_definition(tower: Tower, count: int, dtype: torch.dtype) -> None:
    tower.to(dtype)
    names = names_of(count)
    prompts = ClassPrompts(tower, names)
    assert prompts.context.shape == (4, tower.width)
    assert_same_features(prompts.features(), naive(tower, names, prompts.context))
    grads = random_like(3, *prompts.features().shape, dtype=dtype)
    gradients = prompts.pullback(grads)
    contexts = moved(prompts.context, 3)
    features = prompts.encode(contexts)
    assert gradients.dtype == features.dtype == dtype
    for i in range(3):
        assert_same_gradient(gradients[i], naive_gradient(tower, names, prompts.context, grads[i]))
        assert_same_features(features[i], naive(tower, names, contexts[i]))


@settings(max_examples=15, deadline=None)
@given(
    names=st.lists(st.text("ab c7-.'é", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=6),
    memory=st.sampled_from([1, 300_000, 2**30]),
    at_once=st.integers(1, 100),
    images=st.integers(1, 4),
)
def test_any_names_any_memory_any_batch(names: list[str], memory: int, at_once: int, images: int) -> None:
    tower = small_tower().double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts_module, "MEMORY", memory)
        patch.setattr(prompts_module, "_AT_ONCE", at_once)
        prompts = ClassPrompts(tower, names)
        grads = random_like(images, len(names), 24, dtype=torch.float64)
        contexts = moved(prompts.context, images)
        gradients, features = prompts.pullback(grads), prompts.encode(contexts)
    for i in range(images):
        assert_same_gradient(gradients[i], naive_gradient(tower, names, prompts.context, grads[i]))
        assert_same_features(features[i], naive(tower, names, contexts[i]))


@pytest.mark.parametrize(("memory", "at_once"), [(1, 1), (400_000, 50), (2**30, 2000)])
def test_memory_changes_no_answer(tower: Tower, memory: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tower.double()
    names = names_of(9)
    answers = []
    for budget in ((prompts_module.MEMORY, prompts_module._AT_ONCE), (memory, at_once)):
        monkeypatch.setattr(prompts_module, "MEMORY", budget[0])
        monkeypatch.setattr(prompts_module, "_AT_ONCE", budget[1])
        prompts = ClassPrompts(tower, names)
        contexts = moved(prompts.context, 5).requires_grad_()
        grads = random_like(5, *prompts.features().shape, dtype=torch.float64)
        features = prompts.encode(contexts)
        (gradient,) = torch.autograd.grad(features, contexts, grads)
        some = torch.tensor([8, 2, 5, 0])
        answers.append([prompts.features(), prompts.pullback(grads), prompts.pullback(grads), features, gradient])
        answers[-1] += [prompts.pullback(grads[:, some], some), prompts.encode(contexts, some)]
    for usual, tight in zip(*answers, strict=True):
        torch.testing.assert_close(tight, usual, atol=1e-12, rtol=1e-9)


def test_the_forward_pass_is_not_repeated(tower: Tower) -> None:
    prompts = ClassPrompts(tower, names_of(9))
    grads = random_like(2, *prompts.features().shape)
    first = prompts.pullback(grads)
    passes = []
    tower.blocks[0].register_forward_pre_hook(lambda *_: passes.append(1))
    tower.blocks[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    assert torch.equal(prompts.pullback(grads), first)
    prompts.features()
    assert not passes
    prompts.encode(prompts.context[None])
    assert passes, "the count must see what is computed"


def test_only_what_fits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the memory is for the graph at hand, so seven chunks of the ten, of a text each, are kept."""
    tower, names = small_tower(), [f"thing number {i}" for i in range(10)]
    prompts = ClassPrompts(tower, names)
    grads = random_like(1, 10, 24)
    prompts.pullback(grads)
    template = prompts._templates[0]
    assert template._token_bytes is not None
    assert len(template._graphs) == 1
    monkeypatch.setattr(prompts_module, "MEMORY", 8 * round(template._token_bytes * (5 + 5) + 1))
    prompts = ClassPrompts(tower, names)
    exact = prompts.pullback(grads)
    assert sorted(prompts._templates[0]._graphs) == [(i, i + 1) for i in range(7)]
    torch.testing.assert_close(prompts.pullback(grads), exact)


def test_nothing_is_computed_that_does_not_count() -> None:
    """Five shared tokens and the suffixes of distinct names; in the last block only one token a text."""
    tower, rows = small_tower(), []
    prompts = ClassPrompts(tower, ["cat", "dog", "great grey owl", "cat"])
    prompts.features()
    for block in tower.blocks:
        block.mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    prompts.encode(prompts.context[None])
    prompts.encode(prompts.context[None], torch.tensor([0, 3]))
    assert rows == [5 + 3 + 3 + 5, 5 + 3 + 3 + 5, 3, 5 + 3, 5 + 3, 1]


def test_a_context_stands_in_for_the_words(tower: Tower) -> None:
    learned = random_like(4, tower.width)
    prompts = ClassPrompts(tower, names_of(5), context=learned)
    grad = random_like(1, *prompts.features().shape)
    assert torch.equal(prompts.context, learned)
    assert_same_features(prompts.features(), naive(tower, names_of(5), learned))
    assert_same_gradient(prompts.pullback(grad)[0], naive_gradient(tower, names_of(5), learned, grad[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [[0], [8, 2, 5], [3, 3, 0], [0, 8], list(range(9))])
def test_some_classes_are_their_share_of_all(tower: Tower, classes: list[int], dtype: torch.dtype) -> None:
    """The first and the last name are equal."""
    tower.to(dtype)
    names, some = names_of(9), torch.tensor(classes)
    prompts = ClassPrompts(tower, names)
    grads = random_like(3, len(classes), prompts.features().shape[1], dtype=dtype)
    contexts = moved(prompts.context, 3).requires_grad_()
    features = prompts.encode(contexts, some)
    (elsewhere,) = torch.autograd.grad(features, contexts, grads)
    gradients = prompts.pullback(grads, some)
    few = [names[c] for c in classes]
    for i in range(3):
        assert_same_features(features[i].detach(), naive(tower, few, contexts[i].detach()))
        assert_same_gradient(gradients[i], naive_gradient(tower, few, prompts.context, grads[i]))
        assert_same_gradient(elsewhere[i], naive_gradient(tower, few, contexts[i].detach(), grads[i]))


def test_some_classes_leave_no_trace(tower: Tower) -> None:
    prompts, untouched = ClassPrompts(tower, names_of(9)), ClassPrompts(tower, names_of(9))
    grads = random_like(2, *prompts.features().shape)
    some = torch.tensor([5, 1])
    prompts.pullback(grads[:, some], some)
    prompts.encode(moved(prompts.context, 2), some)
    assert not prompts._templates[0]._graphs
    assert torch.equal(prompts.pullback(grads), untouched.pullback(grads))
    kept = dict(prompts._templates[0]._graphs)
    prompts.pullback(grads[:, some], some)
    assert prompts._templates[0]._graphs == kept


def test_no_images_give_no_gradients_and_no_features(tower: Tower) -> None:
    prompts = ClassPrompts(tower, ["cat", "dog"])
    dimension = prompts.features().shape[1]
    assert prompts.pullback(torch.zeros(0, 2, dimension)).shape == (0, 4, tower.width)
    assert prompts.encode(torch.zeros(0, 4, tower.width)).shape == (0, 2, dimension)
    second = torch.tensor([1])
    assert prompts.pullback(torch.zeros(0, 1, dimension), second).shape == (0, 4, tower.width)
    assert prompts.encode(torch.zeros(0, 4, tower.width), second).shape == (0, 1, dimension)


def test_inference_mode_is_no_obstacle(tower: Tower) -> None:
    with torch.inference_mode():
        prompts = ClassPrompts(tower, ["cat", "dog"])
        gradient = prompts.pullback(torch.ones(1, *prompts.features().shape))
    shift = torch.zeros_like(prompts.features(), requires_grad=True)
    (prompts.features() * shift).sum().backward()
    assert torch.equal(shift.grad, prompts.features())
    torch.testing.assert_close(gradient, prompts.pullback(torch.ones(1, *prompts.features().shape)))


def test_half_precision_towers_give_float32() -> None:
    exact = ClassPrompts(small_tower(), names_of(5))
    rounded = ClassPrompts(small_tower().to(torch.bfloat16), names_of(5))
    grad = random_like(1, 5, 24)
    for ours, expected in [
        (rounded.features(), exact.features()),
        (rounded.pullback(grad), exact.pullback(grad)),
        (rounded.encode(exact.context[None]), exact.encode(exact.context[None])),
    ]:
        assert ours.dtype == torch.float32
        assert torch.cosine_similarity(ours.flatten(), expected.flatten(), dim=0) > 0.99


@pytest.mark.parametrize(
    ("templates", "reason"),
    [
        (["a photo of a {}.", "itap of a {}."], "an ensemble of templates has no single context"),
        ("{}", "there are no words before '{}' in '{}'"),
        ("<|endoftext|> or {}", "there is a special token before '{}'"),
        ("so <|endoftext|> {}", "there is a special token before '{}'"),
        ("a non{}", "merge with class names into other tokens"),
    ],
)
def test_where_there_is_no_context_features_still_are(templates: str, reason: str) -> None:
    tower = small_tower()
    prompts = ClassPrompts(tower, ["cat", "dog"], templates)
    assert prompts.features().shape == (2, 24)
    assert len(prompts.context) == 0
    for operation in (prompts.pullback, prompts.encode):
        with pytest.raises(ValueError, match=f"there is no context to tune: .*{reason}"):
            operation(torch.zeros(1, 2, 24))
    with pytest.raises(ValueError, match="there is no context to tune"):
        ClassPrompts(tower, ["cat"], templates, context=torch.zeros(4, 32))


@pytest.mark.parametrize(
    "template", ["{}", " {} in the wild", "a non{}", "a photo of a {}", "<|endoftext|> {}", "many, many {}!"]
)
def test_every_template_gives_the_tower_s_own_features(template: str) -> None:
    tower = small_tower()
    ids = tower.tokenize([template.format(name) for name in ("cat", "great grey owl")])
    expected = tower.encode(tower.embed(ids), ids)
    assert_same_features(ClassPrompts(tower, ["cat", "great_grey_owl"], template).features(), expected)


def test_wrong_shapes_are_named() -> None:
    prompts = ClassPrompts(small_tower(), ["cat", "dog"])
    with pytest.raises(ValueError, match=r"gradients must be of shape \(B, 2, 24\), got \(2, 24\)"):
        prompts.pullback(torch.zeros(2, 24))
    with pytest.raises(ValueError, match=r"gradients must be of shape \(B, 1, 24\), got \(3, 2, 24\)"):
        prompts.pullback(torch.zeros(3, 2, 24), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"contexts must be of shape \(B, 4, 32\), got \(1, 3, 32\)"):
        prompts.encode(torch.zeros(1, 3, 32))
    with pytest.raises(ValueError, match=r"context has the shape \(4, 32\), the given one \(16, 32\): write as many"):
        ClassPrompts(small_tower(), ["cat"], context=torch.zeros(16, 32))


def test_several_templates_are_averaged_at_unit_length(tiny_model: CLIP) -> None:
    templates = ["a photo of a {}.", "itap of a {}."]
    each = [ClassPrompts(tiny_model.text, ["cat", "dog"], t).features() for t in templates]
    mean = sum(each) / 2
    expected = mean / mean.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(ClassPrompts(tiny_model.text, ["cat", "dog"], templates).features(), expected)


def test_the_paper_s_ensemble_has_a_name(tiny_model: CLIP) -> None:
    seven = prompts_module.TEMPLATES["ensemble"]
    assert len(set(seven)) == 7
    named, listed = (ClassPrompts(tiny_model.text, ["cat", "dog"], t).features() for t in ("ensemble", list(seven)))
    assert torch.equal(named, listed)
    more = ClassPrompts(tiny_model.text, ["cat", "dog"], ["ensemble", "a photo of a {}."]).features()
    expected = ClassPrompts(tiny_model.text, ["cat", "dog"], [*seven, "a photo of a {}."]).features()
    assert torch.equal(more, expected)


@pytest.mark.parametrize(
    ("classes", "templates", "message"),
    [
        ([], "{}", "no class names given"),
        ("cat,dog", "{}", "a list of names, not one string"),
        (["cat", "_ "], "{}", "class name number 2 is empty"),
        (["cat", 3], "{}", "class names must be strings, but number 2 is 3"),
        (["cat"], [], "at least one template"),
        (["cat"], "a photo", "must contain {} once"),
        (["cat"], "{} and {}", "must contain {} once"),
        (["cat " * 90], "a photo of a {}.", "cat cat"),
    ],
)
def test_bad_names_and_templates_are_named(tiny_model: CLIP, classes: list[str], templates: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassPrompts(tiny_model.text, classes, templates)


def test_the_bytes_of_prompts_grow_with_what_was_asked_for() -> None:
    names = ["cat", "red-breasted merganser", "hen"]
    prompts = ClassPrompts(disturbed(TINY_VIT).text, names)
    lengths = prompts._templates[0]._texts.lengths
    texts = 3 * 2048 + 4 * sum(lengths) * prompts.context.shape[1]
    assert prompts.nbytes == texts
    features = prompts.features()
    assert prompts.nbytes == texts + features.nbytes
    prompts.pullback(torch.ones(1, *features.shape))
    graphs = prompts.nbytes - texts - features.nbytes
    tokens = prompts._templates[0]._texts.shared + sum(lengths)
    assert graphs == int(tokens * prompts._templates[0]._token_bytes)
    assert graphs > features.nbytes
    assert ClassPrompts(disturbed(TINY_VIT).text, [*names, "hen"]).nbytes == texts, "equal texts are computed once"
