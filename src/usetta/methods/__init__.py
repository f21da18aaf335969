"""The named recipes, and a grammar for the rest of the grid.

    use                    a named recipe
    tpt+se                 its adaptation with another readout
    use:steps=4:gamma=0.2  with settings of your own

So every row of the paper's tables has a name: the methods have their own, the ablation is `clip`, `uniform`, `se`,
`mem`, `mem+uniform`, `mem+se`, `rce`, `rce+uniform`, `rce+se` (which is `use`), the plug-ins are `tpt+se`, `c-tpt+se`,
`r-tpt+se`, `sts+se`, and marginal entropy against reverse cross-entropy is `tpt` against `tpt-rce`. A method that tunes
nothing is nothing but its readout, so `+` goes with `clip` there: `clip+vote` is `zero`, and `zero+se` is an error.

A recipe of one's own joins by `register`; a loss or a readout of its own is an entry of `losses.LOSSES` or
`readout.READOUTS` first.
"""

import difflib
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from usetta.methods.recipe import READOUTS, Recipe

_TPT = Recipe(
    "tpt",
    "tunes the prompt until the most confident views agree (marginal entropy); answers from the weak view",
    select="confident",
    tune="prompt",
    loss="mem",
    readout="weak",
)
_USE = Recipe(
    "use",
    "tunes the prompt towards SE's answer (reverse cross-entropy) where the views disagree; answers by SE",
    tune="prompt",
    loss="rce",
    skip=True,
    se_stats="pre",
)
_METHODS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("clip", "zero-shot CLIP: the weak view alone", readout="weak"),
        Recipe("strong", "the mean of the most confident strong views, without the weak one", readout="strong"),
        Recipe("average", "half the weak view, half the most confident strong views", readout="average"),
        Recipe("uniform", "the plain mean of the weak view and the most confident strong views", readout="uniform"),
        Recipe("se", "self-ensembling: the weak view counts more where it is more confident than others"),
        Recipe("mta", "mean shift: the mode of all views' features, robust against odd ones", readout="mode"),
        Recipe("zero", "the majority vote of the 30 % most confident views", readout="vote"),
        _TPT,
        replace(
            _TPT,
            name="tpt-rce",
            description="TPT by reverse cross-entropy to the views' own mean: the same gradient, another formula",
            loss="rce",
            label="mean",
        ),
        replace(
            _TPT,
            name="c-tpt",
            description="TPT that also spreads the text features, for better calibration",
            dispersion=50.0,
        ),
        replace(
            _TPT,
            name="r-tpt",
            description="tunes every confident view by itself (pointwise entropy); weighs all views by their neighbours",
            loss="pointwise",
            readout="reliability",
        ),
        replace(
            _TPT,
            name="rlcf",
            description="tunes the prompt in three steps by rewards, CLIP scores of each confident view's best classes; "
            "answers from the weak view",
            loss="reward",
            steps=3,
            lr=7e-3,
            weight_decay=5e-4,
        ),
        replace(
            _TPT,
            name="ttl",
            description="tunes the image tower (low-rank) until every view is confident; answers from the weak view",
            select="all",
            tune="lora",
            loss="weighted",
        ),
        replace(
            _TPT,
            name="tps",
            description="tunes a shift of each class's text features (marginal entropy); answers from the weak view",
            tune="shift",
            lr=1e-3,
        ),
        replace(
            _TPT,
            name="sts",
            description="tunes a shift that all classes share, along the main directions of the text features; "
            "answers by the mean of the most confident views",
            tune="spectrum",
            readout="selected",
        ),
        replace(_USE, name="rce", description="USE's tuning (ablation); answers from the weak view", readout="weak"),
        _USE,
    )
}
_ALIASES = {"mem": "tpt", "zero-shot": "clip"}


@dataclass(frozen=True)
class Family:
    """What the paper's experiments do alike on a family of datasets, and differently on the others."""

    augmix: bool
    """Whether strong views are made with AugMix, and not only cropped and flipped."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of methods, by name, where the family decides them."""


