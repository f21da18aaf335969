"""How do views become one answer? Every rule of this file is a weight β between the weak view and the strong ones.

    q = β · p_weak + (1 − β) · mean of the chosen strong views        (paper, Eq. 7)

Zero-shot CLIP is β = 1, the mean of the strong views β = 0, the plain average β = 1/2, the uniform mean over
S = {weak} ∪ chosen is β = 1/|S|, and self-ensembling (SE) sets β for each picture by how the weak view's entropy
ranks among the strong ones.
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
    """β (B,) = 1/2 + γ · rescale(δ − 1/2): with γ = 0.4 it stays within [0.3, 0.7]."""
    return 0.5 + gamma * RESCALINGS[rescaling](delta - 0.5)


def blend(probs: Tensor, strong: Tensor, beta: Tensor) -> Tensor:
    """The answer q (B, C): β (B,) of the weak view and 1 − β of the mean over the chosen strong views.

    `probs`: (B, N, C), a distribution per view, the weak one first. `strong`: (B, k) view indices.
    """
    chosen = torch.take_along_dim(probs, strong[:, :, None], dim=1)
    beta = beta[:, None]
    return beta * probs[:, 0] + (1 - beta) * chosen.mean(dim=1)  # Eq. 7
