"""The named recipes. A name is all a user needs: `get("se")`, `get("se", gamma=0.2)`."""

import difflib
from dataclasses import fields, replace
from typing import Any

from usetta.recipe import ADAPTIVE, UNIFORM, Recipe

_METHODS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("clip", "zero-shot CLIP: the weak view alone", beta=1),
        Recipe("strong", "the mean of the most certain strong views, without the weak one", beta=0),
        Recipe("average", "half the weak view, half the most certain strong views", beta=0.5),
        Recipe("uniform", "the plain mean of the weak view and the most certain strong views", beta=UNIFORM),
        Recipe("se", "self-ensembling: the weak view counts more where it is more certain than others", beta=ADAPTIVE),
    )
}


def names() -> list[str]:
    """Names of all methods."""
    return list(_METHODS)


def get(method: str | Recipe, **settings: Any) -> Recipe:
    """The recipe of that name, with `settings` in place of its own; a recipe is taken as it is."""
    recipe = method if isinstance(method, Recipe) else _find(method)
    known = {field.name for field in fields(Recipe)}
    for setting in settings:
        if setting not in known:
            raise ValueError(f"method '{recipe.name}' has no setting {setting!r}{_did_you_mean(setting, known)}")
    return replace(recipe, **settings)


def _find(name: str) -> Recipe:
    found = _METHODS.get(name.strip().lower())
    if found is None:
        raise ValueError(f"unknown method {name!r}{_did_you_mean(name.lower(), _METHODS)}")
    return found


def _did_you_mean(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(sorted(known))}"
