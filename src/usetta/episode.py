"""From the views of an image to the answer of a recipe: what a model says about the views, once, for every recipe.

The weak view goes through the tower by itself, so its features are the same to the last bit whether or not there are
other views. They are those of the image itself, which no method averages away, so a tower in int8 has fp32 for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from usetta.methods.recipe import Hidden, Recipe, Result, Reward, run
from usetta.models import Model
from usetta.models.base import encode_views, encode_views_together, require_last_blocks
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts


@dataclass(frozen=True)
class Episode:
    """The views of one image as the image tower sees them; episodes of further views of it can be added."""

    features: Tensor
    """(N, D)"""
    judged: Tensor | None = None
    """(N, D'): their features by the reward model, if there is one."""
    hidden: Tensor | None = None
    """(N, tokens, width): what enters the last blocks of the tower, if that is needed."""

    def __add__(self, more: "Episode") -> "Episode":
        features = torch.cat([self.features, more.features])
        return Episode(features, _joined(self.judged, more.judged), _joined(self.hidden, more.hidden))


def _joined(views: Tensor | None, more: Tensor | None) -> Tensor | None:
    return None if views is None or more is None else torch.cat([views, more])


def encode(model: Model, pixels: Tensor, *, weak: int = 1) -> Tensor:
    """Features (N, D) of views (N, 3, S, S), of any size, so many weak ones first."""
    return encode_views(model, pixels, weak=weak)


def encode_together(model: Model, images: Sequence[Tensor]) -> list[Tensor]:
    """Features (N, D) of the views of each of several images, whose views fill the batches of a GPU together.

    The weak views make batches of their own, so that a method that looks at nothing else sees the same features.
    """
    return encode_views_together(model, images)


def encode_with_hidden(model: Model, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Features (N, D) of views, and the hidden states (N, tokens, width) that they come from."""
    tower = require_last_blocks(model)
    states = torch.cat([tower.hidden_states(pixels[:1]), tower.hidden_states(pixels[1:])])
    tail = tower.last_blocks()
    return torch.cat([tail.encode(states[:1]), tail.encode(states[1:])]), states


def answer(
    recipe: Recipe, episodes: Sequence[Episode], model: Model, prompts: ClassPrompts, words: ClassPrompts | None = None
) -> Result:
    """What `recipe` says about images; `words` are the prompts as a reward model reads them, if not as the model."""
    features = torch.stack([each.features for each in episodes])
    states = [each.hidden for each in episodes if each.hidden is not None]
    hidden = Hidden(require_last_blocks(model).last_blocks(), states) if recipe.needs_hidden else None
    reward = None
    if recipe.loss == "reward":
        judged = [each.features if each.judged is None else each.judged for each in episodes]
        reward = Reward(torch.stack(judged), (words or prompts).features())
    result = run(recipe, features, prompts, model.logit_scale, reward=reward, hidden=hidden)
    if not torch.isfinite(result.probs).all():
        raise ValueError(f"method '{recipe.name}' tuned until nothing but NaN was left; its settings are too large")
    return result


def check(recipe: Recipe, model: Model, prompts: ClassPrompts, views: int) -> None:
    """Tell what a recipe lacks before any image is read."""
    if views < 2 and not recipe.weak_only:
        raise ValueError(f"method '{recipe.name}' compares views, so it needs at least 2, not {views}")
    if recipe.needs_hidden:
        require_last_blocks(model)
    if recipe.needs_prompts:
        try:
            prompts.check_tunable()
        except ValueError as error:
            hint = f"give one template with words before the name, such as {DEFAULT_TEMPLATE!r}"
            raise ValueError(f"method '{recipe.name}' tunes the prompt, but {error}; {hint}") from error
