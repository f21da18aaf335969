"""ZERO: the most confident views vote, and only the votes count.

A view's softmax at temperature zero is a vote for its best class; classes with exactly the same logit (two equal names)
share it. If several classes have the most votes, the views that did not vote are asked in the order of their
confidence, and the first whose best class is among the tied ones casts one more vote. If there is none, the first view
asked decides by its logits among the tied classes; if every view has voted already, the most confident one decides.
(The published code answers with class 0 there.) So a tie always adds one vote, and the answer is the class with the
most votes, or the first of two with the same name.
"""

import torch
from torch import Tensor

from usetta.methods.select import keep_count, most_confident


def votes_of_views(logits: Tensor, entropies: Tensor, voters: float) -> tuple[Tensor, Tensor]:
    """Shares of the votes (B, C), and of each view in them (B, N), from logits (B, N, C) and `entropies` (B, N).

    `voters` is the share of the views that vote.
    """
    views = logits.shape[1]
    k = keep_count(views, voters)
    ranked = most_confident(entropies, views)
    voted = torch.zeros_like(entropies).scatter_(1, ranked[:, :k], 1.0)
    votes = _ballots(torch.take_along_dim(logits, ranked[:, :k, None], dim=1)).sum(dim=1)

    # Not ==, because shared votes, such as thirds, do not add up exactly.
    tied = torch.isclose(votes, votes.amax(dim=-1, keepdim=True), rtol=1e-5, atol=0.0)
    is_tie = tied.sum(dim=-1, keepdim=True) > 1
    decider = _decider(logits, tied, ranked[:, k:] if k < views else ranked[:, :1])
    decided = torch.take_along_dim(logits, decider[:, :, None], dim=1)[:, 0].masked_fill(~tied, -torch.inf)
    votes = votes + is_tie * _ballots(decided)
    voted = voted.scatter_add(1, decider, is_tie.to(voted.dtype))
    return votes / votes.sum(dim=-1, keepdim=True), voted / voted.sum(dim=-1, keepdim=True)


def _ballots(logits: Tensor) -> Tensor:
    """The vote (..., C) of views with `logits` (..., C): one, or equal parts of it."""
    best = (logits == logits.amax(dim=-1, keepdim=True)).to(logits.dtype)
    return best / best.sum(dim=-1, keepdim=True)


def _decider(logits: Tensor, tied: Tensor, asked: Tensor) -> Tensor:
    """The first (B, 1) of the views `asked` (B, m) whose best class is `tied` (B, C), or the first if none is."""
    labels = torch.take_along_dim(logits.argmax(dim=-1), asked, dim=1)
    place = tied.gather(1, labels).to(torch.int8).argmax(dim=1, keepdim=True)  # argmax of nothing but zeros is 0
    return asked.gather(1, place)
