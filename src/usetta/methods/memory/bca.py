"""BCA: class means and class priors that follow the stream.

    f = softmax(s μ x) R        the answer, with R (C × C) the prior of what is answered, given what μ says
    if max f > 0.05:  μ_k ← N((c₁ μ_k + x̄) / (c₁ + 1)),  c₁ += 1        k = argmax f
    if max f > 0.65:  R_k ← (c₂ R_k + f) / (c₂ + 1),      c₂ += 1

An image is answered before it is learned from. It changes a row of μ and of R, so the product with R is made for a
whole batch at once and corrected for the rows that the batch has changed so far.
"""

import torch
from torch import Tensor

from usetta.methods.memory.base import State, Stream, Views, log_probabilities, unit
from usetta.methods.options import NotNegative, Positive
from usetta.methods.select import entropy, keep_count, most_confident

_DRIFT = 5.0
"""Logits may have moved so much since the batch began before an image is computed without shortcuts."""


def bca(
    state: State | None,
    views: Views,
    stream: Stream,
    *,
    text_count: Positive = 20000.0,
    prior_count: Positive = 1.0,
    mean_above: NotNegative = 0.05,
    prior_above: NotNegative = 0.65,
) -> tuple[Tensor, State]:
    """Logarithms (B, C) of probabilities by Zhou et al., CVPR 2025; views are selected under the present means.

    `text_count` and `prior_count` are how many images the text and the initial prior count for.
    """
    images, count, _ = views.features.shape
    classes = len(stream.text)
    state = state or {
        "means": stream.text.clone(),
        "prior": torch.eye(classes, dtype=stream.text.dtype, device=stream.text.device),
        "mean_counts": stream.text.new_full((classes,), text_count),
        "prior_counts": stream.text.new_full((classes,), prior_count),
    }
    means, prior = state["means"], state["prior"]
    logits = stream.logit_scale * (views.features @ means.T)  # (B, N, C), kept up to date with the means
    shortcut = _Shortcut(logits[:, 0].clone(), prior) if count == 1 else None
    answer = torch.empty_like(logits[:, 0])
    for i in range(images):
        chosen = most_confident(entropy(logits[i]), keep_count(count, stream.rho)) if count > 1 else slice(None)
        mean_logits = logits[i, chosen].mean(dim=0)
        probs = mean_logits.softmax(dim=0)
        f = shortcut.product(i, mean_logits, probs) if shortcut else None
        f = probs @ prior if f is None else f
        answer[i] = f
        top, best = f.max(dim=0)
        k, confidence = int(best), float(top)
        if shortcut and confidence > min(mean_above, prior_above):
            shortcut.will_change(k)
        if confidence > mean_above:
            learned = views.features[i, chosen].mean(dim=0)
            weight = state["mean_counts"][k]
            means[k] = unit((weight * means[k] + learned) / (weight + 1))
            state["mean_counts"][k] += 1
            logits[i + 1 :, :, k] = stream.logit_scale * (views.features[i + 1 :] @ means[k])
        if confidence > prior_above:
            weight = state["prior_counts"][k]
            prior[k] = (weight * prior[k] + f) / (weight + 1)
            state["prior_counts"][k] += 1
            if shortcut:
                shortcut.has_changed(k)
    return log_probabilities(answer), state


class _Shortcut:
    """Products of probabilities with the prior, from those at the start of a batch.

    All classes but the changed ones have kept their logits, so their part of the product only has to be scaled.
    """

    def __init__(self, logits: Tensor, prior: Tensor) -> None:
        self._prior = prior
        self._start = logits.softmax(dim=-1)
        self._level = logits.logsumexp(dim=-1)
        self._products = self._start @ prior
        # Rows of the prior of classes that have changed, at the start of the batch and now.
        self._old_rows, self._new_rows = torch.empty_like(logits), torch.empty_like(logits)
        self._classes = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        self._changed: dict[int, int] = {}

    def will_change(self, label: int) -> None:
        """Note that mean or prior of a class are about to change."""
        if label not in self._changed:
            place = self._changed[label] = len(self._changed)
            self._old_rows[place] = self._new_rows[place] = self._prior[label]
            self._classes[place] = label

    def has_changed(self, label: int) -> None:
        """Take the present prior of a class."""
        self._new_rows[self._changed[label]] = self._prior[label]

    def product(self, image: int, logits: Tensor, probs: Tensor) -> Tensor | None:
        """Probabilities (C,) of an image times the prior; None where that would be inexact."""
        if not self._changed:
            return self._products[image]
        drift = self._level[image] - logits.logsumexp(dim=0)
        if abs(float(drift)) > _DRIFT:
            return None
        count = len(self._changed)
        changed = self._classes[:count]
        kept = self._products[image] - self._start[image, changed] @ self._old_rows[:count]
        return drift.exp() * kept + probs[changed] @ self._new_rows[:count]
