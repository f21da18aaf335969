"""A method is a recipe: a frozen choice on five axes, run on features of views that were encoded once.

    select     which views does the loss see?    see `select`
    tune       what may change?                  nothing, or see `tune`
    loss       towards what?                     see `losses`
    readout    how do views become one answer?   see `readout`
    memory     what is kept for later images?    nothing, or see `memory`

The choices of an axis are names in its registry. A choice may declare options (see `options`), which become settings of
the recipes that make it, so a recipe holds what all methods have in common and the options of its own choices alone.

`run` is the only way from features to an answer, for one image or a batch, so every method is batched and none
touches an image. (Methods with a memory go through `streams.run_stream`, which calls it.) It also returns what the
answer was based on: entropies, chosen views, δ, β, whether an image was skipped, its answer before tuning.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, get_args

import torch
from torch import Tensor

from usetta.methods.losses import LOSSES, Reward, takes_rewards
from usetta.methods.memory import MEMORIES, Memory
from usetta.methods.options import Option, Value, options_of, parse_value
from usetta.methods.readout import READOUTS, RESCALINGS, mean_of_views
from usetta.methods.select import SELECTIONS
from usetta.methods.stats import ADAPTIVE, UNIFORM, tie_duplicate_classes, view_stats
from usetta.methods.tune import TUNERS, Hidden, tune
from usetta.prompts import ClassPrompts
from usetta.registry import Registry, suggest

__all__ = ["LOSSES", "MEMORIES", "READOUTS", "SELECTIONS", "TUNERS", "Hidden", "Recipe", "Result", "Reward", "run"]

_MEMORY = 512 * 2**20
"""Bytes that the tensors of one run may take; a larger batch of images goes through in parts."""

NOTHING = "nothing"

_AXES: dict[str, Registry[Any]] = {
    "select": SELECTIONS,
    "tune": TUNERS,
    "loss": LOSSES,
    "readout": READOUTS,
    "memory": MEMORIES,
}


@dataclass(frozen=True)
class Recipe:
    """The settings of a method."""

    name: str
    description: str = ""
    select: str = "weak+strong"
    """Views that the loss sees: the weak and the most confident strong ones (`weak+strong`), the most confident of all
    (`confident`), or `all`."""
    tune: str = NOTHING
    """What may change: `nothing`, the context of the `prompt`, a `shift` of each class's text features, their
    `spectrum` (a shift along the main directions, which all classes share), or `lora` weights in the image tower."""
    loss: str = "rce"
    """`mem` (marginal entropy), `rce` (reverse cross-entropy), `pointwise` (mean entropy), `weighted` (the same by
    confidence) or `reward` (CLIP scores of the best classes); unused without tuning."""
    label: str = "se"
    """The pseudo-label of `rce`: the `se` blend, or the `mean` prediction of the views that the loss sees."""
    dispersion: float = 0.0
    """C-TPT's λ: how much the spread of the text features is worth."""
    steps: int = 1
    lr: float = 5e-3
    weight_decay: float = 0.01
    skip: bool = False
    """Whether an image is left as it is when the weak and the chosen strong views already agree on its class."""
    readout: str = "se"
    """How views become one answer: a name in `READOUTS`."""
    se_stats: str = "post"
    """Whether the readout takes chosen views and β from before the last step (`pre`) or from after it (`post`)."""
    beta: float | str = ADAPTIVE
    """The weak view's weight in SE: `adaptive`, `uniform` (1/|S|), or a fixed number in 0..1."""
    gamma: float = 0.4
    """Width of the adaptive β around 1/2."""
    rho: float = 0.1
    """Share of the views that is kept."""
    rescaling: str = "linear"
    """How δ becomes β: `linear` (the paper), `root` or `square`."""
    active: int = 0
    """Tune only this many classes, the most probable ones of each image, and let the others move with them. An
    approximation for long class lists, so 0 (all classes) unless chosen."""
    orthogonality: float = 0.0
    """O-TPT's λ: how much it is worth that the text features are orthogonal."""
    memory: str = NOTHING
    """What is kept from image to image: `nothing`, or a name in `MEMORIES`."""
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)
    """Options of the selection rule, tuner, loss, readout and memory; those not given have their defaults."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_combinations()
        declared = self._declared_options({})
        for name in self.options:
            if name not in declared:
                raise ValueError(_refusal(self, name, declared))
        # All options, so that equal recipes are equal and the record of a run is complete.
        complete = {name: option.check(self.options.get(name, option.default)) for name, option in declared.items()}
        object.__setattr__(self, "options", complete)

    def _check_choices(self) -> None:
        if self.tunes and self.tune not in TUNERS:
            raise ValueError(f"unknown tuner {self.tune!r}; {suggest(self.tune, [NOTHING, *TUNERS])}")
        if self.remembers and self.memory not in MEMORIES:
            raise ValueError(f"unknown memory {self.memory!r}; {suggest(self.memory, [NOTHING, *MEMORIES])}")
        SELECTIONS.get(self.select)
        LOSSES.get(self.loss)
        READOUTS.get(self.readout)
        RESCALINGS.get(self.rescaling)
        for setting, choices in (("label", ("se", "mean")), ("se_stats", ("pre", "post"))):
            if getattr(self, setting) not in choices:
                raise ValueError(f"{setting} must be one of {', '.join(choices)}, not {getattr(self, setting)!r}")

    def _check_numbers(self) -> None:
        beta_is_valid = self.beta in (ADAPTIVE, UNIFORM) if isinstance(self.beta, str) else 0 <= self.beta <= 1
        if not beta_is_valid:
            raise ValueError(f"beta must be '{ADAPTIVE}', '{UNIFORM}' or a number from 0 to 1, not {self.beta!r}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be a number from 0 to 1, not {self.gamma!r}")
        if not 0 < self.rho <= 1:
            raise ValueError(f"rho must be above 0 and at most 1, not {self.rho!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, not {self.steps!r}")
        for setting in ("lr", "weight_decay", "dispersion", "orthogonality", "active"):
            if not getattr(self, setting) >= 0:
                raise ValueError(f"{setting} must not be negative, got {getattr(self, setting)!r}")
        finite = ("lr", "weight_decay", "dispersion", "orthogonality")
        if not all(math.isfinite(getattr(self, setting)) for setting in finite):
            raise ValueError("lr, weight_decay, dispersion and orthogonality must be finite")

    def _check_combinations(self) -> None:
        for setting in ("dispersion", "orthogonality"):
            # At the initial prompt its gradient is a constant of the class list, later it takes all of the texts.
            if self.active and getattr(self, setting) and not (self.needs_prompts and self.steps == 1):
                raise ValueError(f"{setting} changes all classes, so active takes it in one step of the prompt only")
            if self.needs_hidden and getattr(self, setting):
                raise ValueError(f"{setting} needs text features that are tuned, which tune={self.tune} does not do")
        if self.active and self.tunes and not self.needs_prompts:
            raise ValueError(f"active saves work in the text encoder, which tune={self.tune} does not use")
        if self.sees_views and (self.tunes or self.readout != "weak"):
            raise ValueError(
                f"memory={self.memory} chooses among the views itself, so it takes no readout and no tuning"
            )

    @property
    def tunes(self) -> bool:
        """Whether anything is tuned."""
        return self.tune != NOTHING

    @property
    def remembers(self) -> bool:
        """Whether an answer depends on earlier images, so that images are a stream."""
        return self.memory != NOTHING

    @property
    def sees_views(self) -> bool:
        """Whether the memory chooses among the views, of which there may be any number."""
        return self.remembers and MEMORIES[self.memory].sees == "views"

    @cached_property
    def episodic(self) -> "Recipe":
        """The recipe without its memory, by the same name."""
        return replace(self.with_settings({"memory": NOTHING}), name=self.name)

    @property
    def needs_prompts(self) -> bool:
        """Whether class prompts are needed, and not only their features."""
        return self.tunes and TUNERS[self.tune].needs == "prompts"

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states of the image tower are needed, and not only features."""
        return self.tunes and TUNERS[self.tune].needs == "hidden"

    @property
    def needs_reward(self) -> bool:
        """Whether views and classes are scored by a reward model, which may be the model itself."""
        return self.tunes and takes_rewards(LOSSES[self.loss])

    @property
    def weak_only(self) -> bool:
        """Whether the answer needs no strong view, so that none has to be encoded."""
        weak = self.readout == "weak" or (self.readout == "se" and self.beta == 1)
        return weak and not self.tunes and not self.sees_views

    @property
    def compares_views(self) -> bool:
        """Whether one view is too few."""
        return not self.weak_only and not self.sees_views

    @property
    def settings(self) -> dict[str, Value]:
        """All settings by name, options last."""
        return {name: getattr(self, name) for name in _KINDS} | dict(self.options)

    def record(self) -> dict[str, Any]:
        """What a run writes down about the recipe. Choices that there were not always are left out where none is made,
        so that runs of older versions can be continued.
        """
        new: dict[str, Value] = {"memory": NOTHING, "orthogonality": 0.0}
        known = {name: value for name, value in asdict(self).items() if name != "description"}
        return {name: value for name, value in known.items() if name not in new or value != new[name]}

    def part(self, axis: str) -> Callable[..., Any]:
        """The selection rule (`select`), tuner class (`tune`), loss, readout or memory, with its options filled in."""
        choice = _function(_AXES[axis][getattr(self, axis)])
        return partial(choice, **{name: self.options[name] for name in options_of(choice)})

    def with_settings(self, settings: Mapping[str, Any]) -> "Recipe":
        """The recipe with other settings, named after those that differ from its own (`use:steps=4`).

        Options of a choice that the recipe no longer makes are dropped.
        """
        plain = {name: value for name, value in settings.items() if name in _KINDS}
        own, declared = self._declared_options({}), self._declared_options(plain)
        options = {name: value for name, value in self.options.items() if declared.get(name) == own[name]}
        before = {name: option.default for name, option in declared.items()} | self.settings
        options |= {name: value for name, value in settings.items() if name not in _KINDS}
        other = replace(self, **plain, options=options)
        suffix = "".join(f":{name}={value}".lower() for name, value in other.settings.items() if value != before[name])
        return replace(other, name=self.name + suffix)

    def parse(self, assignments: Mapping[str, str]) -> dict[str, Any]:
        """Settings for `with_settings` from the texts of their values: `{"steps": "4"}` as `{"steps": 4}`."""
        declared = self._declared_options(assignments)
        parsed: dict[str, Any] = dict(assignments)
        for name, text in assignments.items():
            if name in _KINDS:
                parsed[name] = parse_value(name, text, _KINDS[name])
            elif name in declared:
                parsed[name] = declared[name].parse(text)
        return parsed

    def _declared_options(self, changes: Mapping[str, Any]) -> dict[str, Option]:
        """The options of the recipe's choices, some of which change, by name.

        Where nothing is tuned these are the readout's and the memory's: selection rule and loss have no effect.
        """
        choices = {axis: changes.get(axis, getattr(self, axis)) for axis in _AXES}
        declared: dict[str, Option] = {}
        for axis, choice in choices.items():
            counts = axis in _ALWAYS or choices["tune"] != NOTHING
            part = _AXES[axis].find(choice) if counts else None
            for name, option in options_of(_function(part)).items() if part else ():
                if name in _KINDS or name in declared:
                    raise ValueError(f"{axis} '{choice}' has an option {name!r}, but a setting has that name already")
                declared[name] = option
        return declared


