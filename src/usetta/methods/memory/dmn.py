"""DMN: a memory of many images for each class, read by attention.

    M_c = {t_c} ∪ remembered images of class c,   w_j = K_β(x·m_j),   a_c = Σ_j w_j m_j / ‖Σ_j w_j m_j‖
    out = softmax(s t·x) + λ softmax(s a·x)

The zero-shot class decides where an image is remembered; a full class loses the image of highest entropy, even if the
new one is less confident. An image is remembered before it is answered.

‖Σ w m‖² is wᵀ G w with the Gram matrix G of the class, which is kept with the memory. So an image costs a product with
the remembered features and nothing of size C × K × D.
"""

import torch
from torch import Tensor

from usetta.methods.memory.base import (
    Answers,
    State,
    Stream,
    Views,
    affinity,
    log_probabilities,
    smoothed_entropy,
    touched_zeros,
)
from usetta.methods.options import Count, NotNegative, Positive
from usetta.methods.select import entropy, keep_count, most_confident

_ROWS = 4096
"""Remembered features that are copied at once."""


def dmn_weak(
    state: State | None,
    answers: Answers,
    stream: Stream,
    *,
    weight: NotNegative = 1.0,
    sharpness: Positive = 5.5,
    capacity: Count = 50,
) -> tuple[Tensor, State]:
    """Logarithms (B, C) of summed probabilities by Zhang et al., CVPR 2024, from one feature of each image."""
    return _step(state, answers, answers.logits, stream, weight, sharpness, capacity)


def dmn(
    state: State | None,
    views: Views,
    stream: Stream,
    *,
    weight: NotNegative = 1.0,
    sharpness: Positive = 5.5,
    capacity: Count = 50,
) -> tuple[Tensor, State]:
    """The same, where the most confident views decide under which class the weak view is remembered."""
    chosen = most_confident(entropy(views.logits), keep_count(views.features.shape[1], stream.rho))
    deciding = torch.take_along_dim(views.logits, chosen[:, :, None], dim=1).mean(dim=1)
    weak = Answers(views.features[:, 0], views.logits[:, 0])
    return _step(state, weak, deciding, stream, weight, sharpness, capacity)


def _step(
    state: State | None,
    answers: Answers,
    deciding: Tensor,
    stream: Stream,
    weight: float,
    sharpness: float,
    capacity: int,
) -> tuple[Tensor, State]:
    """`deciding` (B, C): logits that decide on class and entropy of the images."""
    features, logits = answers
    state = state or _empty(stream.text, capacity)
    keys, gram, entropies, counts = (state[name] for name in ("keys", "gram", "entropies", "counts"))
    labels, own = deciding.argmax(dim=-1), smoothed_entropy(deciding)
    classes, images = len(stream.text), len(features)
    arriving = torch.bincount(labels, minlength=classes)
    used = 1 + int((counts + arriving).clamp(max=capacity).max())  # slots that may be filled by the end of the batch
    # Most classes fill fewer slots than the fullest, so only filled ones are multiplied.
    slots = torch.arange(used, device=counts.device)[:, None]
    filled = (slots <= counts).flatten().nonzero()[:, 0]
    cosines = features.new_zeros(used * classes, images)
    for part in torch.split(filled, _ROWS):
        cosines[part] = keys.flatten(0, 1)[part] @ features.T
    cosines = cosines.view(used, classes, images)
    near = affinity(cosines, sharpness)
    # Empty slots hold zeros, which add nothing to the sum or to its length.
    by_class = near.permute(1, 2, 0).contiguous()  # (C, B, slots)
    lengths = (by_class * (by_class @ gram[:, :used, :used])).sum(dim=-1)
    read = (near * cosines).sum(dim=0) / lengths.clamp(min=torch.finfo(lengths.dtype).tiny).sqrt()  # (C, B)
    between = features @ features.T
    for i, label in enumerate(labels.tolist()):
        count = int(counts[label])
        slot = 1 + (count if count < capacity else int(entropies[label].argmax()))
        counts[label] = min(count + 1, capacity)
        entropies[label, slot - 1] = own[i]
        keys[slot, label] = features[i]
        cosines[slot, label, i:] = between[i, i:]
        gram[label, slot, :used] = gram[label, :used, slot] = cosines[:, label, i]
        # Later images of the batch read this class as it is now.
        seen = cosines[:, label, i:]
        w = affinity(seen, sharpness)
        length = (w * (gram[label, :used, :used] @ w)).sum(dim=0)
        read[label, i:] = (w * seen).sum(dim=0) / length.clamp(min=torch.finfo(length.dtype).tiny).sqrt()
    remembered = (stream.logit_scale * read.T).softmax(dim=-1)
    return log_probabilities(logits.softmax(dim=-1) + weight * remembered), state


def _empty(text: Tensor, capacity: int) -> State:
    classes, dim = text.shape
    keys = touched_zeros(
        text, capacity + 1, classes, dim
    )  # slot 0 is the text; slots first, so that used ones are one block
    gram = touched_zeros(text, classes, capacity + 1, capacity + 1)
    keys[0] = text
    gram[:, 0, 0] = text.square().sum(dim=-1)
    return {
        "keys": keys,
        "gram": gram,
        "entropies": touched_zeros(text, classes, capacity),
        "counts": torch.zeros(classes, dtype=torch.long, device=text.device),
    }
