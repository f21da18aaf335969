"""Prompt tuning by the book: one image, every position of the text tower, autograd through all, PyTorch's AdamW.

Written from the papers' equations. Nothing is shared with `usetta` but the tower itself, nothing is kept from one
image or step to the next, and no formula is guarded against small numbers: in float64 none of them needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usetta.models.base import TextTower


@dataclass(frozen=True)
class How:
    """A method in the words of the papers."""

    loss: str = "none"
    """`none` tunes nothing; `rce` (USE), `mem` (TPT), `rce to the mean` (TPT with RCE), `pointwise` (R-TPT)."""
    confident: bool = False
    """Whether the loss looks at the most confident of all views, chosen once, and not at S, chosen at every step."""
    spread: float = 0.0
    """C-TPT's λ."""
    steps: int = 1
    skip: bool = False
    answer: str = "se"
    """`weak`, `strong`, `average`, `uniform`, `se` or `reliability`."""
    stats: str = "post"
    """Whether S and β of the answer are those from before the last update (`pre`) or those after it."""
    beta: float | str = "adaptive"
    gamma: float = 0.4
    rho: float = 0.1
    power: float = 1.0
    """Of |δ − 1/2|: 1 is linear, 1/2 the root, 2 the square."""
    lr: float = 5e-3
    weight_decay: float = 1e-2


@dataclass(frozen=True)
class Seen:
    """What the views of an image look like."""

    chosen: list[int]
    """The most confident strong views; with the weak view they are S."""
    delta: float
    beta: float


@dataclass(frozen=True)
class Outcome:
    """What came out, and every gradient and context on the way."""

    probs: Tensor
    """(C,)"""
    seen: Seen
    """What the answer was read out by."""
    skipped: bool
    gradients: list[Tensor]
    """(4, W) each, one for every update."""
    contexts: list[Tensor]
    """(4, W) each, after every update."""


@dataclass(frozen=True)
class Prompts:
    """The prompts "a photo of a {name}." of a tower whose texts begin with `start` special tokens."""

    tower: TextTower
    names: Sequence[str]
    start: int = 1

    def words(self) -> Tensor:
        """The embeddings (4, W) of the four words."""
        ids = self.tower.tokenize(["a photo of a"])
        return self.tower.embed(ids)[0, self.start : self.start + 4]

    def features(self, context: Tensor) -> Tensor:
        """Text features (C, D) with `context` (4, W) in place of the words."""
        ids = self.tower.tokenize([f"a photo of a {name.replace('_', ' ')}." for name in self.names])
        rows = [torch.cat([row[: self.start], context, row[self.start + 4 :]]) for row in self.tower.embed(ids)]
        return self.tower.encode(torch.stack(rows), ids)


def adapt(how: How, features: Tensor, prompts: Prompts, scale: float) -> Outcome:
    """The answer for one image with view features (N, D), the weak view first."""
    context = torch.nn.Parameter(prompts.words().clone())
    optimizer = torch.optim.AdamW([context], lr=how.lr, weight_decay=how.weight_decay)
    seen, confident, skipped = None, None, False
    gradients, contexts = [], []
    for step in range(how.steps if how.loss != "none" else 0):
        text = prompts.features(context)
        p = softmax(scale * features @ text.T)
        seen = look(how, p.detach())
        views = [0, *seen.chosen]
        if how.skip and len({prompts.names[int(p[i].argmax())] for i in views}) == 1:
            skipped = step == 0
            break
        if how.confident:
            confident = confident or lowest(entropy(p).tolist(), range(len(p)), how.rho)
            views = confident
        loss = objective(how.loss, p[views], blend(p, seen.beta, seen.chosen).detach())
        if how.spread:
            loss = loss - how.spread * torch.sqrt(((text - text.mean(dim=0)) ** 2).sum(dim=1)).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients.append(context.grad.clone())
        optimizer.step()
        contexts.append(context.detach().clone())
    with torch.no_grad():
        logits = scale * features @ prompts.features(context).T
    if seen is None or how.stats == "post":
        seen = look(how, softmax(logits))
    return Outcome(answer(how.answer, logits, features, seen), seen, skipped, gradients, contexts)


def softmax(logits: Tensor) -> Tensor:
    exponentials = torch.exp(logits)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


def entropy(p: Tensor) -> Tensor:
    return -(p * torch.log(p)).sum(dim=-1)


def lowest(values: Sequence[float], among: Sequence[int], share: float) -> list[int]:
    """Those positions `among` the given ones that have the lowest values: that share of them, and at least one."""
    return sorted(among, key=lambda i: values[i])[: max(1, int(len(among) * share))]


def look(how: How, p: Tensor) -> Seen:
    """S, δ and β from the predictions (N, C) of the views."""
    h = entropy(p).tolist()
    strong = range(1, len(h))
    chosen = lowest(h, strong, how.rho)
    delta = sum(h[i] > h[0] for i in strong) / len(strong)
    if how.beta == "adaptive":
        sign = 1 if delta > 0.5 else -1
        return Seen(chosen, delta, 0.5 + sign * how.gamma * abs(delta - 0.5) ** how.power)
    return Seen(chosen, delta, 1 / (1 + len(chosen)) if how.beta == "uniform" else float(how.beta))


def blend(p: Tensor, beta: float, chosen: list[int]) -> Tensor:
    """Equation 7: β of the weak view, the rest of the mean of the chosen strong ones."""
    return beta * p[0] + (1 - beta) * sum(p[i] for i in chosen) / len(chosen)


def objective(loss: str, p: Tensor, q: Tensor) -> Tensor:
    """The loss of the predictions (k, C) of the views it looks at, with SE's pseudo-label `q` (C,)."""
    mean = p.mean(dim=0)
    losses = {
        "mem": lambda: entropy(mean),
        "rce": lambda: -(mean * torch.log(q)).sum(),
        "rce to the mean": lambda: -(mean * torch.log(mean.detach())).sum(),
        "pointwise": lambda: entropy(p).mean(),
    }
    return losses[loss]()


def answer(rule: str, logits: Tensor, features: Tensor, seen: Seen) -> Tensor:
    """Probabilities (C,) from the logits (N, C) of all views."""
    if rule == "reliability":
        scores = []
        for i in range(len(features)):
            others = sorted((float(features[i] @ features[j]) for j in range(len(features)) if j != i), reverse=True)
            scores.append(sum(others[:20]) / len(others[:20]) / 0.01)
        weights = softmax(torch.tensor(scores, dtype=logits.dtype))
        return softmax((weights[:, None] * logits).sum(dim=0))
    weak_weight = {"weak": 1.0, "strong": 0.0, "average": 0.5, "uniform": 1 / (1 + len(seen.chosen)), "se": seen.beta}
    return blend(softmax(logits), weak_weight[rule], seen.chosen)
