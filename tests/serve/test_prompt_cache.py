"""The text of recent class lists is kept, but no more of it than fits."""

import torch

from usetta import methods
from usetta.episode import Episode
from usetta.models.clip import CLIP
from usetta.serve.prompt_cache import PromptCache, PromptKey


def wording(number: int, templates: tuple[str, ...] | None = None) -> PromptKey:
    return PromptKey("tiny", tuple(f"thing {number} {i}" for i in range(20)), templates)


def use(texts: PromptCache, which: PromptKey, method: str = "se") -> None:
    """Answer something, as a request does."""
    views = torch.nn.functional.normalize(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    texts.head(which).predict(methods.get(method), [Episode(views)], ["image"])
    texts.trim()


def test_the_same_wording_is_made_once_and_another_is_another(tiny_model: CLIP) -> None:
    texts = PromptCache({"tiny": tiny_model}, 2**30)
    first = texts.head(wording(0))
    assert texts.head(wording(0)) is first
    assert texts.head(wording(0, ("a {}.",))) is not first
    assert texts.head(wording(1)) is not first
    assert len(texts) == 3


def test_what_was_not_used_for_longest_is_forgotten_first(tiny_model: CLIP) -> None:
    texts = PromptCache({"tiny": tiny_model}, 2**30)
    for number in range(3):
        use(texts, wording(number))
    each = texts.nbytes // 3
    small = PromptCache({"tiny": tiny_model}, 2 * each + 100)
    for number in (0, 1):
        use(small, wording(number))
    assert len(small) == 2
    first, second = small.head(wording(1)), small.head(wording(0))
    use(small, wording(2))
    assert len(small) == 2
    assert small.nbytes <= 2 * each + 100
    assert small.head(wording(0)) is second
    assert small.head(wording(1)) is not first


def test_graphs_that_tuning_leaves_behind_are_counted(tiny_model: CLIP) -> None:
    texts = PromptCache({"tiny": tiny_model}, 2**30)
    use(texts, wording(0))
    plain = texts.nbytes
    assert plain >= 20 * 32 * 4  # the features alone
    use(texts, wording(0), "tpt")
    with_graph = texts.nbytes
    # Two blocks of width 64 for about 100 tokens: the activations alone are several times the tokens' embeddings.
    assert with_graph > plain + 100 * 64 * 4 * 10
    use(texts, wording(0), "tpt")
    assert texts.nbytes == with_graph
    use(texts, wording(0), "rlcf")
    assert texts.nbytes > with_graph  # the words as the reward model reads them


def test_a_list_that_is_too_large_by_itself_is_not_kept(tiny_model: CLIP) -> None:
    texts = PromptCache({"tiny": tiny_model}, 1000)
    use(texts, wording(0))
    assert len(texts) == 0
    assert texts.nbytes == 0
