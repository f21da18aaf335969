"""Which views count? Views are ranked by the entropy of their own prediction, and the most confident are kept.

`k = max(1, int(ρ·n))` views are kept, never a percentile threshold: the tenth percentile with interpolation keeps
seven of 64 views where every published implementation keeps six.

A selection rule decides which views a loss sees. It is a function in `SELECTIONS` of the recipe and the entropies
(B, N) before tuning and at the present step, and returns indices of views (B, k). TPT's rule ignores the second, so its
choice is the same at every step.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usetta.registry import Registry

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe

Selection = Callable[..., Tensor]
"""(recipe, entropies before tuning (B, N), present entropies (B, N), **options) → indices of views (B, k)."""

SELECTIONS: Registry[Selection] = Registry("selection rule")


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits) over the last axis: (..., C) -> (...)."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def keep_count(views: int, rho: float) -> int:
    """How many of `views` views the ratio ρ keeps: int() truncates, as published, but at least one is kept."""
    return max(1, int(views * rho))


def most_confident(entropies: Tensor, k: int) -> Tensor:
    """Indices (B, k) of the lowest of `entropies` (B, N), ascending; equal ones in the order of the views."""
    return entropies.argsort(dim=-1, stable=True)[..., :k]


def confident_strong(entropies: Tensor, rho: float) -> Tensor:
    """Indices (B, k) of the k most confident strong views of `entropies` (B, N); view 0, the weak one, never competes.

    The paper's set S is the weak view plus these.
    """
    strong = entropies[:, 1:]
    return most_confident(strong, keep_count(strong.shape[1], rho)) + 1


def _confident(recipe: "Recipe", before: Tensor, _present: Tensor) -> Tensor:
    """The most confident of all views before tuning; the weak view competes."""
    return most_confident(before, keep_count(before.shape[1], recipe.rho))


def _weak_and_strong(recipe: "Recipe", _before: Tensor, present: Tensor) -> Tensor:
    """The paper's S at the present step: the weak view, then the most confident strong ones."""
    strong = confident_strong(present, recipe.rho)
    return torch.cat([torch.zeros_like(strong[:, :1]), strong], dim=1)


def _all(_recipe: "Recipe", before: Tensor, _present: Tensor) -> Tensor:
    return torch.arange(before.shape[1], device=before.device).expand(len(before), -1)


SELECTIONS.register("confident", _confident)
SELECTIONS.register("weak+strong", _weak_and_strong)
SELECTIONS.register("all", _all)


def tuned_views(recipe: "Recipe", entropies: Tensor) -> Tensor:
    """The views (B, k) that the loss of `recipe` sees at its first step, from the entropies (B, N) before tuning."""
    views: Tensor = recipe.part("select")(recipe, entropies, entropies)
    return views
