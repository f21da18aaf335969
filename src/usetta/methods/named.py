"""The recipes that have a name, and how settings depend on the family of a dataset.

Every row of the paper's tables is one of these, or is written in the grammar of `usetta.methods`: the ablation is
`clip`, `uniform`, `se`, `mem`, `mem+uniform`, `mem+se`, `rce`, `rce+uniform`, `rce+se` (which is `use`), the plug-ins
are `tpt+se`, `c-tpt+se`, `r-tpt+se`, `sts+se`, and marginal entropy against reverse cross-entropy is `tpt` against
`tpt-rce`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from usetta.methods.recipe import Recipe

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
RECIPES = (
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
        description="tunes every confident view by itself (pointwise entropy); weights all views by their neighbours",
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
ALIASES: Mapping[str, tuple[str, ...]] = {"tpt": ("mem",), "clip": ("zero-shot",)}
"""Other names of some of them."""


@dataclass(frozen=True)
class Family:
    """What the paper's experiments have in common on a family of datasets."""

    augmix: bool
    """Whether strong views are made with AugMix, and not only cropped and flipped."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of methods, by name, that the family decides."""


FAMILIES: dict[str, Family] = {
    "imagenet": Family(augmix=False, settings={"c-tpt": {"dispersion": 20.0}, "tps": {"lr": 5e-3}}),
    "fine-grained": Family(augmix=True, settings={"c-tpt": {"dispersion": 50.0}, "tps": {"lr": 1e-3}}),
    "other": Family(augmix=False, settings={"c-tpt": {"dispersion": 50.0}, "tps": {"lr": 1e-3}}),
}
"""ImageNet and its four variants, the paper's ten other datasets, and images of one's own."""
