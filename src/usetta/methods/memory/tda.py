"""TDA and BoostAdapter: caches of confident and of doubtful images, by their zero-shot class.

    out = z + α Σ_pos K_β(x·k_i) onehot(class_i) − λ Σ_neg K_1(x·k_i) m_i          K_β(u) = exp(−β (1 − u))

The positive cache keeps the most confident images of each class. The negative one keeps images of medium entropy, and
m_i marks the classes that such an image might be of. An image enters the caches before it is answered, so it sees
itself.

BoostAdapter adds the most confident views of the image itself to the positive cache, for this image alone, and its
negative cache drops its oldest image where TDA drops the least confident.
"""

import math

import torch
from torch import Tensor

from usetta.methods.memory.base import (
    Answers,
    State,
    Stream,
    Turnover,
    Views,
    affinity,
    smoothed_entropy,
    touched_zeros,
)
from usetta.methods.options import Count, NotNegative, Positive, Seed
from usetta.methods.select import entropy, most_confident

_DOUBTFUL = (0.2, 0.5)
"""Between these bounds lies the entropy of an image that enters the negative cache, in nats over log2 C."""
_POSSIBLE = 0.03
"""A class of this probability or less is not marked in the negative cache."""


def tda(
    state: State | None,
    answers: Answers,
    stream: Stream,
    *,
    alpha: NotNegative = 2.0,
    sharpness: Positive = 5.0,
    negative: NotNegative = 0.117,
    capacity: Count = 3,
    negative_capacity: Count = 2,
) -> tuple[Tensor, State]:
    """Logits (B, C) by Karmanov et al., CVPR 2024."""
    features, logits = answers
    state = state or _empty(stream, capacity, negative_capacity)
    positive, doubtful = _Cache(state, "positive", len(features)), _Cache(state, "negative", len(features))
    labels, entropies = logits.argmax(dim=-1), smoothed_entropy(logits)
    enters = _is_doubtful(entropies, len(stream.text))
    for i, (label, own, enters_negative) in enumerate(
        zip(labels.tolist(), entropies.tolist(), enters.tolist(), strict=True)
    ):
        positive.turnover.insert(label, own, i)
        if enters_negative:
            doubtful.turnover.insert(label, own, i)
    out = logits + alpha * positive.by_class(features, labels, sharpness)
    out -= negative * doubtful.by_mask(features, _possible(logits))
    positive.write(features, entropies)
    doubtful.write(features, entropies, _possible(logits))
    return out, state


def boost_adapter(
    state: State | None,
    views: Views,
    stream: Stream,
    *,
    alpha: NotNegative = 2.0,
    sharpness: Positive = 5.0,
    boosted: Seed = 1,
    negative: NotNegative = 0.117,
    capacity: Count = 3,
    negative_capacity: Count = 2,
) -> tuple[Tensor, State]:
    """Logits (B, C) by Zhang et al., NeurIPS 2024. `boosted` is their δ, how many more images a class may hold."""
    features, logits = views.features[:, 0], views.logits[:, 0]
    state = state or _empty(stream, capacity, negative_capacity)
    positive, doubtful = _Cache(state, "positive", len(features)), _Cache(state, "negative", len(features))
    labels, entropies = views.logits.argmax(dim=-1), smoothed_entropy(views.logits)
    enters = _is_doubtful(entropies[:, 0], len(stream.text)).tolist()
    # Fewer than ten views select none: then this is TDA but for the negative cache.
    chosen = most_confident(entropy(views.logits), int(views.features.shape[1] * stream.rho))
    label_list, entropy_list = labels.tolist(), entropies.tolist()
    added: list[tuple[int, int, int]] = []  # image, view, class
    hidden: list[tuple[int, int]] = []  # image, key that its own views displace
    for i, selected in enumerate(chosen.tolist()):
        positive.turnover.insert(label_list[i][0], entropy_list[i][0], i)
        if enters[i]:
            doubtful.turnover.insert(label_list[i][0], entropy_list[i][0], i, newest_first=True)
        for label in {label_list[i][view] for view in selected}:
            row = [(own, key, -1) for own, key in positive.turnover.row(label)]
            row += [(entropy_list[i][view], -1, view) for view in selected if label_list[i][view] == label]
            row.sort(key=lambda item: item[0])
            added += [(i, view, label) for _, _, view in row[: capacity + boosted] if view >= 0]
            hidden += [(i, key) for _, key, _ in row[capacity + boosted :] if key >= 0]
    near = positive.by_class(features, labels[:, 0], sharpness, hidden)
    if added:
        image, view, label = torch.tensor(added, device=features.device).T
        cosines = (features[image] * views.features[image, view]).sum(dim=-1)
        near.index_put_((image, label), affinity(cosines, sharpness), accumulate=True)
    out = logits + alpha * near - negative * doubtful.by_mask(features, _possible(logits))
    positive.write(features, entropies[:, 0])
    doubtful.write(features, entropies[:, 0], _possible(logits))
    return out, state


