"""The steps of test-time tuning: look at the views, pull on what may change, look again.

`optimize` is the loop, whatever is tuned. `tune` moves the text features: the gradient of a loss with respect to the
logits is carried to them here, and from there to whatever is tuned by a tuner. The image tower takes no part: features
of the views are constants. (`lora` moves those instead.)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import torch
from torch import Tensor

from usetta.methods.losses import LOSSES, Reward, dispersion, gradient, reward_loss
from usetta.methods.readout import blend_weights, mean_of_views
from usetta.methods.select import keep_count, most_confident
from usetta.methods.stats import ViewStats, tie_duplicate_classes, view_stats
from usetta.methods.tune.prompt import PromptTuner
from usetta.methods.tune.shift import ShiftTuner, plain
from usetta.methods.tune.spectrum import SpectrumTuner
from usetta.prompts import ClassPrompts

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe

Move = Callable[[ViewStats, Tensor, Tensor], Tensor]
"""(how the views look, images to tune (A,), views that the loss sees (A, k)) → the logits (A, N, C) after a step."""


class Tuner(Protocol):
    """Something between the text features and what is tuned, for a batch of images."""

    copies: ClassVar[int]
    """How many times an image holds as much as all text features: what decides how many images go at once."""

    @classmethod
    def build(cls, recipe: "Recipe", text: ClassPrompts | Tensor, images: int) -> Self:
        """The tuner that `recipe` asks for."""
        ...

    def step(self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None) -> Tensor:
        """New text features (A, C, D) of some images, from the gradient with respect to those they have."""
        ...


TUNERS: dict[str, type[Tuner]] = {"prompt": PromptTuner, "shift": ShiftTuner, "spectrum": SpectrumTuner}


def tune(
    recipe: "Recipe",
    now: ViewStats,
    features: Tensor,
    text: ClassPrompts | Tensor,
    logit_scale: float,
    reward: Reward | None = None,
) -> tuple[ViewStats, Tensor]:
    """How views with `features` (B, N, D) look after tuning the text, and which images were left out (B,).

    `now` is how they look before; `text` the prompts of the classes or, if no context is tuned, their features (C, D).
    The views are judged by `reward`, if the loss wants that; else by themselves and the text before tuning.
    """
    tuner = TUNERS[recipe.tune].build(recipe, text, len(features))
    start = plain(text)
    reward = reward or Reward(features, start)
    texts = start.expand(len(features), -1, -1)

    def move(now: ViewStats, going: Tensor, views: Tensor) -> Tensor:
        nonlocal texts
        seen = torch.take_along_dim(features[going], views[:, :, None], dim=1)
        pull = logit_scale * (logit_gradient(recipe, now, going, views, reward).mT @ seen)
        if recipe.dispersion:
            pull -= recipe.dispersion * gradient(dispersion, texts[going])
        if 0 < recipe.active < now.logits.shape[-1]:
            return tie_duplicate_classes(
                _move_active(recipe, tuner, now, features, pull, going, views, logit_scale), start
            )
        moved = tuner.step(going.tolist(), pull)
        if recipe.dispersion:
            texts = texts.index_copy(0, going, moved)
        return tie_duplicate_classes(logit_scale * (features[going] @ moved.mT), start)

    return optimize(recipe, now, move)


def optimize(recipe: "Recipe", now: ViewStats, move: Move) -> tuple[ViewStats, Tensor]:
    """How views look after the steps of `recipe`, and which images were left out (B,); `now` is how they look before.

    Every step decides anew: chosen views, β, pseudo-label, and which images need no more tuning because their views
    agree by then. Only the selection `confident` is made once, as TPT does.
    """
    images, count = now.entropies.shape
    confident = most_confident(now.entropies, keep_count(count, recipe.rho))
    every = torch.arange(count, device=confident.device).expand(images, -1)
    going = torch.arange(images, device=confident.device)
    skipped = torch.zeros_like(going, dtype=torch.bool)
    for step in range(recipe.steps):
        if step:
            now = view_stats(recipe, now.logits)
        if recipe.skip:
            going = going[~now.agrees[going]]
        if step == 0:
            skipped[:] = True
            skipped[going] = False
        if not len(going):
            break
        strong = torch.cat([torch.zeros_like(now.chosen[:, :1]), now.chosen], dim=1)
        views = {"confident": confident, "weak+strong": strong, "all": every}[recipe.select]
        logits = now.logits.clone()
        logits[going] = move(now, going, views[going])
        now = replace(now, logits=logits)
    return (now if recipe.se_stats == "pre" else view_stats(recipe, now.logits)), skipped


def logit_gradient(recipe: "Recipe", now: ViewStats, going: Tensor, views: Tensor, reward: Reward) -> Tensor:
    """Gradient (A, k, C) of the loss of An images, `going`, with respect to their logits of `views` (A, k)."""
    logits = torch.take_along_dim(now.logits[going], views[:, :, None], dim=1)
    if recipe.loss == "reward":
        rewards = reward.scores(going, views).to(logits.dtype)
        return gradient(lambda z: reward_loss(z, rewards), logits)
    if recipe.label == "mean":
        pseudo_label = logits.softmax(dim=-1).mean(dim=1)
    else:
        weights = blend_weights(now.beta[going], now.chosen[going], now.logits.shape[1])
        pseudo_label = mean_of_views(now.logits[going].softmax(dim=-1), weights)
    return gradient(lambda z: LOSSES[recipe.loss](z, pseudo_label), logits)


def _move_active(
    recipe: "Recipe",
    tuner: Tuner,
    now: ViewStats,
    features: Tensor,
    pull: Tensor,
    going: Tensor,
    views: Tensor,
    logit_scale: float,
) -> Tensor:
    """Logits (A, N, C) after a step of the most probable classes of each image.

    A context moves all classes, also those that no view believes in, and together they pull on it. So the less probable
    half of the active ones, the tail, stands in for the others: it takes their pull, and they move by its mean move.
    """
    logits = now.logits[going]
    for row, image in enumerate(going.tolist()):
        classes, tail = _active(logits[row], views[row], recipe.active)
        own = pull[row, classes]
        own[tail] += (pull[row].sum(dim=0) - own.sum(dim=0)) / len(tail)
        text = tuner.step([image], own[None], classes)[0]
        moved = logit_scale * (features[image] @ text.T)
        logits[row] += (moved - logits[row][:, classes])[:, tail].mean(dim=1, keepdim=True)
        logits[row, :, classes] = moved
    return logits


def _active(logits: Tensor, views: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` classes that the weak view or one of `views` (k,) finds most probable, of logits (N, C).

    Also where among them the less probable half stands. A class that is as probable as the last of them, for they have
    the same name, comes along.
    """
    members = torch.cat([views.new_zeros(1), views])
    probable = logits[members].log_softmax(dim=-1).amax(dim=0)
    classes = (probable >= probable.topk(count).values[-1]).nonzero()[:, 0]
    return classes, probable[classes].argsort()[: max(1, len(classes) // 2)]
