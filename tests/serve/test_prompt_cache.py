"""The text of recent class lists is kept, but no more of it than fits."""

import torch

from usetta import methods
from usetta.episode import Episode
from usetta.models.clip import CLIP
from usetta.serve.prompt_cache import PromptCache, PromptKey


def key(number: int, templates: tuple[str, ...] | None = None) -> PromptKey:
    return PromptKey("tiny", tuple(f"thing {number} {i}" for i in range(20)), templates)


def use(prompts: PromptCache, which: PromptKey, method: str = "se") -> None:
    """Answer something, as a request does."""
    views = torch.nn.functional.normalize(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    prompts.head(which).predict(methods.get(method), [Episode(views)], ["image"])
    prompts.trim()


def test_the_same_key_is_made_once_and_another_is_another(tiny_model: CLIP) -> None:
    prompts = PromptCache({"tiny": tiny_model}, 2**30)
    first = prompts.head(key(0))
    assert prompts.head(key(0)) is first
    assert prompts.head(key(0, ("a {}.",))) is not first
    assert prompts.head(key(1)) is not first
    assert len(prompts) == 3


def test_what_was_not_used_for_longest_is_forgotten_first(tiny_model: CLIP) -> None:
    prompts = PromptCache({"tiny": tiny_model}, 2**30)
    for number in range(3):
        use(prompts, key(number))
    size = prompts.nbytes // 3
    small = PromptCache({"tiny": tiny_model}, 2 * size + 100)
    for number in (0, 1):
        use(small, key(number))
    assert len(small) == 2
    first, second = small.head(key(1)), small.head(key(0))
    use(small, key(2))
    assert len(small) == 2
    assert small.nbytes <= 2 * size + 100
    assert small.head(key(0)) is second
    assert small.head(key(1)) is not first


def test_graphs_that_tuning_leaves_behind_are_counted(tiny_model: CLIP) -> None:
    prompts = PromptCache({"tiny": tiny_model}, 2**30)
    use(prompts, key(0))
    plain = prompts.nbytes
    assert plain >= 20 * 32 * 4  # the features alone
    use(prompts, key(0), "tpt")
    with_graph = prompts.nbytes
    # Two blocks of width 64 for about 100 tokens: the activations alone are several times the tokens' embeddings.
    assert with_graph > plain + 100 * 64 * 4 * 10
    use(prompts, key(0), "tpt")
    assert prompts.nbytes == with_graph
    use(prompts, key(0), "rlcf")
    assert prompts.nbytes > with_graph  # the prompts of the reward model


def test_a_list_that_is_too_large_by_itself_is_not_kept(tiny_model: CLIP) -> None:
    prompts = PromptCache({"tiny": tiny_model}, 1000)
    use(prompts, key(0))
    assert len(prompts) == 0
    assert prompts.nbytes == 0