def _is_doubtful(entropies: Tensor, classes: int) -> Tensor:
    low, high = (bound * math.log2(classes) for bound in _DOUBTFUL)
    return (low < entropies) & (entropies < high)


def _possible(logits: Tensor) -> Tensor:
    probs = logits.softmax(dim=-1)
    return (probs > _POSSIBLE) & (probs < 1)


def _empty(stream: Stream, capacity: int, negative_capacity: int) -> State:
    classes, dim = stream.text.shape
    state: State = {}
    for name, slots in (("positive", capacity), ("negative", negative_capacity)):
        state[f"{name}_keys"] = touched_zeros(stream.text, classes, slots, dim)
        state[f"{name}_entropies"] = stream.text.new_full((classes, slots), torch.inf)
    state["negative_masks"] = torch.zeros(classes, negative_capacity, classes, dtype=torch.bool).to(stream.text.device)
    return state


class _Cache:
    """One of the caches while a batch passes."""

    def __init__(self, state: State, name: str, images: int) -> None:
        self._keys, self._entropies = state[f"{name}_keys"], state[f"{name}_entropies"]
        self._masks = state.get(f"{name}_masks")
        self.turnover = Turnover(self._entropies, images)

    def by_class(
        self, features: Tensor, labels: Tensor, sharpness: float, hidden: list[tuple[int, int]] | None = None
    ) -> Tensor:
        """Affinities (B, C) of images to what their cache holds, summed by class; without keys that are `hidden`."""
        size, classes = self._entropies.numel(), len(self._entropies)
        cosines = torch.cat([features @ self._keys.flatten(0, 1).T, features @ features.T], dim=1)
        near = affinity(cosines, sharpness) * self.turnover.seen(torch.arange(cosines.shape[1], device=features.device))
        if hidden:
            image, key = torch.tensor(hidden, device=features.device).T
            near[image, key] = 0
        sums: Tensor = near[:, :size].view(len(features), classes, -1).sum(dim=-1)
        return sums.index_add_(1, labels, near[:, size:].contiguous())

    def by_mask(self, features: Tensor, masks: Tensor) -> Tensor:
        """Affinities (B, C) of images to what their cache holds, summed over the classes that each key marks."""
        assert self._masks is not None
        size = self._entropies.numel()
        held = torch.isfinite(self._entropies).flatten().nonzero()[:, 0]
        images = torch.arange(len(features), device=features.device)
        keys = torch.cat([held, size + images])
        cosines = torch.cat([features @ self._keys.flatten(0, 1)[held].T, features @ features.T], dim=1)
        near = affinity(cosines, 1.0) * self.turnover.seen(keys)
        marked = torch.cat([self._masks.flatten(0, 1)[held], masks]).to(near.dtype)
        return near @ marked

    def write(self, features: Tensor, entropies: Tensor, masks: Tensor | None = None) -> None:
        """Keep what the turnover has left."""
        tables = [(self._keys, features), (self._entropies, entropies)]
        if self._masks is not None and masks is not None:
            tables.append((self._masks, masks))
        self.turnover.write(*tables)
