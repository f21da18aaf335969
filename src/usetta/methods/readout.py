"""How do views become one answer? Most rules of this file are a set of weights over the views.

    q = β · p_weak + (1 − β) · mean of the chosen strong views        (paper, Eq. 7)

Zero-shot CLIP is β = 1, the mean of the strong views β = 0, the plain average β = 1/2, the uniform mean over
S = {weak} ∪ chosen is β = 1/|S|, and self-ensembling (SE) sets β for each image by how the weak view's entropy
ranks among the strong ones. STS averages the views that were most confident before it tuned. R-TPT weights all views by
how close they are to their nearest neighbours, and averages logits where the others average probabilities. ZERO's vote
and MTA's mode have files of their own.

A readout is a function in `READOUTS`, and its name there is a name in the grammar of methods. `average` gives half to
the weak view and half to the chosen strong ones; `selected` is the mean of the views, the weak one included, that were
most confident before anything was tuned, and `feature` classifies the mean of their features.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usetta.methods.mta import mode_of_views
from usetta.methods.options import Count, NotNegative, Positive, Share
from usetta.methods.select import keep_count, most_confident
from usetta.methods.zero import votes_of_views
from usetta.registry import Registry

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe
    from usetta.methods.stats import ViewStats

Readout = Callable[..., tuple[Tensor, Tensor]]
"""(recipe, statistics before tuning, statistics after it, features (B, N, D), **options) → the answer (B, C), which are
probabilities, and the weight of each view in it (B, N)."""

READOUTS: Registry[Readout] = Registry("readout")

RESCALINGS: Registry[Callable[[Tensor], Tensor]] = Registry("rescaling")
"""What happens to δ − 1/2 before γ multiplies it; the paper uses `linear`, the authors' published SE `square`."""
RESCALINGS.register("linear", lambda x: x)
RESCALINGS.register("root", lambda x: x.sign() * x.abs().sqrt())
RESCALINGS.register("square", lambda x: x.sign() * x.square())


def entropy_rank(entropies: Tensor) -> Tensor:
    """δ (B,): the share of strong views that are strictly less confident than the weak one, from entropies (B, N)."""
    return (entropies[:, 1:] > entropies[:, :1]).to(entropies.dtype).mean(dim=1)  # Eq. 5


def weak_weight(delta: Tensor, gamma: float = 0.4, rescaling: str = "linear") -> Tensor:
    """β (B,) = 1/2 + γ · rescale(δ − 1/2), within [0.3, 0.7] for γ = 0.4, and never outside [0, 1]."""
    # Only the root can leave [0, 1], where γ is large.
    return (0.5 + gamma * RESCALINGS[rescaling](delta - 0.5)).clamp(0, 1)


def blend_weights(beta: Tensor, strong: Tensor, views: int) -> Tensor:
    """Weights (B, N) of N views: β (B,) for the weak one, and 1 − β shared by the chosen ones, `strong` (B, k)."""
    weights = beta.new_zeros(len(beta), views)
    weights[:, 0] = beta
    share = (1 - beta)[:, None] / max(1, strong.shape[1])
    return weights.scatter_(1, strong, share.expand(strong.shape))


def reliability_weights(features: Tensor, neighbours: int, temperature: float) -> Tensor:
    """R-TPT's weights (B, N) of views with features (B, N, D): softmax of the mean cosine to the nearest other views.

    A view is never its own neighbour. The published code excludes cosines that round to 1, which in single precision
    misses about a third of the diagonal.
    """
    views = features.shape[1]
    if views == 1:
        return features.new_ones(len(features), 1)
    itself = torch.eye(views, dtype=torch.bool, device=features.device)
    cosines = (features @ features.mT).masked_fill(itself, -torch.inf)
    nearest = cosines.topk(min(neighbours, views - 1), dim=-1).values
    return (nearest.mean(dim=-1) / temperature).softmax(dim=-1)


