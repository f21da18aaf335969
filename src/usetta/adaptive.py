"""Fewer views where fewer are enough. Beyond the paper, and off unless it is asked for.

Views are encoded in growing stages. After each, an image is settled if the weak view and its three most confident strong
views choose the same class (USE's rule for skipping an image), and that class leads in self-ensembling by a margin.
Only the images that are not settled go on, the doubtful ones to the end. How many views that spares, and what it
changes, is measured in docs/performance.md.
"""

from itertools import pairwise

from torch import Tensor

from usetta.methods import get
from usetta.methods.recipe import run

ADAPTIVE = "adaptive"
STAGES = (8, 16, 32, 64)
AGREEING = 3
LEAD = 0.5

_SE = get("se")


def stages(most: int = STAGES[-1]) -> list[range]:
    """The numbers of the views that each stage adds, up to `most` views."""
    ends = [0, *(stage for stage in STAGES if stage < most), most]
    return [range(first, last) for first, last in pairwise(ends)]


def is_settled(features: Tensor, text: Tensor, logit_scale: float) -> bool:
    """Whether the views of an image with features (n, D), the weak one first, leave no doubt about its class."""
    result = run(_SE, features[None], text, logit_scale)
    labels, confident = result.view_labels[0], 1 + result.entropies[0, 1:].argsort(stable=True)[:AGREEING]
    first, *others = result.probs[0].sort(descending=True).values.tolist()
    return bool((labels[confident] == labels[0]).all()) and first - max(others, default=0.0) >= LEAD
