"""A method is a recipe: a frozen choice on four axes, run on features of views that were encoded once.

    select     which views count?                the most certain of all · the weak one and the most certain strong ones
    tune       what may change?                  nothing · the context of the prompt
    loss       towards what?                     see `losses`
    read out   how do views become one answer?   see `readout`

`run` is the only way from features to an answer, for one picture or a batch, so every method is batched and none
touches a picture or the image tower. What a run saw on the way (entropies, chosen views, δ, β, whether a picture was
skipped, its answer before tuning) comes back with it.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from usetta.look import ADAPTIVE, UNIFORM, Look, look
from usetta.losses import LOSSES
from usetta.prompts import ClassPrompts
from usetta.readout import RESCALINGS, blend_weights, mean_of_views, reliability_weights
from usetta.tune.steps import tune

READOUTS = ("weak", "strong", "average", "uniform", "se", "reliability")
"""Read-outs by name; `average` gives half to the weak view and half to the chosen strong ones."""

_CHOICES = {
    "select": ("confident", "weak+strong"),
    "tune": ("nothing", "prompt"),
    "loss": tuple(LOSSES),
    "label": ("se", "mean"),
    "readout": READOUTS,
    "se_stats": ("pre", "post"),
    "rescaling": tuple(RESCALINGS),
}

_MEMORY = 512 * 2**20
"""Bytes that the tensors of one run may take; a larger batch of pictures goes through in parts."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a method."""

    name: str
    description: str = ""
    select: str = "weak+strong"
    """Views the loss looks at: the weak and the most certain strong ones, or `confident`, the most certain of all."""
    tune: str = "nothing"
    """What may change: `nothing`, or the context of the `prompt`."""
    loss: str = "rce"
    """`mem` (marginal entropy), `rce` (reverse cross-entropy) or `pointwise` (mean entropy); unused without tuning."""
    label: str = "se"
    """The pseudo-label of `rce`: the `se` blend, or the `mean` prediction of the views that the loss looks at."""
    dispersion: float = 0.0
    """C-TPT's λ: how much the spread of the text features is worth."""
    steps: int = 1
    lr: float = 5e-3
    weight_decay: float = 0.01
    skip: bool = False
    """Whether a picture is left as it is when the weak and the chosen strong views already agree on its class."""
    readout: str = "se"
    """One of `READOUTS`."""
    se_stats: str = "post"
    """Whether chosen views and β of the read-out come from before the last step (`pre`) or from after it (`post`)."""
    beta: float | str = ADAPTIVE
    """The weak view's weight in SE: `adaptive`, `uniform` (1/|S|), or a fixed number in 0..1."""
    gamma: float = 0.4
    """Width of the adaptive β around 1/2."""
    rho: float = 0.1
    """Share of the views that is kept."""
    rescaling: str = "linear"
    """How δ becomes β: `linear` (the paper), `root` or `square`."""
    active: int = 0
    """Tune only as many classes, the most probable ones of each picture, and leave the others' share as it was. An
    approximation for long class lists, so 0 (all classes) unless chosen."""

    def __post_init__(self) -> None:
        for axis, choices in _CHOICES.items():
            if getattr(self, axis) not in choices:
                raise ValueError(f"{axis} must be one of {', '.join(choices)}, not {getattr(self, axis)!r}")
        beta_is_fine = self.beta in (ADAPTIVE, UNIFORM) if isinstance(self.beta, str) else 0 <= self.beta <= 1
        if not beta_is_fine:
            raise ValueError(f"beta must be '{ADAPTIVE}', '{UNIFORM}' or a number in 0..1, not {self.beta!r}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in 0..1, not {self.gamma!r}")
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho must be above 0 and at most 1, not {self.rho!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps!r}")
        for setting in ("lr", "weight_decay", "dispersion", "active"):
            if not getattr(self, setting) >= 0:
                raise ValueError(f"{setting} must not be negative, and is {getattr(self, setting)!r}")
        if self.active and self.dispersion:
            raise ValueError("dispersion moves all classes, so it cannot be tuned on the active ones alone")

    @property
    def tunes(self) -> bool:
        """Whether anything is tuned, so that class prompts are needed and not only their features."""
        return self.tune != "nothing"

    @property
    def weak_only(self) -> bool:
        """Whether the answer needs no strong view, so that none has to be encoded."""
        return not self.tunes and (self.readout == "weak" or (self.readout == "se" and self.beta == 1))


