"""Fewer views where fewer are enough. Beyond the paper; benchmarks use all views unless asked otherwise.

Views are encoded in growing stages. After each, an image is settled if the weak view and its three most confident
strong views choose the same class (USE's rule for skipping an image), and that class leads in self-ensembling by a
margin. Only images that are not settled go on, the doubtful ones to the end. docs/performance.md measures how many
views that spares, and what it changes.
"""

from itertools import pairwise
from typing import Literal

from torch import Tensor

from usetta.methods import get
from usetta.methods.recipe import run

ADAPTIVE: Literal["adaptive"] = "adaptive"
STAGES = (8, 16, 32, 64)
AGREEING = 3
LEAD = 0.5

Views = int | Literal["adaptive"]
"""How many views of an image are made, the weak one included, or as many as it takes."""

_SE = get("se")


def most_views(views: Views) -> int:
    """The number of views at most."""
    if isinstance(views, str):
        if views != ADAPTIVE:
            raise ValueError(f"views must be a number or '{ADAPTIVE}', not {views!r}")
        return STAGES[-1]
    return views


def stages(most: int = STAGES[-1]) -> list[range]:
    """The numbers of the views that each stage adds, up to `most` views."""
    ends = [0, *(stage for stage in STAGES if stage < most), most]
    return [range(first, last) for first, last in pairwise(ends)]


def is_settled(features: Tensor, text: Tensor, logit_scale: float) -> bool:
    """Whether views with features (n, D), the weak one first, leave no doubt about the class of their image."""
    result = run(_SE, features[None], text, logit_scale)
    labels, ranked = result.view_labels[0], 1 + result.entropies[0, 1:].argsort(stable=True)
    best, *others = result.probs[0].sort(descending=True).values.tolist()
    agrees = bool((labels[ranked[:AGREEING]] == labels[0]).all())
    return agrees and best - max(others, default=0.0) >= LEAD
