"""Fewer views where fewer are enough. Beyond the paper; benchmarks use all views unless asked otherwise.

Views are encoded in stages: the weak view alone, then eight more at a time. After each stage the question is whether
the views still to come would change the answer of self-ensembling. They are not known, but what they may be is: drawn
from the views seen so far, again and again, they complete the image to 64 views, and each completion has an answer and
a lead over the next class. An image is settled if the mean lead is larger than twice its standard deviation by a
margin, which shrinks as more views are seen, because the views seen so far are few to draw from:

    mean − 2·deviation  >  caution · (1/√n − 1/√64)

There is nothing to draw from at the weak view alone; there a lead of 0.3 · caution is enough. How large `caution` has
to be was measured, see docs/performance.md. It follows from the share of answers that may change, the only setting.
"""

import math
import re
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from usetta.methods import get
from usetta.methods.readout import entropy_rank, weak_weight
from usetta.methods.recipe import Recipe
from usetta.methods.select import entropy, keep_count, most_confident

ADAPTIVE = "adaptive"
STAGES = (1, 8, 16, 24, 32, 40, 48, 56, 64)
ACCEPTED = 0.5
"""Answers in a hundred that may be others than with all views, unless asked otherwise."""
_RANGE = 0.2, 5.0
"""What may be asked for; beyond that nothing was measured."""
_COMPLETIONS = 64
_RIVALS = 5

Views = int | str
"""How many views of an image are made, the weak one included; or `adaptive`, or `adaptive:1%`: as many as it takes."""

_SE = get("se")


def accepted_changes(views: Views) -> float | None:
    """Answers in a hundred that adaptive views may change; None for a number of views."""
    if not isinstance(views, str):
        return None
    if views == ADAPTIVE:
        return ACCEPTED
    stated = re.fullmatch(rf"{ADAPTIVE}:(\d+(?:\.\d+)?)%", views)
    if not stated or not _RANGE[0] <= float(stated[1]) <= _RANGE[1]:
        raise ValueError(
            f"views must be a number, '{ADAPTIVE}', or '{ADAPTIVE}:1%' with the share of answers that may change, "
            f"from {_RANGE[0]:g}% to {_RANGE[1]:g}%, not {views!r}"
        )
    return float(stated[1])


def most_views(views: Views) -> int:
    """The number of views at most."""
    return views if accepted_changes(views) is None else STAGES[-1]  # type: ignore[return-value]


def stages(most: int = STAGES[-1]) -> list[range]:
    """The numbers of the views that each stage adds, up to `most` views."""
    ends = [0, *(stage for stage in STAGES if stage < most), most]
    return [range(first, last) for first, last in pairwise(ends)]


def least_views(*recipes: Recipe) -> int:
    """Views that an adaptive image has at least: one where SE answers, or decides that nothing is tuned; else eight."""
    by_se = all(r.weak_only or (r.readout == _SE.readout and r.skip >= r.tunes and not r.remembers) for r in recipes)
    return STAGES[0] if by_se else STAGES[1]


def is_settled(
    features: Tensor,
    text: Tensor,
    logit_scale: float,
    *,
    most: int = STAGES[-1],
    least: int = STAGES[0],
    accepted: float = ACCEPTED,
) -> bool:
    """Whether the views after those with features (n, D), the weak one first, would hardly change the answer."""
    seen = len(features)
    if seen < least:
        return False
    logits = logit_scale * (features @ text.T)
    probs = logits.softmax(dim=-1)
    caution = 1.2 - 0.39 * math.log(accepted)
    if seen == 1:
        best, *others = probs[0].topk(min(2, len(text))).values.tolist()
        return bool(best - max(others, default=0.0) > 0.3 * caution)
    # A class that leads anywhere is among the first of some view.
    rivals = torch.unique(probs.topk(min(_RIVALS, len(text))).indices)
    entropies, blended = entropy(logits), probs[:, rivals]
    here = _blend(entropies[None], blended, torch.arange(seen)[None])[0]
    answer = int(here.argmax())
    numbers = _completions(seen, most)
    there = _blend(entropies[numbers], blended, numbers)
    leads = there[:, answer].clone()
    there[:, answer] = 0
    leads -= there.max(dim=1).values
    doubt = 2 * float(leads.std()) + caution * (seen**-0.5 - most**-0.5)
    return bool(float(leads.mean()) > doubt)


def _blend(entropies: Tensor, probs: Tensor, numbers: Tensor) -> Tensor:
    """SE's probabilities (B, C) of B images, made of the views `numbers` (B, N) with `probs`, and these entropies."""
    strong = entropies[:, 1:]
    chosen = 1 + most_confident(strong, keep_count(strong.shape[1], _SE.rho))
    beta = weak_weight(entropy_rank(entropies), _SE.gamma, _SE.rescaling)[:, None]
    return beta * probs[0] + (1 - beta) * probs[numbers.gather(1, chosen)].mean(dim=1)


@lru_cache(maxsize=64)
def _completions(seen: int, most: int) -> Tensor:
    """Numbers (64, most) of views: those seen, then others drawn from the strong ones among them."""
    words = np.random.Philox(key=seen).random_raw(_COMPLETIONS * (most - seen)) % (seen - 1)
    drawn = torch.from_numpy(1 + words.astype(np.int64)).view(_COMPLETIONS, most - seen)
    return torch.cat([torch.arange(seen).expand(_COMPLETIONS, seen), drawn], dim=1)
