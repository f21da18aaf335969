"""Towards what? Losses over the logits of the views that a method tunes on, one value per image.

    L_MEM = H(p̄)                marginal entropy: that of the mean prediction p̄        (TPT)
    L_RCE = −Σ_c p̄_c log q_c    reverse cross-entropy to a pseudo-label q               (USE, paper, Eq. 8)
    L_PE  = mean_i H(p_i)        pointwise entropy: the mean of the views' own           (R-TPT)
    L_CWE = mean_i w_i H(p_i)    the same with constant weights w_i = exp(0.4 − H(p_i))  (TTL)
    L_R   = mean_ik r̃_ik CE(z_i, c_ik)    the k-th best class of view i, weighted by its reward (RLCF)

With q = p̄, held constant, the first two have the same gradient: they differ in what the views are pulled towards.
No loss is ever NaN: logarithms are bounded below, where what they are multiplied with has long vanished.

A loss is a function in `LOSSES` of logits (B, k, C) and a pseudo-label (B, C), to values (B,). If its second parameter
is called `rewards`, it gets a reward model's scores (B, k, C) of the same views instead of the pseudo-label.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from usetta.methods.options import Count, NotNegative
from usetta.methods.select import entropy
from usetta.registry import Registry

Loss = Callable[..., Tensor]
"""(logits (B, k, C), pseudo-label (B, C) or rewards (B, k, C), **options) → values (B,)."""

LOSSES: Registry[Loss] = Registry("loss")


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


def weighted_entropy(logits: Tensor, _pseudo_label: Tensor | None = None, *, margin: NotNegative = 0.4) -> Tensor:
    """Mean over views (B,) of their entropies H, weighted by exp(margin − H), a constant, from logits (B, k, C)."""
    entropies = entropy(logits)
    return ((margin - entropies.detach()).exp() * entropies).mean(dim=1)


def reward_loss(logits: Tensor, rewards: Tensor, *, top_k: Count = 3) -> Tensor:
    """Mean (B,) over views and their `top_k` best classes of reward times cross-entropy, from logits (B, k, C).

    `rewards` (B, k, C) are constants, and count by how much they differ from their mean over these classes.
    """
    best = logits.topk(min(top_k, logits.shape[-1]), dim=-1).indices
    reward = rewards.detach().gather(-1, best)
    advantage = reward - reward.mean(dim=-1, keepdim=True)
    return (-advantage * logits.log_softmax(dim=-1).gather(-1, best)).mean(dim=(1, 2))


LOSSES.register("mem", marginal_entropy)
LOSSES.register("rce", reverse_cross_entropy)
LOSSES.register("pointwise", pointwise_entropy)
LOSSES.register("weighted", weighted_entropy)
LOSSES.register("reward", reward_loss)


@cache
def takes_rewards(loss: Loss) -> bool:
    """Whether a loss wants rewards in place of a pseudo-label: its second parameter has that name."""
    return list(inspect.signature(loss).parameters)[1:2] == ["rewards"]


@dataclass(frozen=True)
class Reward:
    """What a reward model makes of views and classes; any model that saw the same views will do."""

    features: Tensor
    """(B, N, D'): of the views, of unit length."""
    text: Tensor
    """(C, D'): of the classes in their hard prompt, of unit length."""

    def scores(self, images: Tensor, views: Tensor) -> Tensor:
        """The CLIP scores (A, k, C), max(0, 2.5 cos), of `views` (A, k) of each of `images` (A,)."""
        features = torch.take_along_dim(self.features[images], views[:, :, None], dim=1)
        return (2.5 * features @ self.text.T).clamp(min=0)


def dispersion(text: Tensor) -> Tensor:
    """Mean distance (...) of text features (..., C, D) from their centre, which C-TPT wants large."""
    distances: Tensor = torch.linalg.vector_norm(text - text.mean(dim=-2, keepdim=True), dim=-1)
    return distances.mean(dim=-1)


def orthogonality(text: Tensor) -> Tensor:
    """O-TPT's penalty (...) of text features (..., C, D): 0 where they are orthogonal.

    The published code reflects each row of the Gram matrix onto its axis; what remains is its length minus 1. Of more
    classes than dimensions the Gram matrix is not needed, which grows with the square of their number: its row of class
    c has the length √(tᵀ(TᵀT)t).
    """
    if text.shape[-2] > text.shape[-1]:
        lengths = ((text @ (text.mT @ text)) * text).sum(dim=-1).sqrt()
    else:
        lengths = torch.linalg.vector_norm(text @ text.mT, dim=-1)
    return lengths.mean(dim=-1) - 1


def gradient(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The gradient of the sum of `value(at)` with respect to `at`; the images of a batch do not mix in a sum."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        (grad,) = torch.autograd.grad(value(leaf).sum(), leaf)
    return grad


Penalties = Sequence[tuple[float, Callable[[Tensor], Tensor]]]
"""Weights, and functions of text features (..., C, D) that are minimised beside a loss."""


def penalty_gradient(penalties: Penalties, text: Tensor) -> Tensor | float:
    """The gradient of the weighted sum of `penalties` with respect to `text` (A, C, D)."""
    return sum((weight * gradient(penalty, text) for weight, penalty in penalties), 0.0)
