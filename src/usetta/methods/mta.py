"""MTA: classify the mode of the views' features, which is robust against views that show something else.

Mean shift finds the mode m while every view has an inlierness y, which is high for views near the mode whose prediction
resembles that of other inliers. Both are iterated in turns:

    y ← softmax((d + λ_q W y) / λ_y)        d_p = exp(−‖f_p − m‖² / 2h_p²),  W = P Pᵀ, the affinity of predictions
    m ← normalize(Σ_p d_p y_p f_p)

The mode is a combination of the views, m = Σ_p c_p f_p, so its coefficients c are iterated instead, and all lengths and
distances come from one matrix, the products of the views' features. That matrix is in double precision, where the
distance of views that nearly coincide survives. The mode's logits are the same combination of the views' logits.
An image that has converged keeps its values while others of its batch go on.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_ROUNDS = 5
"""Rounds of y and m in turns, and the most iterations of each in a round."""
_TOLERANCE = 1e-6
_MIN_SQUARED_BANDWIDTH = 1e-7
"""Views that coincide have h² = 0, and d would be 0 / 0. Real views of an image are much further apart than this."""


def mode_of_views(
    features: Tensor,
    probs: Tensor,
    *,
    bandwidth: float = 0.3,
    lambda_y: float = 0.2,
    lambda_q: float = 4.0,
) -> tuple[Tensor, Tensor]:
    """Inlierness y (B, N), which sums to one, and the coefficients (B, N) of the mode, a vector of unit length.

    From features (B, N, D) of unit length and each view's own prediction, `probs` (B, N, C). The search starts at the
    weak view, the first. `bandwidth` is the share of the other views, the nearest ones, that decides a view's h.
    """
    if features.device.type == "mps":  # which has no double precision
        settings = {"bandwidth": bandwidth, "lambda_y": lambda_y, "lambda_q": lambda_q}
        inlierness, coefficients = mode_of_views(features.cpu(), probs.cpu(), **settings)
        return inlierness.to(features.device), coefficients.to(features.device)
    precise = features.double()
    products = precise @ precise.mT
    affinity = (probs @ probs.mT).to(products.dtype)
    squares = products.diagonal(dim1=1, dim2=2)
    squared_distances = squares[:, :, None] + squares[:, None] - 2 * products
    squared_bandwidths = _squared_bandwidths(squared_distances, bandwidth)

    def density(coefficients: Tensor) -> Tensor:
        along = _times(products, coefficients)
        mode_squared = (coefficients * along).sum(dim=-1, keepdim=True)
        return ((2 * along - squares - mode_squared) / (2 * squared_bandwidths)).exp()

    def length(coefficients: Tensor) -> Tensor:
        return (coefficients * _times(products, coefficients)).sum(dim=-1, keepdim=True).clamp(min=0).sqrt()

    def next_inlierness(densities: Tensor, y: Tensor) -> Tensor:
        return ((densities + lambda_q * _times(affinity, y)) / lambda_y).softmax(dim=-1)

    def next_mode(y: Tensor, coefficients: Tensor) -> Tensor:
        shifted = density(coefficients) * y
        norm, tiny = length(shifted), torch.finfo(shifted.dtype).tiny
        # Where no view is near enough for a density above zero, the mode stays where it is.
        return torch.where(norm > tiny, shifted / norm.clamp(min=tiny), coefficients)

    y = torch.full_like(squared_bandwidths, 1 / features.shape[1])
    coefficients = torch.zeros_like(y)
    coefficients[:, 0] = 1
    for _ in range(_ROUNDS):
        y = _converge(y, partial(next_inlierness, density(coefficients)), lambda v: v.norm(dim=-1, keepdim=True))
        coefficients = _converge(coefficients, partial(next_mode, y), length)
    return y.to(features.dtype), coefficients.to(features.dtype)


def _squared_bandwidths(squared_distances: Tensor, share: float) -> Tensor:
    """h² (B, N): half the mean squared distance to the nearest other views, of distances between views (B, N, N)."""
    views = squared_distances.shape[1]
    itself = torch.eye(views, dtype=torch.bool, device=squared_distances.device)
    k = max(1, int(share * (views - 1)))
    nearest = squared_distances.masked_fill(itself, torch.inf).topk(k, largest=False).values
    return (0.5 * nearest.mean(dim=-1)).clamp(min=_MIN_SQUARED_BANDWIDTH)


def _converge(start: Tensor, step: Callable[[Tensor], Tensor], length: Callable[[Tensor], Tensor]) -> Tensor:
    """`start` (B, N) after as many steps as each image needs until it changes by less than the tolerance."""
    values, unsettled = start, torch.ones_like(start[:, :1], dtype=torch.bool)
    for _ in range(_ROUNDS):
        updated = torch.where(unsettled, step(values), values)
        values, unsettled = updated, unsettled & (length(updated - values) >= _TOLERANCE)
    return values


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    """A symmetric `matrix` (B, N, N) times vectors (B, N)."""
    return (vectors[:, None] @ matrix)[:, 0]
