"""Methods by name, and a grammar for the rest of the grid.

    use                      a named recipe
    tpt+se                   its tuning with another readout
    use:steps=4:gamma=0.2    with settings of your own
    r-tpt:neighbours=10      also with those that its readout, loss, tuner, selection rule or memory declares
    tda+se                   a method for streams: TDA's memory behind another readout
    tda:values=published     with the settings that were published for the dataset

A method that tunes nothing is nothing but its readout, so `+` goes with `clip` there: `clip+vote` is `zero`, and
`zero+se` is an error.

`names` are the methods that answer every image by itself, `stream_names` those that remember earlier images.

A recipe of your own joins by `register`, or from another package by an entry point of the group `usetta.methods` whose
object is a `Recipe`. Its loss, readout, tuner or selection rule, if new, is registered first in `LOSSES`, `READOUTS`,
`TUNERS` or `SELECTIONS`.
"""

import re
from dataclasses import replace
from typing import Any

from usetta.methods.named import ALIASES, FAMILIES, RECIPES, STREAM_RECIPES, Family, published_settings
from usetta.methods.recipe import LOSSES, MEMORIES, READOUTS, SELECTIONS, TUNERS, Recipe
from usetta.registry import Registry, suggest

__all__ = [
    "FAMILIES",
    "LOSSES",
    "MEMORIES",
    "METHODS",
    "READOUTS",
    "SELECTIONS",
    "TUNERS",
    "Family",
    "check_recipe",
    "get",
    "names",
    "register",
    "stream_names",
]


def check_recipe(name: str, recipe: Recipe) -> None:
    """Raise ValueError if a recipe cannot be registered under a name: the grammar must be able to write it."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"a method is a Recipe, not {recipe!r}")
    if recipe.name != name:
        raise ValueError(f"a recipe called '{recipe.name}' must be registered under that name, not '{name}'")
    if not re.fullmatch(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", name):
        raise ValueError(
            f"the name of a method has lower-case letters and digits, with '.', '_' or '-' between them, not {name!r}"
        )


METHODS: Registry[Recipe] = Registry("method", group="usetta.methods", check=check_recipe)
for _recipe in (*RECIPES, *STREAM_RECIPES):
    METHODS.register(_recipe.name, _recipe, *ALIASES.get(_recipe.name, ()))


def names() -> list[str]:
    """Names of the methods that have one of their own, without those for streams."""
    return [name for name, recipe in METHODS.items() if not recipe.remembers]


def stream_names() -> list[str]:
    """Names of the methods for streams, which remember earlier images."""
    return [name for name, recipe in METHODS.items() if recipe.remembers]


def register(recipe: Recipe) -> Recipe:
    """Add a recipe of your own to the named ones, for the rest of this process."""
    return METHODS.register(recipe.name, recipe)


def get(method: str | Recipe, *, family: str = "other", dataset: str = "", **settings: Any) -> Recipe:
    """The recipe of that name, with `settings` in place of its own; a recipe is taken as it is.

    `family` and `dataset` are those of the images: `values=published` are settings for one dataset.
    The result's name contains all settings that differ from the named recipe, so two rows of a table never share one.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family of datasets {family!r}; {suggest(family, FAMILIES)}")
    if isinstance(method, Recipe):
        return method.with_settings(settings) if settings else method
    head, *assignments = method.strip().lower().split(":")
    base, plus, readout = head.partition("+")
    recipe = METHODS.get(base)
    recipe = replace(recipe.with_settings(FAMILIES[family].settings.get(recipe.name, {})), name=recipe.name)
    if plus:
        recipe = _with_readout(recipe, readout)
    given = dict(map(_assignment, assignments))
    if "values" in given:
        recipe = _with_published(recipe, given.pop("values"), dataset)
    return recipe.with_settings(recipe.parse(given) | settings)


def _with_published(recipe: Recipe, values: str, dataset: str) -> Recipe:
    if values != "published":
        raise ValueError(f"values can be 'published', not {values!r}")
    other = recipe.with_settings(published_settings(recipe.memory, dataset))
    return replace(other, name=f"{recipe.name}:values=published")


def _with_readout(recipe: Recipe, readout: str) -> Recipe:
    READOUTS.get(readout)
    other = replace(recipe.with_settings({"readout": readout}), name=recipe.name)
    if other == recipe:
        return recipe
    if not recipe.tunes and not recipe.remembers and recipe.name != "clip":
        raise ValueError(
            f"'{recipe.name}' tunes nothing, so it cannot be combined with another readout; use 'clip+{readout}'"
        )
    for name in METHODS:
        known = METHODS[name]
        if replace(other, name=known.name, description=known.description) == known:
            return known
    description = f"{recipe.description.partition(';')[0]}; answers by {readout}"
    return replace(other, name=f"{recipe.name}+{readout}", description=description)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"a setting is written name=value, not {text!r}")
    return name, value
