"""What may change at test time? Everything that is tuned starts afresh with the next image.

A tuner is a class in `TUNERS`. Those of the text are between the text features and what is tuned (`TextTuner`), and
share the loop of `steps`; LoRA moves the features of the views instead. A tuner declares what it `needs`: `prompts`,
the features of the `text`, or `hidden` states of the image tower.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from usetta.methods.losses import Reward
from usetta.methods.stats import ViewStats
from usetta.methods.tune.lora import Hidden, LoraTuner, tune_images
from usetta.methods.tune.prompt import PromptTuner
from usetta.methods.tune.shift import ShiftTuner
from usetta.methods.tune.spectrum import SpectrumTuner
from usetta.methods.tune.steps import TextTuner, tune_text
from usetta.prompts import ClassPrompts
from usetta.registry import Registry

if TYPE_CHECKING:
    from usetta.methods.recipe import Recipe

__all__ = ["TUNERS", "Hidden", "TextTuner", "tune"]

TUNERS: Registry[type[TextTuner] | type[LoraTuner]] = Registry("tuner")
TUNERS.register("prompt", PromptTuner)
TUNERS.register("shift", ShiftTuner)
TUNERS.register("spectrum", SpectrumTuner)
TUNERS.register("lora", LoraTuner)


def tune(
    recipe: "Recipe",
    stats: ViewStats,
    features: Tensor,
    text: ClassPrompts | Tensor,
    logit_scale: float,
    *,
    reward: Reward | None,
    hidden: Hidden | None,
) -> tuple[ViewStats, Tensor, Tensor]:
    """Statistics and features (B, N, D) of the views after tuning, and which images were skipped (B,).

    `stats` and `features` are those before; `text` the prompts of the classes or, if no context is tuned, their
    features (C, D). Without a `reward` model the model rewards itself, by `features` and the text before tuning.
    """
    if hidden is not None and recipe.needs_hidden:
        return tune_images(recipe, stats, features, text, logit_scale, hidden, reward)
    tuned, skipped = tune_text(recipe, stats, features, text, logit_scale, reward)
    return tuned, features, skipped
