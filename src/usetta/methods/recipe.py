"""A method is a recipe: a frozen choice on four axes, run on features of views that were encoded once.

    select     which views count?                the most confident · the weak one and the most confident strong ones · all
    tune       what may change?                  nothing · see `tune`
    loss       towards what?                     see `losses`
    read out   how do views become one answer?   see `readout`

`run` is the only way from features to an answer, for one image or a batch, so every method is batched and none
touches an image. One kind of tuning reaches into the image tower, and asks for the hidden states of its last blocks.
What a run saw on the way (entropies, chosen views, δ, β, whether an image was skipped, its answer before tuning) comes
back with it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from usetta.methods.losses import LOSSES, Reward
from usetta.methods.readout import READOUTS, RESCALINGS
from usetta.methods.stats import ADAPTIVE, UNIFORM, tie_duplicate_classes, view_stats
from usetta.methods.tune.lora import Hidden, tune_images
from usetta.methods.tune.steps import TUNERS, tune
from usetta.prompts import ClassPrompts

__all__ = ["LOSSES", "READOUTS", "Hidden", "Recipe", "Result", "Reward", "run"]

_MEMORY = 512 * 2**20
"""Bytes that the tensors of one run may take; a larger batch of images goes through in parts."""


def _choices() -> dict[str, Collection[str]]:
    """What some settings may be, as of now: losses and readouts can be added."""
    return {
        "select": ("confident", "weak+strong", "all"),
        "tune": ("nothing", *TUNERS, "lora"),
        "loss": (*LOSSES, "reward"),
        "label": ("se", "mean"),
        "readout": READOUTS,
        "se_stats": ("pre", "post"),
        "rescaling": RESCALINGS,
    }


@dataclass(frozen=True)
class Recipe:
    """The settings of a method."""

    name: str
    description: str = ""
    select: str = "weak+strong"
    """Views the loss looks at: the weak and the most confident strong ones, `confident`, the most confident, or `all`."""
    tune: str = "nothing"
    """What may change: `nothing`, the context of the `prompt`, a `shift` of each class's text features, their
    `spectrum` (a shift along the main directions, which all classes share), or `lora` weights in the image tower."""
    loss: str = "rce"
    """`mem` (marginal entropy), `rce` (reverse cross-entropy), `pointwise` (mean entropy), `weighted` (the same by
    confidence) or `reward` (CLIP scores of the best classes); unused without tuning."""
    label: str = "se"
    """The pseudo-label of `rce`: the `se` blend, or the `mean` prediction of the views that the loss looks at."""
    dispersion: float = 0.0
    """C-TPT's λ: how much the spread of the text features is worth."""
    penalty: float = 0.0
    """STS's λ: how much a long shift costs. It makes no difference to the first step, which starts from none."""
    steps: int = 1
    lr: float = 5e-3
    weight_decay: float = 0.01
    skip: bool = False
    """Whether an image is left as it is when the weak and the chosen strong views already agree on its class."""
    readout: str = "se"
    """One of `READOUTS`."""
    se_stats: str = "post"
    """Whether chosen views and β of the readout come from before the last step (`pre`) or from after it (`post`)."""
    beta: float | str = ADAPTIVE
    """The weak view's weight in SE: `adaptive`, `uniform` (1/|S|), or a fixed number in 0..1."""
    gamma: float = 0.4
    """Width of the adaptive β around 1/2."""
    rho: float = 0.1
    """Share of the views that is kept."""
    voters: float = 0.3
    """Share of the views that vote, if that is how they are read out."""
    rescaling: str = "linear"
    """How δ becomes β: `linear` (the paper), `root` or `square`."""
    active: int = 0
    """Tune only as many classes, the most probable ones of each image, and let the others move with them. An
    approximation for long class lists, so 0 (all classes) unless chosen."""
    seed: int = 0
    """Of the random half of LoRA's initial weights."""

    def __post_init__(self) -> None:
        for axis, choices in _choices().items():
            if getattr(self, axis) not in choices:
                raise ValueError(f"{axis} must be one of {', '.join(choices)}, not {getattr(self, axis)!r}")
        beta_is_fine = self.beta in (ADAPTIVE, UNIFORM) if isinstance(self.beta, str) else 0 <= self.beta <= 1
        if not beta_is_fine:
            raise ValueError(f"beta must be '{ADAPTIVE}', '{UNIFORM}' or a number in 0..1, not {self.beta!r}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in 0..1, not {self.gamma!r}")
        for share in ("rho", "voters"):
            if not 0 < getattr(self, share) <= 1:
                raise ValueError(f"{share} must be above 0 and at most 1, not {getattr(self, share)!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps!r}")
        for setting in ("lr", "weight_decay", "dispersion", "penalty", "active", "seed"):
            if not getattr(self, setting) >= 0:
                raise ValueError(f"{setting} must not be negative, and is {getattr(self, setting)!r}")
        if self.active and self.dispersion:
            raise ValueError("dispersion moves all classes, so it cannot be tuned on the active ones alone")
        if self.active and self.tune not in ("nothing", "prompt"):
            raise ValueError(f"active spares work of the text tower, and tune={self.tune} asks for none")
        if self.tune == "lora" and self.dispersion:
            raise ValueError("dispersion is about text features, which do not move with tune=lora")
        if not all(
            math.isfinite(getattr(self, setting)) for setting in ("lr", "weight_decay", "dispersion", "penalty")
        ):
            raise ValueError("lr, weight_decay, dispersion and penalty must be finite")
        if self.penalty and self.tune != "spectrum":
            raise ValueError(f"penalty is about the shift of tune=spectrum, and there is none with tune={self.tune}")

    @property
    def tunes(self) -> bool:
        """Whether anything is tuned."""
        return self.tune != "nothing"

    @property
    def needs_prompts(self) -> bool:
        """Whether class prompts are needed, and not only their features."""
        return self.tune == "prompt"

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states of the image tower are needed, and not only features."""
        return self.tune == "lora"

    @property
    def weak_only(self) -> bool:
        """Whether the answer needs no strong view, so that none has to be encoded."""
        return not self.tunes and (self.readout == "weak" or (self.readout == "se" and self.beta == 1))


@dataclass(frozen=True)
class Result:
    """Answers for a batch of B images with N views and C classes, and how they came about."""

    probs: Tensor
    """(B, C): the answer."""
    weak_probs: Tensor
    """(B, C): what the weak view alone says, that is zero-shot CLIP."""
    before: Tensor
    """(B, C): the same readout before anything was tuned; the answer itself where nothing was."""
    skipped: Tensor
    """(B,): whether tuning was left out because the views already agreed."""
    entropies: Tensor
    """(B, N): entropy of each view's own prediction before tuning, the weak view first."""
    view_labels: Tensor
    """(B, N): the class each view would choose by itself before tuning."""
    chosen: Tensor
    """(B, k): indices of the most confident strong views, most confident first (k = 0 where there are none)."""
    delta: Tensor
    """(B,): entropy rank of the weak view; NaN where there are no strong views."""
    beta: Tensor
    """(B,): SE's weight of the weak view."""
    weights: Tensor
    """(B, N): the weight of each view in the answer."""


