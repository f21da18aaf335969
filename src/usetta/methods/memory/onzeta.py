"""OnZeta: labels that stay balanced over the stream, and class proxies that learn from them.

    q = softmax(s T x) ⊙ exp(ρ), normalised          ρ ← max(0, ρ − η_ρ (q − α/C))
    v = softmax(w x / 0.04)                           w_c ← N(w_c − (η / 0.04) (v_c − q_c) x)
    out = b v + (1 − b) q,   b = β √(i / N)           for image i of N, before its updates

Every image moves all proxies, but by multiples of its own feature. So within a batch a proxy is its start plus a sum
of features, and only inner products are followed: with the proxies before the batch, and between images.
"""

import math

import torch
from torch import Tensor

from usetta.methods.memory.base import Answers, State, Stream, log_probabilities, unit
from usetta.methods.options import NotNegative, Positive, Seed, Share

_LABEL_RATE, _PROXY_RATE = 20.0, 0.5


def onzeta(
    state: State | None,
    answers: Answers,
    stream: Stream,
    *,
    mix: Share = 0.4,
    balance: NotNegative = 1.0,
    proxy_temperature: Positive = 0.04,
    length: Seed = 0,
) -> tuple[Tensor, State]:
    """Logarithms (B, C) of probabilities by Qian & Hu, ECCV 2024.

    `mix` is their β, `balance` their α, `length` the number of images N, by default that of the stream.
    """
    total = length or stream.length
    if not total:
        raise ValueError("onzeta needs to know how many images there will be: onzeta:length=1000")
    features, logits = answers
    classes, images = len(stream.text), len(features)
    state = state or {
        "proxies": stream.text.clone(),
        "dual": stream.text.new_zeros(classes),
        "seen": torch.zeros((), dtype=torch.long),
    }
    zero_shot = logits.softmax(dim=-1)
    start = features @ state["proxies"].T  # (B, C)
    between = features @ features.T
    # Proxy c is scale_c · (its start − Σ_j moves_jc x_j).
    scale, moves = torch.ones_like(state["dual"]), torch.zeros_like(start)
    dual, answer = state["dual"], torch.empty_like(start)
    first = int(state["seen"])
    for i in range(images):
        number = first + i + 1
        q = zero_shot[i] * (dual - dual.max()).exp()
        q /= q.sum()
        cosines = scale * (start[i] - between[i, :i] @ moves[:i])
        v = (cosines / proxy_temperature).softmax(dim=0)
        b = mix * math.sqrt(min(number / total, 1))
        torch.add(b * v, q, alpha=1 - b, out=answer[i])
        dual = (dual - _LABEL_RATE / math.sqrt(number) * (q - balance / classes)).clamp_(min=0)
        move = (_PROXY_RATE / math.sqrt(number) / proxy_temperature) * (v - q)
        # ‖w − m x‖² = 1 − 2 m w·x + m² for unit w and x.
        length_squared = 1 - 2 * move * cosines + move.square() * between[i, i]
        torch.div(move, scale, out=moves[i])
        scale = scale * length_squared.clamp(min=torch.finfo(move.dtype).tiny).rsqrt()
    # The lengths are already 1 but for rounding.
    state["proxies"].copy_(unit(scale[:, None] * (state["proxies"] - moves.T @ features)))
    state["dual"].copy_(dual)
    state["seen"] += images
    return log_probabilities(answer), state
