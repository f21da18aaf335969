"""What methods that tune the prompt cost together, relative to one of them: for `benchmarks.speed`.

A text tower of ViT-B/16's size with random weights, 1000 classes, one image on 64 views that no method skips. Features
of the views are given, and text features and the graph at the initial prompt are made before the clock starts: both are
constants of a run. One method is TPT alone.
"""

from functools import cache, partial

import torch
from torch.nn.functional import normalize

from benchmarks.common import load
from usetta import methods
from usetta.methods.recipe import Recipe, run
from usetta.prompts import ClassPrompts
from usetta.timing import class_names, shortest_in_turns

FIVE = ("tpt", "c-tpt", "o-tpt", "r-tpt", "use:skip=false")
ABLATION = ("tpt", "tpt+uniform", "tpt+se", "rce:skip=false", "rce+uniform:skip=false", "use:skip=false")
"""The rows of the paper's ablation that tune: two ways of tuning, three readouts of each."""
ACTIVE = 64


@cache
def tuners(rounds: int) -> dict[str, float]:
    """Five methods, with all classes and with the active ones alone, and the ablation's six, each ÷ TPT alone."""
    model = load()
    prompts = ClassPrompts(model.text, class_names(1000))
    generator = torch.Generator().manual_seed(0)
    # Near the mean of the classes and each other, as views are, so that many classes have a say.
    views = prompts.features().mean(dim=0) + 0.02 * torch.randn(1, 64, model.embed_dim, generator=generator)
    features = normalize(views, dim=-1)

    def answer(recipes: list[Recipe]) -> None:
        with prompts.steps.kept():  # as `eval`, `compare` and the server do for the methods of an image
            for recipe in recipes:
                run(recipe, features, prompts, model.logit_scale)

    groups = {
        "five_tuners": [methods.get(name) for name in FIVE],
        "five_tuners_active": [methods.get(name, active=ACTIVE) for name in FIVE],
        "ablation": [methods.get(name) for name in ABLATION],
    }
    ways = [[methods.get("tpt")], *groups.values()]
    one, *together = shortest_in_turns([partial(answer, recipes) for recipes in ways], min(rounds, 2))
    return {name: taken / one for name, taken in zip(groups, together, strict=True)}