def run(
    recipe: Recipe,
    features: Tensor,
    text: Tensor | ClassPrompts,
    logit_scale: float,
    *,
    reward: Reward | None = None,
    hidden: Hidden | None = None,
) -> Result:
    """Answers for features (B, N, D) of views, weak view first, all of unit length.

    `text`: the prompts of the classes, or, for recipes that tune no prompt, their features (C, D).
    `reward`: who judges views and classes, for the loss `reward`; otherwise the model judges itself, by `features` and
    `text` as they are given. A learned context in `text` calls for a judge with the words of the hard prompt.
    `hidden`: the last blocks of the image tower and what enters them, for recipes that tune `lora`.
    """
    with torch.inference_mode(False), torch.no_grad():
        classes = _at_least_single(text.features() if isinstance(text, ClassPrompts) else text)
        features = _at_least_single(features)
        _check(recipe, features, text, classes)
        _check_extras(recipe, features, classes, reward, hidden)
        copies = TUNERS[recipe.tune].copies if recipe.tune in TUNERS else 0
        per_image = len(classes) * (4 * features.shape[1] + copies * features.shape[2])
        at_once = max(1, _MEMORY // (per_image * features.element_size()))
        parts = []
        for first in range(0, max(1, len(features)), at_once):
            some = slice(first, first + at_once)
            judge = reward and Reward(reward.features[some], reward.text)
            inside = hidden and Hidden(hidden.blocks, hidden.states[some])
            parts.append(_run(recipe, features[some], text, classes, logit_scale, judge, inside))
        if len(parts) == 1:
            return parts[0]
        return Result(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Result)))


