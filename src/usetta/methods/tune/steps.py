"""The steps of test-time tuning, whatever is tuned.

`optimize` is the loop over steps. `tune_text` moves the text features: it carries the gradient of a loss with respect
to the logits to them, and a tuner carries it on to what is tuned. The image tower takes no part: features of the views
are constants. (`lora` moves those instead.)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from usetta.cancellation import checkpoint
from usetta.methods.losses import Penalties, Reward, dispersion, gradient, orthogonality
from usetta.methods.readout import blend_weights, mean_of_views
from usetta.methods.stats import ViewStats, tie_duplicate_classes, view_stats
from usetta.methods.tune.shift import text_features
from usetta.prompts import ClassPrompts

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe


class TunedImages(NamedTuple):
    """The images of a batch that are tuned, as the host knows them and as their device does: it is never asked."""

    numbers: list[int]
    rows: Tensor
    """(A,)"""


Step = Callable[[ViewStats, TunedImages, Tensor], Tensor]
"""(statistics of all images, images to tune, views that the loss sees (A, k)) → logits (A, N, C) after a step."""


class TextTuner(Protocol):
    """Something between the text features and what is tuned, for a batch of images."""

    needs: ClassVar[str]
    """`prompts` for the prompts of the classes, `text` if their features are enough."""
    copies: ClassVar[int]
    """How many times an image holds as much as all text features: what decides how many images go at once."""

    def __init__(self, text: ClassPrompts | Tensor, images: int, *, lr: float, weight_decay: float) -> None: ...

    def step(
        self, images: Sequence[int], grad: Tensor, classes: Tensor | None = None, penalties: Penalties = ()
    ) -> Tensor:
        """New text features (A, C, D) of `images`, from the gradient (A, C, D) with respect to those they have.

        `penalties` on the text features add to it. With `classes` (K,) only those are tuned, and C is K.
        """
        ...


def tune_text(
    recipe: "Recipe",
    stats: ViewStats,
    features: Tensor,
    text: ClassPrompts | Tensor,
    logit_scale: float,
    reward: Reward | None = None,
) -> tuple[ViewStats, Tensor]:
    """Statistics of views with `features` (B, N, D) after tuning the text, and which images were skipped (B,)."""
    tuner: TextTuner = recipe.part("tune")(text, len(features), lr=recipe.lr, weight_decay=recipe.weight_decay)
    start = text_features(text)
    reward = reward or Reward(features, start)
    weighted = (-recipe.dispersion, dispersion), (recipe.orthogonality, orthogonality)
    penalties = [(weight, penalty) for weight, penalty in weighted if weight]

    def step(stats: ViewStats, images: TunedImages, views: Tensor) -> Tensor:
        own = features[images.rows]
        selected = torch.take_along_dim(own, views[:, :, None], dim=1)
        grad = logit_scale * (logit_gradient(recipe, stats, images.rows, views, reward).mT @ selected)
        if 0 < recipe.active < stats.logits.shape[-1]:
            logits = _step_active(recipe, tuner, stats, features, grad, images, views, logit_scale, penalties)
        else:
            logits = logit_scale * (own @ tuner.step(images.numbers, grad, penalties=penalties).mT)
        return tie_duplicate_classes(logits, start)

    return optimize(recipe, stats, step)


def optimize(recipe: "Recipe", stats: ViewStats, step: Step) -> tuple[ViewStats, Tensor]:
    """Statistics after the steps of `recipe`, and which images were skipped (B,); `stats` are those before.

    Every step decides anew on the chosen views, β, the pseudo-label, and which images need no more tuning because their
    views agree by then. Only the selection rule `confident` decides once, as TPT does.
    """
    before, select = stats.entropies, recipe.part("select")
    every = torch.arange(len(before), device=before.device)
    images = TunedImages(list(range(len(before))), every)  # those still to be tuned
    skipped = torch.zeros_like(every, dtype=torch.bool)
    for number in range(recipe.steps):
        checkpoint()
        if number:
            stats = view_stats(recipe, stats.logits)
        if recipe.skip:
            images = _without(images, stats.agrees)
        if number == 0:
            skipped = torch.ones_like(skipped).index_fill_(0, images.rows, False)
        if not images.numbers:
            break
        views = select(recipe, before, stats.entropies)
        logits = stats.logits.clone()
        logits[images.rows] = step(stats, images, views[images.rows])
        stats = replace(stats, logits=logits)
    return (stats if recipe.se_stats == "pre" else view_stats(recipe, stats.logits)), skipped


def _without(images: TunedImages, agrees: Tensor) -> TunedImages:
    """The images whose views do not agree (B,)."""
    settled = agrees.tolist()  # the only read of a step
    numbers = [number for number in images.numbers if not settled[number]]
    if len(numbers) == len(images.numbers):
        return images
    return TunedImages(numbers, torch.tensor(numbers, dtype=torch.long).to(agrees.device, non_blocking=True))


def logit_gradient(recipe: "Recipe", stats: ViewStats, images: Tensor, views: Tensor, reward: Reward) -> Tensor:
    """Gradient (A, k, C) of the loss of `images` (A,) with respect to their logits of `views` (A, k)."""
    logits = torch.take_along_dim(stats.logits[images], views[:, :, None], dim=1)
    if recipe.needs_reward:
        target = reward.scores(images, views).to(logits.dtype)
    elif recipe.label == "mean":
        target = logits.softmax(dim=-1).mean(dim=1)
    else:
        weights = blend_weights(stats.beta[images], stats.chosen[images], stats.logits.shape[1])
        target = mean_of_views(stats.logits[images].softmax(dim=-1), weights)
    loss = recipe.part("loss")
    return gradient(lambda z: loss(z, target), logits)


def _step_active(
    recipe: "Recipe",
    tuner: TextTuner,
    stats: ViewStats,
    features: Tensor,
    grad: Tensor,
    images: TunedImages,
    views: Tensor,
    logit_scale: float,
    penalties: Penalties,
) -> Tensor:
    """Logits (A, N, C) after a step of the most probable classes of each image.

    A context moves all classes, also those that are improbable in every view, and together these contribute much to its
    gradient. So the less probable half of the active classes, the tail, stands in for them: it takes over their
    gradient, and their logits change by the mean change of the tail's.
    """
    logits = stats.logits[images.rows]
    for row, image in enumerate(images.numbers):
        classes, tail = _active_classes(logits[row], views[row], recipe.active)
        own = grad[row, classes]
        own[tail] += (grad[row].sum(dim=0) - own.sum(dim=0)) / len(tail)
        text = tuner.step([image], own[None], classes, penalties)[0]
        moved = logit_scale * (features[image] @ text.T)
        logits[row] += (moved - logits[row][:, classes])[:, tail].mean(dim=1, keepdim=True)
        logits[row, :, classes] = moved
    return logits


def _active_classes(logits: Tensor, views: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` most probable classes of the weak view and `views` (k,), from logits (N, C), and their tail.

    The tail are the positions, among them, of the less probable half. A class that is exactly as probable as the last
    one, because they have the same name, is included too.
    """
    members = torch.cat([views.new_zeros(1), views])
    probable = logits[members].log_softmax(dim=-1).amax(dim=0)
    classes = (probable >= probable.topk(count).values[-1]).nonzero()[:, 0]
    return classes, probable[classes].argsort()[: max(1, len(classes) // 2)]
