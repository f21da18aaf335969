"""Which views count? Views are ranked by the entropy of their own prediction; the confident ones are kept.

`k = max(1, int(ρ·n))` views are kept, never a percentile threshold: the tenth percentile with interpolation keeps
seven of 64 views where every published implementation keeps six.
"""

from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits) over the last axis: (..., C) -> (...)."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def keep_count(views: int, rho: float) -> int:
    """How many of `views` views the ratio ρ keeps: at least one, and otherwise int() cuts off, as published."""
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
