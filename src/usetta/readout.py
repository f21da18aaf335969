"""How do views become one answer? Every rule of this file is a set of weights over the views.

    q = β · p_weak + (1 − β) · mean of the chosen strong views        (paper, Eq. 7)

Zero-shot CLIP is β = 1, the mean of the strong views β = 0, the plain average β = 1/2, the uniform mean over
S = {weak} ∪ chosen is β = 1/|S|, and self-ensembling (SE) sets β for each picture by how the weak view's entropy
ranks among the strong ones. R-TPT weighs all views by how close they are to their nearest neighbours, and averages
logits where the others average probabilities.
"""

from collections.abc import Callable

import torch
from torch import Tensor

RESCALINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "root": lambda x: x.sign() * x.abs().sqrt(),
    "square": lambda x: x.sign() * x.square(),
}
"""What happens to δ − 1/2 before γ multiplies it; the paper uses `linear`, the authors' published SE `square`."""


def entropy_rank(entropies: Tensor) -> Tensor:
    """δ (B,): the share of strong views that are strictly less certain than the weak one, from entropies (B, N)."""
    return (entropies[:, 1:] > entropies[:, :1]).to(entropies.dtype).mean(dim=1)  # Eq. 5


def weak_weight(delta: Tensor, gamma: float = 0.4, rescaling: str = "linear") -> Tensor:
    """β (B,) = 1/2 + γ · rescale(δ − 1/2), within [0.3, 0.7] for γ = 0.4, and never outside [0, 1]."""
    return (0.5 + gamma * RESCALINGS[rescaling](delta - 0.5)).clamp(0, 1)  # a wide root would leave it


def blend_weights(beta: Tensor, strong: Tensor, views: int) -> Tensor:
    """Weights (B, N) of N views: β (B,) for the weak one, and 1 − β shared by the chosen ones, `strong` (B, k)."""
    weights = beta.new_zeros(len(beta), views)
    weights[:, 0] = beta
    share = (1 - beta)[:, None] / max(1, strong.shape[1])
    return weights.scatter_(1, strong, share.expand(strong.shape))


def reliability_weights(features: Tensor, neighbours: int = 20, temperature: float = 0.01) -> Tensor:
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
