"""Answers that depend on earlier images: a recipe with a memory, on images in the order of a stream."""

from dataclasses import replace

import torch
from torch import Tensor

from usetta.methods.memory import MEMORIES, Answers, State, Stream, Views
from usetta.methods.memory.base import log_probabilities, unit
from usetta.methods.recipe import Hidden, Recipe, Result, Reward, run
from usetta.methods.stats import tie_duplicate_classes
from usetta.prompts import ClassPrompts


def run_stream(
    recipe: Recipe,
    features: Tensor,
    text: Tensor | ClassPrompts,
    logit_scale: float,
    state: State | None,
    *,
    length: int | None = None,
    reward: Reward | None = None,
    hidden: Hidden | None = None,
) -> tuple[Result, State]:
    """Answers for features (B, N, D) of images in the order of the stream, and the state after them.

    `state`: that after the images before, which is taken over; None at the start. `length`: of the whole stream, for
    memories that need it. The rest as in `run`; `before` of the result is the answer without the memory.
    """
    result = run(recipe.episodic, features, text, logit_scale, reward=reward, hidden=hidden)
    with torch.inference_mode(False), torch.no_grad():
        classes = (text.features() if isinstance(text, ClassPrompts) else text).to(result.probs.dtype)
        features = features.to(result.probs.dtype)
        stream = Stream(classes, logit_scale, recipe.rho, length)
        seen: Answers | Views
        if recipe.sees_views or recipe.weak_only:
            views = Views(features, tie_duplicate_classes(logit_scale * (features @ classes.T), classes))
            seen = views if recipe.sees_views else Answers(features[:, 0], views.logits[:, 0])
        else:
            # What the rest of the recipe answers counts as the image's own prediction, and the views' features as one.
            mean = unit((result.weights[:, None] @ features)[:, 0])
            seen = Answers(mean, log_probabilities(result.probs))
        logits, state = recipe.part("memory")(state, seen, stream)
        has_logits = MEMORIES[recipe.memory].returns == "logits"
        energy = logits.logsumexp(dim=-1) if has_logits else torch.full_like(result.energy, torch.nan)
    return replace(result, probs=logits.softmax(dim=-1), energy=energy), state
