"""MTA: the views' features have a mode, robust against views that show something else, and the mode is classified.

Mean shift finds the mode m while every view has an inlierness y, which is high for views near the mode whose prediction
resembles that of other inliers. Both are iterated in turns:

    y ← softmax((d + λ_q W y) / λ_y)        d_p = exp(−‖f_p − m‖² / 2h_p²),  W = P Pᵀ, the likeness of predictions
    m ← normalize(Σ_p d_p y_p f_p)

The mode is a combination of the views, m = Σ_p c_p f_p, so its coefficients c are iterated instead, and all lengths and
distances come from one matrix, the products of the views' features. That matrix is in double precision, where the
distance of views that nearly coincide survives. What is m · t for the mode is the same combination of the views'
logits. An image that has converged keeps its values while others of its batch go on.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

LAMBDA_Y = 0.2
LAMBDA_Q = 4.0
NEIGHBOURS = 0.3
"""Share of the other views that decides a view's bandwidth h."""
ROUNDS = 5
"""Rounds of y and m in turns, and the most iterations of each in a round."""
TOLERANCE = 1e-6
NARROWEST = 1e-7
"""The least h²: views that coincide have none, and d would be 0 / 0. Views of an image are much further apart."""


def mode_of_views(features: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Inlierness y (B, N), which sums to one, and the coefficients (B, N) of the mode, a vector of unit length.

    From features (B, N, D) of unit length and each view's own prediction, `probs` (B, N, C). The weak view, the first,
    is where the search starts.
    """
    precise = features if features.device.type == "mps" else features.double()  # Apple's processors have no doubles
    products = precise @ precise.mT
    likeness = (probs @ probs.mT).to(products.dtype)
    squares = products.diagonal(dim1=1, dim2=2)
    bandwidths = _squared_bandwidths(squares[:, :, None] + squares[:, None] - 2 * products)

    def density(coefficients: Tensor) -> Tensor:
        along = _times(products, coefficients)
        mode_squared = (coefficients * along).sum(dim=-1, keepdim=True)
        return ((2 * along - squares - mode_squared) / (2 * bandwidths)).exp()

    def length(coefficients: Tensor) -> Tensor:
        return (coefficients * _times(products, coefficients)).sum(dim=-1, keepdim=True).clamp(min=0).sqrt()

    def more_alike(near: Tensor, y: Tensor) -> Tensor:
        return ((near + LAMBDA_Q * _times(likeness, y)) / LAMBDA_Y).softmax(dim=-1)

    def uphill(y: Tensor, coefficients: Tensor) -> Tensor:
        shifted = density(coefficients) * y
        norm, tiny = length(shifted), torch.finfo(shifted.dtype).tiny
        return torch.where(norm > tiny, shifted / norm.clamp(min=tiny), coefficients)  # none is near: stay

    y = torch.full_like(bandwidths, 1 / features.shape[1])
    coefficients = torch.zeros_like(y)
    coefficients[:, 0] = 1
    for _ in range(ROUNDS):
        y = _settle(y, partial(more_alike, density(coefficients)), lambda v: v.norm(dim=-1, keepdim=True))
        coefficients = _settle(coefficients, partial(uphill, y), length)
    return y.to(features.dtype), coefficients.to(features.dtype)


def _squared_bandwidths(squared_distances: Tensor) -> Tensor:
    """h² (B, N): half the mean squared distance to the nearest other views, of distances between views (B, N, N)."""
    views = squared_distances.shape[1]
    itself = torch.eye(views, dtype=torch.bool, device=squared_distances.device)
    k = max(1, int(NEIGHBOURS * (views - 1)))
    nearest = squared_distances.masked_fill(itself, torch.inf).topk(k, largest=False).values
    return (0.5 * nearest.mean(dim=-1)).clamp(min=NARROWEST)


def _settle(start: Tensor, step: Callable[[Tensor], Tensor], length: Callable[[Tensor], Tensor]) -> Tensor:
    """`start` (B, N) after as many steps as each image needs until it moves by less than the tolerance."""
    now, going = start, torch.ones_like(start[:, :1], dtype=torch.bool)
    for _ in range(ROUNDS):
        moved = torch.where(going, step(now), now)
        now, going = moved, going & (length(moved - now) >= TOLERANCE)
    return now


def _times(matrix: Tensor, vectors: Tensor) -> Tensor:
    """A symmetric `matrix` (B, N, N) times vectors (B, N)."""
    return (vectors[:, None] @ matrix)[:, 0]