_ALWAYS = ("readout", "memory")
"""Axes that count also where nothing is tuned."""


def _function(part: Any) -> Callable[..., Any]:
    """What declares the options of a choice."""
    function: Callable[..., Any] = part.step if isinstance(part, Memory) else part
    return function


_KINDS: dict[str, tuple[type, ...]] = {
    entry.name: get_args(entry.type) or (entry.type,)
    for entry in fields(Recipe)
    if entry.name not in ("name", "description", "options")
}
"""Settings that every recipe has, with the types that their values may have."""


def _refusal(recipe: Recipe, name: str, declared: Mapping[str, Option]) -> str:
    """Why a recipe has no option of that name."""
    for axis, registry in _AXES.items():
        for choice, part in registry.items():
            if name in options_of(_function(part)):
                has = f"{axis}={getattr(recipe, axis)}" if recipe.tunes or axis in _ALWAYS else "tune=nothing"
                return f"the setting {name!r} belongs to {axis}={choice}, and '{recipe.name}' has {has}"
    return f"there is no setting {name!r}; {suggest(name, [*_KINDS, *declared])}"


@dataclass(frozen=True)
class Result:
    """Answers for a batch of B images with N views and C classes, and what they are based on."""

    probs: Tensor
    """(B, C): the answer."""
    weak_probs: Tensor
    """(B, C): the weak view's own prediction, that is zero-shot CLIP's."""
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
    energy: Tensor
    """(B,): logsumexp of the logits behind the answer, where views count by their weights: high for classes that the
    model knows. NaN where a method computes probabilities without logits."""


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
    `reward`: what a reward model makes of views and classes, for the loss `reward`; without it the model rewards
    itself, by `features` and `text` as they are given. If `text` has a learned context, give the features of the hard
    prompt here.
    `hidden`: the last blocks of the image tower and their input, for recipes that tune `lora`.
    """
    with torch.inference_mode(False), torch.no_grad():
        classes = _at_least_single(text.features() if isinstance(text, ClassPrompts) else text)
        features = _at_least_single(features)
        _check(recipe, features, text, classes)
        _check_extras(recipe, features, classes, reward, hidden)
        copies = TUNERS[recipe.tune].copies if recipe.tunes else 0
        per_image = len(classes) * (4 * features.shape[1] + copies * features.shape[2])
        at_once = max(1, _MEMORY // (per_image * features.element_size()))
        parts = []
        for first in range(0, max(1, len(features)), at_once):
            images = slice(first, first + at_once)
            part_reward = reward and Reward(reward.features[images], reward.text)
            part_hidden = hidden and Hidden(hidden.blocks, hidden.states[images])
            parts.append(_run(recipe, features[images], text, classes, logit_scale, part_reward, part_hidden))
        if len(parts) == 1:
            return parts[0]
        return Result(*(torch.cat([getattr(part, entry.name) for part in parts]) for entry in fields(Result)))


def _run(
    recipe: Recipe,
    features: Tensor,
    text: Tensor | ClassPrompts,
    classes: Tensor,
    logit_scale: float,
    reward: Reward | None,
    hidden: Hidden | None,
) -> Result:
    read_out = recipe.part("readout")
    first = view_stats(recipe, tie_duplicate_classes(logit_scale * (features @ classes.T), classes))
    before, weights = read_out(recipe, first, first, features)
    last, answer, skipped = first, before, torch.zeros(len(features), dtype=torch.bool, device=features.device)
    if recipe.tunes and len(features):
        tunable = text if recipe.needs_prompts else classes
        try:
            last, features, skipped = tune(recipe, first, features, tunable, logit_scale, reward=reward, hidden=hidden)
        except OverflowError as error:
            raise diverged(recipe) from error
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
        energy=mean_of_views(last.logits, weights).logsumexp(dim=-1),
    )


def diverged(recipe: Recipe) -> ValueError:
    """The error for a result that is no number."""
    return ValueError(f"method '{recipe.name}' diverged (NaN): lower its lr or its steps")


def _at_least_single(features: Tensor) -> Tensor:
    """Features in single precision or better: half is too coarse for entropies and optimisers."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _check(recipe: Recipe, features: Tensor, text: Tensor | ClassPrompts, classes: Tensor) -> None:
    if features.ndim != 3 or classes.ndim != 2 or features.shape[2] != classes.shape[1]:
        raise ValueError(
            "expected features (images, views, dim) and text (classes, dim) of one dim, "
            f"not {tuple(features.shape)} and {tuple(classes.shape)}"
        )
    if features.shape[1] == 0 or len(classes) == 0:
        raise ValueError("there must be at least one view and one class")
    if recipe.remembers:
        raise ValueError(f"method '{recipe.name}' has a memory, so it needs `run_stream`")
    if features.shape[1] == 1 and recipe.compares_views:
        raise ValueError(f"method '{recipe.name}' compares views, so it needs at least 2, not 1")
    if recipe.needs_prompts:
        if not isinstance(text, ClassPrompts):
            raise ValueError(f"method '{recipe.name}' tunes the prompt, so it needs ClassPrompts, not their features")
        text.check_tunable()  # already here, because an image that is skipped would not reach the tuner
    # Elsewhere the host would have to wait; `episode.answer` looks at what it reads anyway.
    if features.device.type == "cpu" and not (torch.isfinite(features).all() and torch.isfinite(classes).all()):
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
            f"method '{recipe.name}' tunes the image encoder, so it needs the hidden states of its last blocks: "
            "Hidden(model.last_blocks(), [model.hidden_states(pixels), ...])"
        )
    if recipe.needs_hidden and hidden and len(hidden.states) != len(features):
        raise ValueError(f"there are hidden states of {len(hidden.states)} images and features of {len(features)}")