@dataclass(frozen=True)
class Result:
    """Answers for a batch of B pictures with N views and C classes, and how they came about."""

    probs: Tensor
    """(B, C): the answer."""
    weak_probs: Tensor
    """(B, C): what the weak view alone says, that is zero-shot CLIP."""
    before: Tensor
    """(B, C): the same read-out before anything was tuned; the answer itself where nothing was."""
    skipped: Tensor
    """(B,): whether tuning was left out because the views already agreed."""
    entropies: Tensor
    """(B, N): entropy of each view's own prediction before tuning, the weak view first."""
    view_labels: Tensor
    """(B, N): the class each view would choose by itself before tuning."""
    chosen: Tensor
    """(B, k): indices of the most certain strong views, most certain first (k = 0 where there are none)."""
    delta: Tensor
    """(B,): entropy rank of the weak view; NaN where there are no strong views."""
    beta: Tensor
    """(B,): SE's weight of the weak view."""
    weights: Tensor
    """(B, N): the weight of each view in the answer."""


def run(recipe: Recipe, features: Tensor, text: Tensor | ClassPrompts, logit_scale: float) -> Result:
    """Answers for features (B, N, D) of views, weak view first, all of unit length.

    `text`: the prompts of the classes, or, for recipes that tune nothing, their features (C, D).
    """
    with torch.inference_mode(False), torch.no_grad():
        classes = text.features() if isinstance(text, ClassPrompts) else text
        _check(recipe, features, text, classes)
        per_picture = len(classes) * (4 * features.shape[1] + (4 * features.shape[2] if recipe.tunes else 0))
        at_once = max(1, _MEMORY // (per_picture * features.element_size()))
        parts = [_run(recipe, some, text, classes, logit_scale) for some in torch.split(features, at_once)]
        if len(parts) == 1:
            return parts[0]
        return Result(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Result)))


def _run(recipe: Recipe, features: Tensor, text: Tensor | ClassPrompts, classes: Tensor, logit_scale: float) -> Result:
    first = look(recipe, logit_scale * (features @ classes.T))
    before, weights = _read_out(recipe, first, features)
    last, answer, skipped = first, before, torch.zeros(len(features), dtype=torch.bool, device=features.device)
    if isinstance(text, ClassPrompts) and recipe.tunes and len(features):
        last, skipped = tune(recipe, first, features, text, logit_scale)
        answer, weights = _read_out(recipe, last, features)
    return Result(
        probs=answer,
        weak_probs=first.logits[:, 0].softmax(dim=-1),
        before=before,
        skipped=skipped,
        entropies=first.entropies,
        view_labels=first.logits.argmax(dim=-1),
        chosen=last.chosen,
        delta=last.delta,
        beta=last.beta,
        weights=weights,
    )


def _read_out(recipe: Recipe, seen: Look, features: Tensor) -> tuple[Tensor, Tensor]:
    """The answer (B, C) and the weight of each view in it (B, N)."""
    if recipe.readout == "reliability":
        weights = reliability_weights(features)
        return mean_of_views(seen.logits, weights).softmax(dim=-1), weights
    fixed = {"weak": 1.0, "strong": 0.0, "average": 0.5, "uniform": 1 / (1 + seen.chosen.shape[1])}
    beta = seen.beta if recipe.readout == "se" else torch.full_like(seen.beta, fixed[recipe.readout])
    weights = blend_weights(beta, seen.chosen, seen.logits.shape[1])
    return mean_of_views(seen.logits.softmax(dim=-1), weights), weights


def _check(recipe: Recipe, features: Tensor, text: Tensor | ClassPrompts, classes: Tensor) -> None:
    if features.ndim != 3 or classes.ndim != 2 or features.shape[2] != classes.shape[1]:
        raise ValueError(
            "expected features (pictures, views, dim) and text (classes, dim) of one dim, "
            f"not {tuple(features.shape)} and {tuple(classes.shape)}"
        )
    if features.shape[1] == 0 or len(classes) == 0:
        raise ValueError("there must be at least one view and one class")
    if features.shape[1] == 1 and not recipe.weak_only:
        raise ValueError(f"method '{recipe.name}' compares views, so it needs at least 2, not 1")
    if recipe.tunes and not isinstance(text, ClassPrompts):
        raise ValueError(f"method '{recipe.name}' tunes the prompt, so it needs ClassPrompts, not their features")
    if not (torch.isfinite(features).all() and torch.isfinite(classes).all()):
        raise ValueError("features contain NaN or infinity")