FAMILIES: dict[str, Family] = {
    "imagenet": Family(augmix=False, settings={"c-tpt": {"dispersion": 20.0}, "tps": {"lr": 5e-3}}),
    "fine-grained": Family(augmix=True, settings={"c-tpt": {"dispersion": 50.0}, "tps": {"lr": 1e-3}}),
    "other": Family(augmix=False, settings={"c-tpt": {"dispersion": 50.0}, "tps": {"lr": 1e-3}}),
}
"""ImageNet and its four variants, the paper's ten other sets, and images of one's own."""


_SETTINGS: dict[str, Any] = {
    each.name: each.type for each in fields(Recipe) if each.name not in ("name", "description")
}


def names() -> list[str]:
    """Names of the methods that have one of their own."""
    return list(_METHODS)


def register(recipe: Recipe) -> None:
    """Give a recipe of your own a place among the named ones, for the rest of this process."""
    if recipe.name in _METHODS or recipe.name in _ALIASES:
        raise ValueError(f"there is a method {recipe.name!r} already")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", recipe.name):
        raise ValueError(
            f"a method's name has small letters and digits, with '.', '_' or '-' between them, unlike {recipe.name!r}"
        )
    _METHODS[recipe.name] = recipe


def get(method: str | Recipe, *, family: str = "other", **settings: Any) -> Recipe:
    """The recipe of that name, with `settings` in place of its own; a recipe is taken as it is.

    The result's name says all that makes it differ from a named recipe, so that two rows of a table never share one.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family of datasets {family!r}; known are {', '.join(FAMILIES)}")
    if isinstance(method, Recipe):
        return _with(method, settings) if settings else method
    head, *assignments = method.strip().lower().split(":")
    head, plus, readout = head.partition("+")
    recipe = _find(_ALIASES.get(head, head))
    recipe = replace(recipe, **FAMILIES[family].settings.get(recipe.name, {}))
    if plus:
        recipe = _read_out_by(recipe, readout)
    return _with(recipe, dict(map(_assignment, assignments)) | settings)


def _read_out_by(recipe: Recipe, readout: str) -> Recipe:
    if readout not in READOUTS:
        raise ValueError(f"unknown readout {readout!r}{_did_you_mean(readout, READOUTS)}")
    other = replace(recipe, readout=readout)
    if not recipe.tunes and recipe.name != "clip" and other != recipe:
        raise ValueError(
            f"'{recipe.name}' tunes nothing, so it is nothing but its readout; 'clip+{readout}' is that one alone"
        )
    for known in _METHODS.values():
        if replace(other, name=known.name, description=known.description) == known:
            return known
    if other == recipe:
        return recipe
    description = f"{recipe.description.partition(';')[0]}; answers by {readout}"
    return replace(other, name=f"{recipe.name}+{readout}", description=description)


def _with(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    for setting in settings:
        if setting not in _SETTINGS:
            raise ValueError(f"a recipe has no setting {setting!r}{_did_you_mean(setting, _SETTINGS)}")
    changed = {
        name: settings[name] for name in _SETTINGS if settings.get(name, getattr(recipe, name)) != getattr(recipe, name)
    }
    suffix = "".join(f":{name}={value}".lower() for name, value in changed.items())
    return replace(recipe, name=recipe.name + suffix, **changed)


def _assignment(text: str) -> tuple[str, Any]:
    """`gamma=0.2` as a name and a value of the type that the setting has."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a setting is written name=value, not {text!r}")
    declared = _SETTINGS.get(name, str)
    for kind in get_args(declared) or (declared,):
        try:
            return name, {"true": True, "false": False}[value] if kind is bool else kind(value)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{value!r} is no value for the setting {name}")


def _find(name: str) -> Recipe:
    found = _METHODS.get(name)
    if found is None:
        raise ValueError(f"unknown method {name!r}{_did_you_mean(name, [*_METHODS, *_ALIASES])}")
    return found


def _did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(sorted(known))}"
