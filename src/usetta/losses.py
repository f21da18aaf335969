"""Towards what? Losses over the logits of the views that a method tunes on, one value per image.

    L_MEM = H(p̄)                the marginal entropy of the mean prediction p̄         (TPT)
    L_RCE = −Σ_c p̄_c log q_c    the reverse cross-entropy to a pseudo-label q           (USE, paper, Eq. 8)
    L_PE  = mean_i H(p_i)        the mean of the views' own entropies                    (R-TPT)

With q = p̄, held constant, the first two have the same gradient: they differ in what the views are pulled towards.
No loss is ever NaN: logarithms are bounded below, where what they are multiplied with has long vanished.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from usetta.select import entropy

Loss = Callable[[Tensor, Tensor], Tensor]


def marginal_entropy(logits: Tensor, _pseudo_label: Tensor | None = None) -> Tensor:
    """Entropy (B,) of the mean over views of softmax(logits), from logits (B, k, C)."""
    log_mean = logits.log_softmax(dim=-1).logsumexp(dim=1) - math.log(logits.shape[1])
    log_mean = log_mean.clamp(min=torch.finfo(log_mean.dtype).min)
    return -(log_mean * log_mean.exp()).sum(dim=-1)


def reverse_cross_entropy(logits: Tensor, pseudo_label: Tensor) -> Tensor:
    """Cross-entropy (B,) of the mean prediction of logits (B, k, C) relative to `pseudo_label` (B, C), a constant."""
    log_q = pseudo_label.detach().clamp(min=torch.finfo(pseudo_label.dtype).tiny).log()
    return -(logits.softmax(dim=-1).mean(dim=1) * log_q).sum(dim=-1)


def pointwise_entropy(logits: Tensor, _pseudo_label: Tensor | None = None) -> Tensor:
    """Mean over views (B,) of the entropy of each view's own prediction, from logits (B, k, C)."""
    return entropy(logits).mean(dim=1)


LOSSES: dict[str, Loss] = {"mem": marginal_entropy, "rce": reverse_cross_entropy, "pointwise": pointwise_entropy}


def dispersion(text: Tensor) -> Tensor:
    """Mean distance (...) of text features (..., C, D) from their centre, which C-TPT wants large."""
    distances: Tensor = torch.linalg.vector_norm(text - text.mean(dim=-2, keepdim=True), dim=-1)
    return distances.mean(dim=-1)


def gradient(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of the sum of `value(at)` with respect to `at`; the images of a batch do not mix in a sum."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        (found,) = torch.autograd.grad(value(leaf).sum(), leaf)
    return found
