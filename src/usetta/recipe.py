"""A method is a recipe: a frozen choice of settings, run on features of views that were encoded once.

`run` is the only way from features to an answer, for one picture or a batch, so every method is batched and none
touches a picture or the image tower. What a run saw on the way (entropies, chosen views, δ, β) comes back with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from usetta.readout import RESCALINGS, blend, entropy_rank, weak_weight
from usetta.select import confident_strong, entropy

ADAPTIVE = "adaptive"
UNIFORM = "uniform"


@dataclass(frozen=True)
class Recipe:
    """The settings of a method."""

    name: str
    description: str = ""
    beta: float | str = ADAPTIVE
    """The weak view's weight: `adaptive` (SE), `uniform` (1/|S|), or a fixed number in 0..1."""
    gamma: float = 0.4
    """Width of the adaptive β around 1/2."""
    rho: float = 0.1
    """Share of the strong views that is kept."""
    rescaling: str = "linear"
    """How δ becomes β: `linear` (the paper), `root` or `square`."""

    def __post_init__(self) -> None:
        beta_is_fine = self.beta in (ADAPTIVE, UNIFORM) if isinstance(self.beta, str) else 0 <= self.beta <= 1
        if not beta_is_fine:
            raise ValueError(f"beta must be '{ADAPTIVE}', '{UNIFORM}' or a number in 0..1, not {self.beta!r}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in 0..1, not {self.gamma!r}")
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho must be above 0 and at most 1, not {self.rho!r}")
        if self.rescaling not in RESCALINGS:
            raise ValueError(f"rescaling must be one of {', '.join(RESCALINGS)}, not {self.rescaling!r}")

    @property
    def weak_only(self) -> bool:
        """Whether the answer needs no strong view, so that none has to be encoded."""
        return self.beta == 1


@dataclass(frozen=True)
class Result:
    """Answers for a batch of B pictures with N views and C classes, and how they came about."""

    probs: Tensor
    """(B, C): the answer."""
    weak_probs: Tensor
    """(B, C): what the weak view alone says, that is zero-shot CLIP."""
    entropies: Tensor
    """(B, N): entropy of each view's own prediction, the weak view first."""
    view_labels: Tensor
    """(B, N): the class each view would choose by itself."""
    chosen: Tensor
    """(B, k): indices of the strong views that took part, most certain first (k = 0 where none does)."""
    delta: Tensor
    """(B,): entropy rank of the weak view; NaN where there are no strong views."""
    beta: Tensor
    """(B,): weight of the weak view."""


def run(recipe: Recipe, features: Tensor, text: Tensor, logit_scale: float) -> Result:
    """Answers for features (B, N, D) of views, weak view first, and `text` (C, D) of classes, all of unit length."""
    _check(recipe, features, text)
    logits = logit_scale * (features @ text.T)
    entropies = entropy(logits)
    probs = logits.softmax(dim=-1)
    if features.shape[1] == 1:
        chosen = torch.empty(len(features), 0, dtype=torch.long, device=features.device)
        delta, beta = torch.full_like(entropies[:, 0], torch.nan), torch.ones_like(entropies[:, 0])
        answer = probs[:, 0]
    else:
        chosen = confident_strong(entropies, recipe.rho)
        delta = entropy_rank(entropies)
        beta = _weak_weight(recipe, delta, set_size=1 + chosen.shape[1])
        answer = blend(probs, chosen, beta)
    return Result(answer, probs[:, 0], entropies, logits.argmax(dim=-1), chosen, delta, beta)


def _weak_weight(recipe: Recipe, delta: Tensor, set_size: int) -> Tensor:
    if recipe.beta == ADAPTIVE:
        return weak_weight(delta, recipe.gamma, recipe.rescaling)
    return torch.full_like(delta, 1 / set_size if recipe.beta == UNIFORM else float(recipe.beta))


def _check(recipe: Recipe, features: Tensor, text: Tensor) -> None:
    if features.ndim != 3 or text.ndim != 2 or features.shape[2] != text.shape[1]:
        raise ValueError(
            "expected features (pictures, views, dim) and text (classes, dim) of one dim, "
            f"not {tuple(features.shape)} and {tuple(text.shape)}"
        )
    if features.shape[1] == 0 or len(text) == 0:
        raise ValueError("there must be at least one view and one class")
    if features.shape[1] == 1 and not recipe.weak_only:
        raise ValueError(f"method '{recipe.name}' compares views, so it needs at least 2, not 1")
    if not (torch.isfinite(features).all() and torch.isfinite(text).all()):
        raise ValueError("features contain NaN or infinity")
