"""Statistics of the views under the present text features, which selection and readout depend on.

Two classes may have the same name (ImageNet has two pairs), hence the same text features and logits, but a matrix
product gives these only up to rounding. `tie_duplicate_classes` makes them exactly equal, so that such classes share
all probability, count as one choice of a view, and the first of them is the answer.

`cache_per_tensor` keeps constants of a class list, such as a decomposition of its text features, as long as the tensor
lives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from usetta.methods.readout import entropy_rank, weak_weight
from usetta.methods.select import confident_strong, entropy

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe

T = TypeVar("T")

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
    """The statistics of logits (B, N, C), by the ρ, β, γ and rescaling of `recipe`."""
    entropies = entropy(logits)
    if logits.shape[1] == 1:
        none = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        one = torch.ones_like(entropies[:, 0])
        return ViewStats(logits, entropies, chosen=none, delta=one * torch.nan, beta=one)
    chosen, delta = confident_strong(entropies, recipe.rho), entropy_rank(entropies)
    if recipe.beta == ADAPTIVE:
        beta = weak_weight(delta, recipe.gamma, recipe.rescaling)
    else:
        beta = torch.full_like(delta, 1 / (1 + chosen.shape[1]) if recipe.beta == UNIFORM else float(recipe.beta))
    return ViewStats(logits, entropies, chosen, delta, beta)


def cache_per_tensor(compute: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """`compute`, called again only for a tensor that is new, or was written to since."""
    known = WeakTensorKeyDictionary()

    @wraps(compute)
    def cached(tensor: Tensor) -> T:
        # Inference tensors do not count their versions; there is no public name for the count of the others.
        version = None if tensor.is_inference() else tensor._version  # noqa: SLF001
        if tensor not in known or known[tensor][0] != version:
            known[tensor] = version, compute(tensor)
        value: T = known[tensor][1]
        return value

    return cached


def tie_duplicate_classes(values: Tensor, text: Tensor) -> Tensor:
    """`values` (..., C), where classes with exactly equal features `text` (C, D) all have the value of the first."""
    first = _first_duplicate(text)
    return values if first is None else values[..., first]


@cache_per_tensor
def _first_duplicate(text: Tensor) -> Tensor | None:
    """For each row of `text` the first that equals it (C,); None if all differ."""
    distinct, places = torch.unique(text, dim=0, return_inverse=True)
    if len(distinct) == len(text):
        return None
    rows = torch.arange(len(text), device=text.device)
    return rows.new_full((len(distinct),), len(text)).scatter_reduce_(0, places, rows, "amin")[places]