def _run(
    recipe: Recipe,
    features: Tensor,
    text: Tensor | ClassPrompts,
    classes: Tensor,
    logit_scale: float,
    reward: Reward | None,
    hidden: Hidden | None,
) -> Result:
    read_out = READOUTS[recipe.readout]
    first = view_stats(recipe, tie_duplicate_classes(logit_scale * (features @ classes.T), classes))
    before, weights = read_out(recipe, first, first, features)
    last, answer, skipped = first, before, torch.zeros(len(features), dtype=torch.bool, device=features.device)
    if recipe.tunes and len(features):
        if recipe.needs_hidden:
            assert hidden is not None
            last, features, skipped = tune_images(recipe, first, features, classes, logit_scale, hidden, reward)
        else:
            prototypes = text if isinstance(text, ClassPrompts) else classes
            last, skipped = tune(recipe, first, features, prototypes, logit_scale, reward)
        answer, weights = read_out(recipe, first, last, features)
    return Result(
        probs=tie_duplicate_classes(answer, classes),
        weak_probs=tie_duplicate_classes(first.logits[:, 0].softmax(dim=-1), classes),
        before=tie_duplicate_classes(before, classes),
        skipped=skipped,
        entropies=first.entropies,
        view_labels=first.logits.argmax(dim=-1),
        chosen=last.chosen,
        delta=last.delta,
        beta=last.beta,
        weights=weights,
    )


def _at_least_single(features: Tensor) -> Tensor:
    """Features in single precision or better: entropies and optimisers are not worth much in half."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _check(recipe: Recipe, features: Tensor, text: Tensor | ClassPrompts, classes: Tensor) -> None:
    if features.ndim != 3 or classes.ndim != 2 or features.shape[2] != classes.shape[1]:
        raise ValueError(
            "expected features (images, views, dim) and text (classes, dim) of one dim, "
            f"not {tuple(features.shape)} and {tuple(classes.shape)}"
        )
    if features.shape[1] == 0 or len(classes) == 0:
        raise ValueError("there must be at least one view and one class")
    if features.shape[1] == 1 and not recipe.weak_only:
        raise ValueError(f"method '{recipe.name}' compares views, so it needs at least 2, not 1")
    if recipe.needs_prompts:
        if not isinstance(text, ClassPrompts):
            raise ValueError(f"method '{recipe.name}' tunes the prompt, so it needs ClassPrompts, not their features")
        text.check_tunable()  # here, so that it does not depend on whether an image is skipped
    if not (torch.isfinite(features).all() and torch.isfinite(classes).all()):
        raise ValueError("features contain NaN or infinity")


def _check_extras(
    recipe: Recipe, features: Tensor, classes: Tensor, reward: Reward | None, hidden: Hidden | None
) -> None:
    if reward and (reward.features.shape[:2] != features.shape[:2] or len(reward.text) != len(classes)):
        raise ValueError(
            f"the reward model must have seen the same {tuple(features.shape[:2])} views and {len(classes)} classes, "
            f"not {tuple(reward.features.shape[:2])} and {len(reward.text)}"
        )
    if recipe.needs_hidden and not hidden and len(features):
        raise ValueError(
            f"method '{recipe.name}' tunes the image tower, so it needs the hidden states of its last blocks: "
            "Hidden(model.last_blocks(), [model.hidden_states(pixels), ...])"
        )
    if recipe.needs_hidden and hidden and len(hidden.states) != len(features):
        raise ValueError(f"there are hidden states of {len(hidden.states)} images and features of {len(features)}")
