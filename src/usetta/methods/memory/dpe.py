"""DPE: text and image prototypes that evolve together.

For each image, W = N(G) are the text prototypes and P the means of the most confident images of each class so far.
Residuals of both, zero at first, take one AdamW step against

    H(softmax(z̄ + α K_β(f̄·N(P)))) + align · NCE(N(P), W)

where f̄ and z̄ are the means of the most confident views. The answer is s W'·x₀ + α K_β(x₀·P') with the moved
prototypes. If it is confident, G becomes the running mean of W'.

The first step of AdamW from zero is −lr g / (|g| + 1e-3), so gradients are written out here and nothing is recorded.
z̄ is a constant, as in the benchmark: the text moves by NCE alone.

Only the k classes that have images are moved, so all others keep the logits they came with, and the work is on tables
of k rows, in place. What is left are NCE's three products of k × k × D numbers for every image. They cannot be carried
over to the next one, because a confident answer moves all k text prototypes.
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
    images, count, dim = views.features.shape
    prototypes, turnover = _Prototypes(state, images), Turnover(state["entropies"], images)
    learned, entropies = views.features.new_empty(images, dim), views.features.new_empty(images)
    out = views.logits[:, 0].clone()
    bits = math.log2(len(stream.text))
    for i, features in enumerate(views.features):
        logits, classes = views.logits[i].clone(), prototypes.classes
        logits[:, classes] = stream.logit_scale * (features @ prototypes.text.units.T)
        chosen = most_confident(entropy(logits), keep_count(count, stream.rho)) if count > 1 else slice(None)
        learned[i], mean_logits = features[chosen].mean(dim=0), logits[chosen].mean(dim=0)
        label, entropies[i] = int(mean_logits.argmax()), smoothed_entropy(mean_logits)
        turnover.insert(label, float(entropies[i]), i)
        kept = [turnover.find(key, state["keys"], learned) for _, key in turnover.row(label)]
        prototypes.remember(label, torch.stack(kept).mean(dim=0))
        moved_text, moved_images = prototypes.move(learned[i], mean_logits, alpha, sharpness, learning_rate, align)
        near = alpha * affinity(moved_images @ features[0], sharpness)
        out[i, prototypes.classes] = stream.logit_scale * (moved_text @ features[0]) + near
        if float(entropy(out[i])) < _CONFIDENT * bits:
            state["updates"] += 1
            prototypes.text.mix(moved_text, 1 / (int(state["updates"]) + 1))
    turnover.write((state["keys"], learned), (state["entropies"], entropies))
    prototypes.write(state)
    return out, state


class _Rows:
    """Vectors, and the same at length 1: tables (room, D) whose first rows are in use."""

    def __init__(self, vectors: Tensor, room: int) -> None:
        self._vectors, self._units, self._moved, self._size, self._gradient = (
            vectors.new_empty(room, vectors.shape[1]) for _ in range(5)
        )
        self._lengths = vectors.new_empty(room, 1)
        self.count = len(vectors)
        self.vectors.copy_(vectors)
        self._measure(slice(self.count))

    @property
    def vectors(self) -> Tensor:
        """(k, D)"""
        return self._vectors[: self.count]

    @property
    def units(self) -> Tensor:
        """(k, D)"""
        return self._units[: self.count]

    @property
    def gradient(self) -> Tensor:
        """(k, D), to be filled."""
        return self._gradient[: self.count]

    def put(self, row: int, vector: Tensor) -> None:
        """Write a row, which may be the next one."""
        self.count = max(self.count, row + 1)
        self._vectors[row] = vector
        self._measure(slice(row, row + 1))

    def mix(self, vectors: Tensor, share: float) -> None:
        """Take in `vectors` (k, D) by so much."""
        self.vectors.lerp_(vectors, share)
        self._measure(slice(self.count))

    def moved(self, along: Tensor, learning_rate: float) -> Tensor:
        """Units (k, D) after AdamW's step.

        `gradient` is that with respect to the units, and is overwritten; `along` (k,) its product with them.
        """
        gradient, size, moved = self.gradient, self._size[: self.count], self._moved[: self.count]
        # That with respect to the vectors is (gradient − along · unit) / length, and |g| + ε is scaled alike.
        gradient.addcmul_(self.units, along[:, None], value=-1)
        torch.abs(gradient, out=size).add_(self._lengths[: self.count], alpha=_EPSILON)
        torch.addcdiv(self.vectors, gradient, size, value=-learning_rate, out=moved)
        return moved.div_(torch.linalg.vector_norm(moved, dim=-1, keepdim=True))

    def _measure(self, rows: slice) -> None:
        torch.linalg.vector_norm(self._vectors[rows], dim=-1, keepdim=True, out=self._lengths[rows])
        torch.div(self._vectors[rows], self._lengths[rows], out=self._units[rows])


class _Prototypes:
    """Prototypes of the classes that have images, in the order in which these came, while a batch passes."""

    def __init__(self, state: State, images: int) -> None:
        held = state["held"].nonzero()[:, 0]
        room = min(len(state["held"]), len(held) + images)
        self._start = state["text"]
        self._places = {label: place for place, label in enumerate(held.tolist())}
        self._classes = held.new_empty(room)
        self._classes[: len(held)] = held
        self.text, self.images = _Rows(state["text"][held], room), _Rows(state["means"][held], room)
        self._cosines, self._error = (state["text"].new_empty(room * room) for _ in range(2))

    @property
    def classes(self) -> Tensor:
        """(k,)"""
        return self._classes[: len(self._places)]

    def remember(self, label: int, mean: Tensor) -> None:
        """Set the mean of the images of a class, which may be a new one."""
        if label not in self._places:
            self._classes[len(self._places)] = label
            self._places[label] = len(self._places)
            self.text.put(self._places[label], self._start[label])
        self.images.put(self._places[label], mean)

    def move(
        self,
        feature: Tensor,
        logits: Tensor,
        alpha: float,
        sharpness: float,
        learning_rate: float,
        align: float,
    ) -> tuple[Tensor, Tensor]:
        """Prototypes (k, D) of text and images after the step, at length 1; the next step overwrites them."""
        text, images, classes = self.text, self.images, self.classes
        cosines = images.units @ feature
        near = affinity(cosines, sharpness)
        log_p = logits.index_add(0, classes, alpha * near).log_softmax(dim=0)
        marginal = -(log_p.exp() * log_p).sum()
        by_logit = -(log_p.exp() * (log_p + marginal))[classes]  # dH/dz
        along_feature = alpha * sharpness * by_logit * near
        torch.outer(along_feature, feature, out=images.gradient)
        along_images, moved_text = along_feature * cosines, text.units
        if align:
            k = len(classes)
            logit, error = self._cosines[: k * k].view(k, k), self._error[: k * k].view(k, k)
            torch.addmm(logit, images.units, text.units.T, beta=0, alpha=1 / _TEMPERATURE, out=logit)
            torch.softmax(logit, dim=-1, out=error)
            error.diagonal().sub_(1)
            error *= align / (k * _TEMPERATURE)
            images.gradient.addmm_(error, text.units)
            torch.mm(error.T, images.units, out=text.gradient)
            # Products of the gradients with the units, by the products of the units.
            logit *= error
            along_images += _TEMPERATURE * logit.sum(dim=1)
            moved_text = text.moved(_TEMPERATURE * logit.sum(dim=0), learning_rate)
        return moved_text, images.moved(along_images, learning_rate)

    def write(self, state: State) -> None:
        """Bring the state up to date."""
        state["text"][self.classes], state["means"][self.classes] = self.text.vectors, self.images.vectors
        state["held"][self.classes] = True


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
