"""The steps of test-time tuning on the text side: look at the views, pull on the text features, look again.

The gradient of a loss with respect to the logits is carried to the text features here, and from there to whatever is
tuned by the tuner. The image tower takes no part: features of the views are constants.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from usetta.look import Look, look
from usetta.losses import LOSSES, dispersion, gradient
from usetta.prompts import ClassPrompts
from usetta.readout import blend_weights, mean_of_views
from usetta.select import keep_count, most_confident
from usetta.tune.prompt import PromptTuner

if TYPE_CHECKING:
    from usetta.recipe import Recipe


def tune(
    recipe: "Recipe", now: Look, features: Tensor, prompts: ClassPrompts, logit_scale: float
) -> tuple[Look, Tensor]:
    """How views with `features` (B, N, D) look after tuning, and which pictures were left out (B,).

    `now` is how they look before. Every step decides anew: chosen views, β, pseudo-label, and which pictures need no
    more tuning because their views agree by then. Only the selection `confident` is made once, as TPT does.
    """
    tuner = PromptTuner(prompts, len(features), lr=recipe.lr, weight_decay=recipe.weight_decay)
    confident = most_confident(now.entropies, keep_count(now.entropies.shape[1], recipe.rho))
    text = prompts.features().expand(len(features), -1, -1)
    going = torch.arange(len(features), device=features.device)
    skipped = torch.zeros_like(going, dtype=torch.bool)
    for step in range(recipe.steps):
        if step:
            now = look(recipe, now.logits)
        if recipe.skip:
            still = ~now.agrees[going]
            going, text = going[still], text[still]
        if step == 0:
            skipped[:] = True
            skipped[going] = False
        if not len(going):
            break
        strong = torch.cat([torch.zeros_like(now.chosen[:, :1]), now.chosen], dim=1)
        views = (confident if recipe.select == "confident" else strong)[going]
        pull = _pull(recipe, now, features, views, going, logit_scale)
        if recipe.dispersion:
            pull -= recipe.dispersion * gradient(dispersion, text)
        logits = now.logits.clone()
        if 0 < recipe.active < logits.shape[-1]:
            for row, picture in enumerate(going.tolist()):
                classes = _active(now.logits[picture], views[row], recipe.active)
                moved = tuner.step([picture], pull[row : row + 1, classes], classes)[0]
                old, new = logits[picture][:, classes], logit_scale * (features[picture] @ moved.T)
                share = old.logsumexp(dim=-1, keepdim=True) - new.logsumexp(dim=-1, keepdim=True)
                logits[picture, :, classes] = new + share
        else:
            text = tuner.step(going.tolist(), pull)
            logits[going] = logit_scale * (features[going] @ text.mT)
        now = replace(now, logits=logits)
    return (now if recipe.se_stats == "pre" else look(recipe, now.logits)), skipped


def _pull(recipe: "Recipe", now: Look, features: Tensor, views: Tensor, going: Tensor, logit_scale: float) -> Tensor:
    """Gradient (A, C, D) of the loss of A pictures, `going`, over `views` (A, k), with respect to their text."""
    logits = torch.take_along_dim(now.logits[going], views[:, :, None], dim=1)
    seen = torch.take_along_dim(features[going], views[:, :, None], dim=1)
    if recipe.label == "mean":
        pseudo_label = logits.softmax(dim=-1).mean(dim=1)
    else:
        weights = blend_weights(now.beta[going], now.chosen[going], features.shape[1])
        pseudo_label = mean_of_views(now.logits[going].softmax(dim=-1), weights)
    to_logits = gradient(lambda z: LOSSES[recipe.loss](z, pseudo_label), logits)
    return logit_scale * (to_logits.mT @ seen)


def _active(logits: Tensor, views: Tensor, count: int) -> Tensor:
    """The `count` classes that the weak view or one of `views` (k,) finds most probable, of logits (N, C)."""
    members = torch.cat([views.new_zeros(1), views])
    return logits[members].log_softmax(dim=-1).amax(dim=0).topk(count).indices
