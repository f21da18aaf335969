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
    Recipe("vte", "the mean feature of the most confident views", readout="feature"),
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
        name="o-tpt",
        description="TPT that also makes the text features orthogonal, for better calibration",
        orthogonality=18.0,
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


def _stream(name: str, description: str, memory: str | None = None) -> Recipe:
    return Recipe(name, description, readout="weak", memory=memory or name)


STREAM_RECIPES = (
    _stream("tda", "adds the likeness to confident earlier images of each class, and subtracts that to doubtful ones"),
    _stream("dmn-weak", "reads a memory of 50 images for each class by attention; the weak view alone"),
    _stream("dmn", "the same, where the most confident views decide on the class of an image that is remembered"),
    _stream("boostadapter", "TDA whose cache also holds the most confident views of the image itself"),
    _stream("dpe", "prototypes of text and images that evolve together; one step of tuning for each image"),
    _stream("ecalp", "spreads labels over a graph of the classes and all images so far"),
    _stream("onzeta", "balances the labels of the stream, and learns proxies of the classes from them"),
    _stream("dota", "learns a Gaussian for each class from soft labels"),
    _stream("bca", "adapts the mean of each class, and the prior of what is answered"),
)
"""Methods with a memory, for images that come as a stream."""
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
    "imagenet": Family(
        augmix=False,
        settings={
            "c-tpt": {"dispersion": 20.0},
            "o-tpt": {"orthogonality": 2.0},
            "tps": {"lr": 5e-3},
            "onzeta": {"mix": 0.8},
        },
    ),
    "fine-grained": Family(augmix=True, settings={"c-tpt": {"dispersion": 50.0}, "tps": {"lr": 1e-3}}),
    "other": Family(augmix=False, settings={"c-tpt": {"dispersion": 50.0}, "tps": {"lr": 1e-3}}),
}
"""ImageNet and its four variants, the paper's ten other datasets, and images of one's own."""

_PUBLISHED = {
    "imagenet": (2, 5, 1, 6, 6e-4, 0.5, 0.2, 0.005),
    "imagenet-a": (2, 5, 3, 6, 3e-4, 2.5, 0.5, 0.02),
    "imagenet-v2": (1, 8, 1, 3, 5e-4, 0.5, 0.1, 0.01),
    "imagenet-r": (1, 8, 3, 3, 6e-4, 0, 0.3, 0.0025),
    "imagenet-sketch": (2.363, 7.45, 1, 7, 6e-4, 0.2, 0.8, 0.03),
    "caltech101": (5, 5, 2, 15, 6e-4, 0.2, 0.3, 0.02),
    "dtd": (2, 3, 0, 6, 6e-4, 0.2, 0.3, 0.02),
    "eurosat": (4, 8, 0, 3, 5e-5, 0.2, 3, 0.05),
    "aircraft": (2, 2, 2, 6, 6e-4, 0.2, 0.2, 0.01),
    "food101": (1, 1, 3, 3, 2e-4, 0.2, 0.1, 0.01),
    "flowers102": (1, 5, 0, 2.5, 1e-4, 0.2, 0.2, 0.02),
    "pets": (2, 7, 0, 4, 5e-5, 0.2, 0.3, 0.02),
    "cars": (1, 7, 3, 3, 1e-4, 1.5, 0.3, 0.01),
    "sun397": (2, 3, 1, 6, 2e-4, 0.0002, 0.2, 0.01),
    "ucf101": (3, 8, 0, 9, 4e-4, 0.2, 0.4, 0.02),
}
"""By dataset: TDA's α and β, BoostAdapter's δ, DPE's α, learning rate and align, DOTA's η and ρ."""
_DOTA_RIDGE = {"caltech101": 2e-3, "food101": 4e-5}


def published_settings(method: str, dataset: str) -> dict[str, Any]:
    """Settings that the benchmark (for DOTA its authors) chose for one dataset, by looking at its accuracy.

    Methods that have none get none, so that all can be asked for alike.
    """
    if dataset not in _PUBLISHED:
        other = repr(dataset) if dataset else "images of your own"
        raise ValueError(f"values=published are known for {', '.join(_PUBLISHED)}, not for {other}")
    alpha, sharpness, boosted, dpe_alpha, learning_rate, align, weight, rate = _PUBLISHED[dataset]
    by_method: dict[str, dict[str, Any]] = {
        "tda": {"alpha": alpha, "sharpness": sharpness},
        "boostadapter": {"alpha": alpha, "sharpness": sharpness, "boosted": boosted},
        "dpe": {"alpha": dpe_alpha, "sharpness": sharpness, "learning_rate": learning_rate, "align": align},
        "dota": {"weight": weight, "rate": rate, "ridge": _DOTA_RIDGE.get(dataset, 1e-4)},
        "onzeta": {
            "mix": 0.8 if dataset.startswith("imagenet") else 0.4,
            "balance": 0.0 if dataset == "caltech101" else 1.0,
        },
    }
    return by_method.get(method, {})
