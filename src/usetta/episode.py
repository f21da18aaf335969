"""What a model sees in the views of one image, and what a recipe answers from it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, islice

import torch
from torch import Tensor

from usetta.methods.memory import State
from usetta.methods.recipe import NOTHING, Hidden, Recipe, Result, Reward, diverged, run
from usetta.methods.streams import run_stream
from usetta.models import Model
from usetta.models.base import require_last_blocks
from usetta.models.devices import to_host
from usetta.prompts import DEFAULT_TEMPLATE, ENSEMBLE, ClassPrompts, expand_templates


@dataclass
class Episode:
    """The views of one image as the towers see them, the weak view first. Episodes of further views can be added."""

    features: Tensor
    """(N, D)"""
    reward_features: Tensor | None = None
    """(N, D'): by the reward model, if there is one."""
    hidden: Tensor | None = None
    """(N, tokens, width): what enters the last blocks of the tower, if that is needed."""
    pixels: Tensor | None = None
    """(N, 3, S, S): the views themselves, if they were asked for."""
    seconds: float = 0.0
    """Time it took to open the image, to make its views and to encode them."""
    encoded: bool = True
    """Whether an image tower was needed; otherwise all features came out of the cache."""

    def __len__(self) -> int:
        return len(self.features)

    def __add__(self, more: "Episode") -> "Episode":
        features = torch.cat([self.features, more.features])
        return Episode(
            features,
            _joined(self.reward_features, more.reward_features),
            _joined(self.hidden, more.hidden),
            _joined(self.pixels, more.pixels),
            self.seconds + more.seconds,
            self.encoded or more.encoded,
        )


def _joined(views: Tensor | None, more: Tensor | None) -> Tensor | None:
    return None if views is None or more is None else torch.cat([views, more])


def answer(
    recipe: Recipe,
    episodes: Sequence[Episode],
    model: Model,
    prompts: ClassPrompts,
    reward_prompts: ClassPrompts | None = None,
) -> list[Result]:
    """What `recipe` answers for each of several images: a result on the CPU, without the axis of the batch.

    `reward_prompts` are the prompts for the reward model, if that is not the model itself.
    """
    results: dict[int, Result] = {}
    batches: list[tuple[list[int], Result]] = []
    for count in dict.fromkeys(map(len, episodes)):  # images with equally many views share tensors
        rows = [row for row, episode in enumerate(episodes) if len(episode) == count]
        batch = _answer_batch(recipe, [episodes[row] for row in rows], model, prompts, reward_prompts)
        batches.append((rows, batch))
    names = [column.name for column in fields(Result)]
    columns = iter(to_host([getattr(batch, name) for _, batch in batches for name in names]))
    for rows, _ in batches:
        own = list(islice(columns, len(names)))
        _check_finite(recipe, Result(*own))
        results |= {row: Result(*(column[i] for column in own)) for i, row in enumerate(rows)}
    return [results[row] for row in range(len(episodes))]


def answer_stream(
    recipe: Recipe,
    episodes: Sequence[Episode],
    model: Model,
    prompts: ClassPrompts,
    reward_prompts: ClassPrompts | None,
    state: State | None,
    length: int | None = None,
) -> tuple[list[Result], State | None]:
    """The same for a recipe with a memory: images in the order of their stream, and the state after them.

    `state` is that before them, `length` that of the whole stream, where it is known.
    """
    results: list[Result] = []
    for _, equal in groupby(episodes, key=len):
        batch = list(equal)
        features, reward, hidden = _inputs(recipe, batch, model, prompts, reward_prompts)
        result, state = run_stream(
            recipe, features, prompts, model.logit_scale, state, length=length, reward=reward, hidden=hidden
        )
        own = to_host([getattr(result, column.name) for column in fields(Result)])
        _check_finite(recipe, Result(*own))
        results += [Result(*(column[i] for column in own)) for i in range(len(batch))]
    return results, state


def _check_finite(recipe: Recipe, result: Result) -> None:
    if not torch.isfinite(result.entropies).all():  # of the views before anything was tuned
        raise ValueError("features contain NaN or infinity")
    if not torch.isfinite(result.probs).all():
        raise diverged(recipe)


def _answer_batch(
    recipe: Recipe,
    episodes: Sequence[Episode],
    model: Model,
    prompts: ClassPrompts,
    reward_prompts: ClassPrompts | None,
) -> Result:
    features, reward, hidden = _inputs(recipe, episodes, model, prompts, reward_prompts)
    if features.shape[1] == 1 and not recipe.weak_only:  # the weak view settled it, see `adaptive`
        alone = run(replace(recipe, tune=NOTHING, readout="se", beta=1), features, prompts, model.logit_scale)
        return replace(alone, skipped=torch.full_like(alone.skipped, recipe.tunes))
    return run(recipe, features, prompts, model.logit_scale, reward=reward, hidden=hidden)


def _inputs(
    recipe: Recipe,
    episodes: Sequence[Episode],
    model: Model,
    prompts: ClassPrompts,
    reward_prompts: ClassPrompts | None,
) -> tuple[Tensor, Reward | None, Hidden | None]:
    """What methods run on, for images with equally many views."""
    features = torch.stack([episode.features for episode in episodes])
    hidden = None
    if recipe.needs_hidden:
        hidden = Hidden(
            require_last_blocks(model).last_blocks(),
            [episode.hidden for episode in episodes if episode.hidden is not None],
        )
    reward = None
    if recipe.needs_reward:
        seen = [e.features if e.reward_features is None else e.reward_features for e in episodes]
        reward = Reward(torch.stack(seen), (reward_prompts or prompts).features().to(features.device))
    return features, reward, hidden


def check(recipe: Recipe, model: Model, prompts: ClassPrompts, views: int) -> None:
    """Refuse a recipe that this model, these prompts or so few views cannot run, before any image is read."""
    check_views(recipe, views)
    if recipe.needs_hidden:
        require_last_blocks(model)
    if recipe.needs_prompts:
        try:
            prompts.check_tunable()
        except ValueError as error:
            raise _not_tunable(recipe, str(error)) from error


def check_without_model(recipe: Recipe, views: int, templates: Sequence[str]) -> None:
    """Refuse what no model could run, so that it is reported before one is loaded."""
    check_views(recipe, views)
    if len(expand_templates(templates)) > 1 and recipe.needs_prompts:
        raise _not_tunable(recipe, ENSEMBLE)


def _not_tunable(recipe: Recipe, reason: str) -> ValueError:
    hint = f"give one template with words before the name, such as {DEFAULT_TEMPLATE!r}"
    return ValueError(f"method '{recipe.name}' tunes the prompt, but {reason}; {hint}")


def check_views(recipe: Recipe, views: int) -> None:
    """Refuse a recipe that compares views where there is nothing to compare."""
    if views < 2 and recipe.compares_views:
        raise ValueError(f"method '{recipe.name}' compares views, so it needs at least 2, not {views}")
