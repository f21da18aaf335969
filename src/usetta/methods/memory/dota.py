"""DOTA: a Gaussian for each class, which learns from the stream by soft labels.

    out = z̄ + w g,   g_c = x̄ᵀ Λ μ_c − ½ μ_cᵀ Λ μ_c,   Λ = ((1 − ε) mean_c Σ_c + ε I)⁻¹,   w = min(ρ mean(κ) / n, η)

with means over the n most confident views. Afterwards every class takes in those views with weights y, their
probabilities: κ += Σ y, and μ and Σ become the weighted means, Σ around the μ of before.

The covariances are C × D × D numbers, a gigabyte for ImageNet. A class whose y is below the rounding of its κ keeps its
covariance, and the mean of all is followed, not summed anew.
"""

import torch
from torch import Tensor

from usetta.methods.memory.base import State, Stream, Views
from usetta.methods.options import NotNegative, Positive
from usetta.methods.select import entropy, keep_count, most_confident

_START = 0.001
"""All entries of all means before the first image, so that g does not prefer a class."""


def dota(
    state: State | None,
    views: Views,
    stream: Stream,
    *,
    weight: NotNegative = 0.3,
    rate: NotNegative = 0.02,
    variance: Positive = 0.002,
    ridge: Positive = 1e-4,
) -> tuple[Tensor, State]:
    """Logits (B, C) by Han et al., 2024. `weight` is their η, `rate` ρ, `variance` σ, `ridge` ε."""
    classes, dim = stream.text.shape
    state = state or _empty(stream.text, variance)
    means, counts, covariances, shared = (state[name] for name in ("means", "counts", "covariances", "shared"))
    one = torch.eye(dim, dtype=means.dtype, device=means.device)
    selected = most_confident(entropy(views.logits), keep_count(views.features.shape[1], stream.rho))
    out = torch.empty_like(views.logits[:, 0])
    for i, chosen in enumerate(selected):
        features, logits = views.features[i, chosen], views.logits[i, chosen]
        factor = torch.linalg.cholesky((1 - ridge) * shared + ridge * one)
        # Λ = (L Lᵀ)⁻¹, so uᵀ Λ v is the product of L⁻¹ u and L⁻¹ v.
        whitened = torch.linalg.solve_triangular(factor, means.T, upper=False)  # (D, C)
        own = torch.linalg.solve_triangular(factor, features.mean(dim=0)[:, None], upper=False)[:, 0]
        gaussian = own @ whitened - whitened.square().sum(dim=0) / 2
        out[i] = logits.mean(dim=0) + torch.clamp(rate * counts.mean() / len(chosen), max=weight) * gaussian
        soft = logits.softmax(dim=-1)  # (n, C)
        more = soft.sum(dim=0)
        active = (more > torch.finfo(more.dtype).eps * counts).nonzero()[:, 0]
        total = (counts + more)[active]
        apart = features - means[active][:, None]  # (A, n, D)
        spread = soft[:, active].T[:, :, None] / total[:, None, None] * apart
        shared.addmm_(spread.flatten(0, 1).T, apart.flatten(0, 1), alpha=1 / classes)
        # One by one, because a single covariance fits into the processor's caches and is in memory only once.
        for place, (label, fades) in enumerate(zip(active.tolist(), (more[active] / total).tolist(), strict=True)):
            shared.sub_(covariances[label], alpha=fades / classes)
            covariances[label].addmm_(spread[place].T, apart[place], beta=1 - fades)
        means.mul_(counts[:, None]).add_(soft.T @ features).div_((counts + more)[:, None])
        counts += more
    return out, state


def _empty(text: Tensor, variance: float) -> State:
    classes, dim = text.shape
    start = variance * torch.eye(dim, dtype=text.dtype, device=text.device)
    return {
        "means": torch.full_like(text, _START),
        "counts": text.new_ones(classes),
        "covariances": start.repeat(classes, 1, 1),
        "shared": start,
    }
