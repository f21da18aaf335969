"""How the views of an image look to the current text features: what selection and readout are decided by.

Two classes may have the same name (ImageNet has two pairs), hence the same text features, and then the same logits: but
a matrix product gives them only up to rounding. `tie_duplicate_classes` takes that away, so that such classes share all there is, count
as one choice of a view, and the first of them is the answer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usetta.methods.readout import entropy_rank, weak_weight
from usetta.methods.select import confident_strong, entropy
from usetta.methods.tensor_cache import cache_per_tensor

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe

ADAPTIVE = "adaptive"
UNIFORM = "uniform"


@dataclass(frozen=True)
class ViewStats:
    """Statistics of N views of B images, the weak view first."""

    logits: Tensor
    """(B, N, C)"""
    entropies: Tensor
    """(B, N), in nats"""
    chosen: Tensor
    """(B, k): the most confident strong views; with the weak view they are the paper's set S."""
    delta: Tensor
    """(B,): the weak view's entropy rank; NaN where there are no strong views."""
    beta: Tensor
    """(B,): the weak view's weight in SE."""

    @property
    def agrees(self) -> Tensor:
        """(B,): whether all views of S choose the same class."""
        labels = self.logits.argmax(dim=-1)
        return (labels.gather(1, self.chosen) == labels[:, :1]).all(dim=1)


def view_stats(recipe: "Recipe", logits: Tensor) -> ViewStats:
    """What `recipe` sees in logits (B, N, C)."""
    entropies = entropy(logits)
    if logits.shape[1] == 1:
        nothing = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        one = torch.ones_like(entropies[:, 0])
        return ViewStats(logits, entropies, nothing, delta=one * torch.nan, beta=one)
    chosen, delta = confident_strong(entropies, recipe.rho), entropy_rank(entropies)
    if recipe.beta == ADAPTIVE:
        beta = weak_weight(delta, recipe.gamma, recipe.rescaling)
    else:
        beta = torch.full_like(delta, 1 / (1 + chosen.shape[1]) if recipe.beta == UNIFORM else float(recipe.beta))
    return ViewStats(logits, entropies, chosen, delta, beta)


def tie_duplicate_classes(values: Tensor, text: Tensor) -> Tensor:
    """`values` (..., C), where classes whose features `text` (C, D) are the very same have the value of the first."""
    first = _first_of_the_same(text)
    return values if first is None else values[..., first]


@cache_per_tensor
def _first_of_the_same(text: Tensor) -> Tensor | None:
    """For each row of `text` the first that equals it (C,); None if all differ."""
    distinct, places = torch.unique(text, dim=0, return_inverse=True)
    if len(distinct) == len(text):
        return None
    rows = torch.arange(len(text), device=text.device)
    return rows.new_full((len(distinct),), len(text)).scatter_reduce_(0, places, rows, "amin")[places]