def mean_of_views(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum (B, C) over views of `values` (B, N, C): probabilities or logits."""
    return (weights[:, None] @ values)[:, 0]


def _blend(beta: Tensor, stats: "ViewStats") -> tuple[Tensor, Tensor]:
    """The answer (B, C) that gives the weak view β (B,), and the weights (B, N) of the views in it."""
    weights = blend_weights(beta, stats.chosen, stats.logits.shape[1])
    return mean_of_views(stats.logits.softmax(dim=-1), weights), weights


def _fixed(beta: Callable[[int], float]) -> Readout:
    """The readout whose β depends on nothing but how many strong views are chosen."""

    def read_out(
        _recipe: "Recipe", _before: "ViewStats", after: "ViewStats", _features: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _blend(torch.full_like(after.beta, beta(after.chosen.shape[1])), after)

    return read_out


def _self_ensemble(
    _recipe: "Recipe", _before: "ViewStats", after: "ViewStats", _features: Tensor
) -> tuple[Tensor, Tensor]:
    return _blend(after.beta, after)


def _selected(recipe: "Recipe", before: "ViewStats", after: "ViewStats", _features: Tensor) -> tuple[Tensor, Tensor]:
    k = keep_count(before.entropies.shape[1], recipe.rho)
    selected = most_confident(before.entropies, k)
    weights = torch.zeros_like(before.entropies).scatter_(1, selected, 1 / k)
    return mean_of_views(after.logits.softmax(dim=-1), weights), weights


def _mean_feature(recipe: "Recipe", before: "ViewStats", after: "ViewStats", features: Tensor) -> tuple[Tensor, Tensor]:
    k = keep_count(before.entropies.shape[1], recipe.rho)
    selected = most_confident(before.entropies, k)
    weights = torch.zeros_like(before.entropies).scatter_(1, selected, 1 / k)
    # Logits of the mean feature at unit length: logits are linear in features.
    length = torch.linalg.vector_norm(mean_of_views(features, weights), dim=-1, keepdim=True)
    return (mean_of_views(after.logits, weights) / length).softmax(dim=-1), weights


def _reliability(
    _recipe: "Recipe",
    _before: "ViewStats",
    after: "ViewStats",
    features: Tensor,
    *,
    neighbours: Count = 20,
    temperature: Positive = 0.01,
) -> tuple[Tensor, Tensor]:
    weights = reliability_weights(features, neighbours, temperature)
    return mean_of_views(after.logits, weights).softmax(dim=-1), weights


def _vote(
    _recipe: "Recipe", _before: "ViewStats", after: "ViewStats", _features: Tensor, *, voters: Share = 0.3
) -> tuple[Tensor, Tensor]:
    return votes_of_views(after.logits, after.entropies, voters)


def _mode(
    _recipe: "Recipe",
    _before: "ViewStats",
    after: "ViewStats",
    features: Tensor,
    *,
    bandwidth: Share = 0.3,
    lambda_y: Positive = 0.2,
    lambda_q: NotNegative = 4.0,
) -> tuple[Tensor, Tensor]:
    probs = after.logits.softmax(dim=-1)
    inlierness, coefficients = mode_of_views(features, probs, bandwidth=bandwidth, lambda_y=lambda_y, lambda_q=lambda_q)
    return mean_of_views(after.logits, coefficients).softmax(dim=-1), inlierness


READOUTS.register("weak", _fixed(lambda _k: 1.0))
READOUTS.register("strong", _fixed(lambda _k: 0.0))
READOUTS.register("average", _fixed(lambda _k: 0.5))
READOUTS.register("uniform", _fixed(lambda k: 1 / (1 + k)))
READOUTS.register("se", _self_ensemble)
READOUTS.register("selected", _selected)
READOUTS.register("feature", _mean_feature)
READOUTS.register("reliability", _reliability)
READOUTS.register("vote", _vote)
READOUTS.register("mode", _mode)
