"""DPE: text and image prototypes that evolve together.

For each image, W = N(G) are the text prototypes and P the means of the most confident images of each class so far.
Residuals of both, zero at first, take one AdamW step against

    H(softmax(z̄ + α K_β(f̄·N(P)))) + align · NCE(N(P), W)

where f̄ and z̄ are the means of the most confident views. The answer is s W'·x₀ + α K_β(x₀·P') with the moved
prototypes. If it is confident, G becomes the running mean of W'.

The first step of AdamW from zero is −lr g / (|g| + 1e-3), so gradients are written out here and nothing is recorded.
z̄ is a constant, as in the benchmark: the text moves by NCE alone.
"""

import math

import torch
from torch import Tensor

from usetta.methods.memory.base import (
    State,
    Stream,
    Turnover,
    Views,
    affinity,
    smoothed_entropy,
    touched_zeros,
    unit,
)
from usetta.methods.options import Count, NotNegative, Positive
from usetta.methods.select import entropy, keep_count, most_confident

_CONFIDENT = 0.1
"""An answer of less entropy, in nats over log2 C, changes the text prototypes."""
_EPSILON = 1e-3
"""Of AdamW."""
_TEMPERATURE = 0.01
"""Of NCE."""


def dpe(
    state: State | None,
    views: Views,
    stream: Stream,
    *,
    alpha: NotNegative = 6.0,
    sharpness: Positive = 5.0,
    learning_rate: NotNegative = 6e-4,
    align: NotNegative = 0.5,
    capacity: Count = 3,
) -> tuple[Tensor, State]:
    """Logits (B, C) by Zhang et al., NeurIPS 2024."""
    state = state or _empty(stream.text, capacity)
    out = torch.empty_like(views.logits[:, 0])
    bits = math.log2(len(stream.text))
    for i in range(len(out)):
        features = views.features[i]
        text = unit(state["text"])
        logits = stream.logit_scale * (features @ text.T)
        chosen = most_confident(entropy(logits), keep_count(len(features), stream.rho))
        mean_feature, mean_logits = features[chosen].mean(dim=0), logits[chosen].mean(dim=0)
        _remember(state, int(mean_logits.argmax()), float(smoothed_entropy(mean_logits)), mean_feature)
        classes = state["held"].nonzero()[:, 0]
        moved_text, moved_images = _move(
            state, text, classes, mean_feature, mean_logits, alpha, sharpness, learning_rate, align
        )
        near = alpha * affinity(moved_images @ features[0], sharpness)
        out[i] = (stream.logit_scale * (moved_text @ features[0])).index_add_(0, classes, near)
        if float(entropy(out[i])) < _CONFIDENT * bits:
            state["updates"] += 1
            n = int(state["updates"])
            state["text"].mul_(n / (n + 1)).add_(moved_text, alpha=1 / (n + 1))
    return out, state


def _remember(state: State, label: int, own: float, feature: Tensor) -> None:
    turnover = Turnover(state["entropies"], 1)
    turnover.insert(label, own, 0)
    turnover.write((state["keys"], feature[None]), (state["entropies"], feature.new_tensor([own])))
    held = torch.isfinite(state["entropies"][label])
    state["means"][label] = state["keys"][label][held].mean(dim=0)
    state["held"][label] = True


def _move(
    state: State,
    text: Tensor,
    classes: Tensor,
    feature: Tensor,
    logits: Tensor,
    alpha: float,
    sharpness: float,
    learning_rate: float,
    align: float,
) -> tuple[Tensor, Tensor]:
    """Text prototypes (C, D) and image prototypes (k, D) of the `classes` (k,) that have any, after the step."""
    means = state["means"][classes]
    images = unit(means)
    near = affinity(images @ feature, sharpness)
    log_p = logits.index_add(0, classes, alpha * near).log_softmax(dim=0)
    marginal = -(log_p.exp() * log_p).sum()
    by_logit = -(log_p.exp() * (log_p + marginal))[classes]  # dH/dz
    image_grad = (by_logit * alpha * sharpness * near)[:, None] * feature
    moved = text
    if align:
        own = text[classes]
        error = (images @ own.T / _TEMPERATURE).softmax(dim=-1)
        error.diagonal().sub_(1)
        error *= align / (len(classes) * _TEMPERATURE)
        image_grad += error @ own
        text_grad = _through_norm(error.T @ images, own, state["text"][classes])
        moved = text.index_copy(0, classes, unit(state["text"][classes] + _adam_step(text_grad, learning_rate)))
    image_grad = _through_norm(image_grad, images, means)
    return moved, unit(means + _adam_step(image_grad, learning_rate))


def _through_norm(grad: Tensor, normed: Tensor, vectors: Tensor) -> Tensor:
    """Gradient with respect to `vectors` (n, D), from that with respect to `normed`, the same at length 1."""
    along = (grad * normed).sum(dim=-1, keepdim=True)
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return (grad - along * normed) / lengths


def _adam_step(grad: Tensor, learning_rate: float) -> Tensor:
    return -learning_rate * grad / (grad.abs() + _EPSILON)


def _empty(text: Tensor, capacity: int) -> State:
    classes, dim = text.shape
    return {
        "text": text.clone(),
        "updates": torch.zeros((), dtype=torch.long),
        "keys": touched_zeros(text, classes, capacity, dim),
        "entropies": text.new_full((classes, capacity), torch.inf),
        "means": torch.zeros_like(text),
        "held": torch.zeros(classes, dtype=torch.bool, device=text.device),
    }
