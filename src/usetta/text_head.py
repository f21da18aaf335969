"""The text side of a classifier, which `Classifier`, `evaluate` and `serve` share: from episodes to predictions."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from usetta.adaptive import is_settled
from usetta.answer_warnings import chance_warning, class_warnings, is_near_chance
from usetta.episode import Episode, answer, answer_stream, check
from usetta.methods.recipe import Recipe, Result
from usetta.methods.select import tuned_views
from usetta.models import Model
from usetta.models.towers import TwoTowers
from usetta.prediction import ImageOrigin, Prediction
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts
from usetta.stream_memory import StreamMemory
from usetta.text_cache import TextCache

_BLENDS = ("weak", "strong", "average", "uniform", "se")
"""Readouts that give the weak view a weight β and others 1 − β."""


class TextHead:
    """The text side of a classifier: prompts of a class list for a model, and predictions from episodes.

    If `cached`, the text features of long lists are kept on disk for the next process.
    """

    def __init__(
        self,
        classes: Sequence[str],
        model: Model,
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        context: torch.Tensor | None = None,
        reward_model: Model | None = None,
        *,
        cached: bool = False,
    ) -> None:
        self.classes = tuple(classes)
        self.model = model
        cache = _text_cache(model) if cached else None
        self.prompts = ClassPrompts(model.text, classes, templates, context, cache)
        self._templates = templates
        self._reward_model = reward_model

    @cached_property
    def reward_prompts(self) -> ClassPrompts:
        """The prompts for the reward model: the words of the template, whatever context was learned."""
        return ClassPrompts((self._reward_model or self.model).text, self.classes, self._templates)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What is doubtful about the class names, see `answer_warnings`; it takes their text features."""
        return class_warnings(self.classes, self.model, self.prompts.features())

    @property
    def nbytes(self) -> int:
        """Memory of the prompts and of the graphs that tuning keeps."""
        # The attribute is asked through `vars`, because asking for the property would compute it.
        return self.prompts.nbytes + (self.reward_prompts.nbytes if "reward_prompts" in vars(self) else 0)

    def check(self, recipe: Recipe, views: int) -> None:
        """Refuse a recipe that cannot run, before any image is read."""
        check(recipe, self.model, self.prompts, views)

    def is_settled(self, features: torch.Tensor, **how: Any) -> bool:
        """Whether features (n, D) of the first views, on the CPU, are enough, see `adaptive.is_settled`."""
        return is_settled(features, self._features_on_host, self.model.logit_scale, **how)

    @cached_property
    def _features_on_host(self) -> torch.Tensor:
        return self.prompts.features().cpu()

    def predict(
        self,
        recipe: Recipe,
        episodes: Sequence[Episode],
        names: Sequence[str],
        origins: Sequence[ImageOrigin] | None = None,
        memory: StreamMemory | None = None,
        length: int | None = None,
    ) -> list[Prediction]:
        """The predictions of `recipe` for images of these names; `memory` and `length` as in `answer`."""
        known: Sequence[ImageOrigin | None] = origins or [None] * len(names)
        seen = memory.seen if memory else None
        results = self.answer(recipe, episodes, memory, length)
        return [
            self._prediction(recipe, result, name, origin, None if seen is None else seen + i)
            for i, (result, name, origin) in enumerate(zip(results, names, known, strict=True))
        ]

    def answer(
        self,
        recipe: Recipe,
        episodes: Sequence[Episode],
        memory: StreamMemory | None = None,
        length: int | None = None,
    ) -> list[Result]:
        """What `recipe` answers for each of several images, see `episode.answer`.

        A recipe for streams needs its `memory`, which takes in the images in their order; `length` is how many there
        will be, where that is known.
        """
        reward_prompts = self.reward_prompts if recipe.needs_reward else None
        if not recipe.remembers:
            return answer(recipe, episodes, self.model, self.prompts, reward_prompts)
        if memory is None:
            raise ValueError(f"method '{recipe.name}' remembers earlier images, so it needs a memory")
        results, memory.state = answer_stream(
            recipe, episodes, self.model, self.prompts, reward_prompts, memory.state, length
        )
        memory.seen += len(results)
        return results

    def _prediction(
        self, recipe: Recipe, result: Result, name: str, origin: ImageOrigin | None, remembered: int | None
    ) -> Prediction:
        delta, count = float(result.delta), len(self.classes)
        chance = (chance_warning(count),) if is_near_chance(float(result.probs.max()), count) else ()
        skipped = bool(result.skipped)
        tuned_on: tuple[int, ...] = ()
        if recipe.tunes and not skipped:
            tuned_on = tuple(tuned_views(recipe, result.entropies[None])[0].tolist())
        return Prediction(
            source=name,
            classes=self.classes,
            probs=result.probs.numpy(),
            zero_shot=result.weak_probs.numpy(),
            before=result.before.numpy() if recipe.tunes or recipe.remembers else None,
            skipped=skipped if recipe.tunes else None,
            tuned_on=tuned_on,
            entropies=result.entropies.numpy(),
            view_labels=tuple(self.classes[c] for c in result.view_labels.tolist()),
            chosen=tuple(result.chosen.tolist()),
            delta=None if np.isnan(delta) else delta,
            beta=float(result.weights[0]) if recipe.readout in _BLENDS else None,
            weights=result.weights.numpy(),
            warnings=self.warnings + chance,
            remembered=remembered,
            origin=origin,
        )


def _text_cache(model: Model) -> TextCache | None:
    """The cache of a model, if all that its text features depend on is known, and a CPU computes them."""
    if isinstance(model, TwoTowers) and isinstance(model.text, nn.Module) and model.device.type == "cpu":
        return TextCache(model.text, model.describe())
    return None
