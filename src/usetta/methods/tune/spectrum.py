"""Tuning along the main directions of the text features, as STS does: t' = normalize(t + Bγ), γ from zero.

B holds the first right singular vectors of the text features (C, D), not centred, as many as stand out from noise; γ is
shared by all classes. A shift that all classes share adds the same number to all logits of a view, which a softmax
ignores: STS acts only through the normalisation that follows, and one step changes little.

STS also penalises a long shift, by λ‖Bγ‖. The (sub)gradient of that is zero at γ = 0, so it does not matter to the one
step that STS takes. The published value of λ is not known: the option `penalty` is 0, and matters from the second step
on.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from usetta.methods.losses import Penalties, penalty_gradient
from usetta.methods.options import NotNegative
from usetta.methods.stats import cache_per_tensor
from usetta.methods.tune.adamw import PerImage
from usetta.methods.tune.shift import text_features, through_normalize
from usetta.prompts import ClassPrompts


class SpectrumTuner:
    """Coefficients γ (r,) of `images` images for text features (C, D), all zero at first."""

    needs: ClassVar[str] = "text"
    copies: ClassVar[int] = 6

    def __init__(
        self,
        text: ClassPrompts | Tensor,
        images: int,
        *,
        lr: float,
        weight_decay: float,
        penalty: NotNegative = 0.0,
    ) -> None:
        self._text = text_features(text)
        self._basis = main_directions(self._text)
        self._penalty = penalty
        self._coefficients = PerImage([torch.zeros_like(self._basis[0])], images, lr=lr, weight_decay=weight_decay)

    def step(
        self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None, penalties: Penalties = ()
    ) -> Tensor:
        """New text features (A, C, D) of `images`, from the gradient (A, C, D) with respect to those they have.

        `penalties` on the text features add to it. With `classes` (K,) only those are tuned, and C is K.
        """
        text = self._text if classes is None else self._text[classes]
        gamma = self._coefficients.stacked(images)
        shifted = text + self._shift(gamma)
        grad = grad + penalty_gradient(penalties, normalize(shifted, dim=-1))
        grad = through_normalize(shifted, grad).sum(dim=1) @ self._basis
        grad += self._penalty * normalize(gamma, dim=-1)  # B is orthonormal, so ‖Bγ‖ = ‖γ‖
        self._coefficients.step(images, ([own] for own in grad))
        return normalize(text + self._shift(self._coefficients.stacked(images)), dim=-1)

    def _shift(self, coefficients: Tensor) -> Tensor:
        """Bγ (A, 1, D), for all classes the same."""
        return (coefficients @ self._basis.T)[:, None]


@cache_per_tensor
def main_directions(text: Tensor) -> Tensor:
    """B (D, r): the right singular vectors of `text` (C, D) whose singular values stand out, at least one."""
    # By the host, once for a class list: not every device has double precision, and signs depend on who computes.
    _, values, directions = torch.linalg.svd(text.cpu().double(), full_matrices=False)
    basis: Tensor = directions[: rank(values, text.shape)].T
    return basis.to(text.dtype).contiguous().to(text.device)


def rank(values: Tensor, shape: Sequence[int]) -> int:
    """How many singular `values` of a matrix of that shape exceed Gavish and Donoho's threshold for unknown noise."""
    b = min(shape) / max(shape)
    threshold = (0.56 * b**3 - 0.95 * b**2 + 1.82 * b + 1.43) * values.quantile(0.5)
    return max(1, int((values > threshold).sum()))
