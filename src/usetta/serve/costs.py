"""What a request may cost: known before it is accepted, in views that go through the image tower.

A view is the natural unit, because on every machine it takes most of the time. Tuning is counted as the views that take
as long, measured with ViT-B/16. Settings that a stranger could make so large that memory or numbers give out are
bounded here, too; in Python and on the command line there are no such bounds.
"""

import math
from collections.abc import Sequence

from usetta.methods.recipe import Recipe
from usetta.serve.schemas import ApiError
from usetta.serve.settings import Limits
from usetta.stream_memory import most_bytes

_CLASSES_PER_VIEW = 13
"""Classes whose prompts are encoded, and differentiated, in the time of a view."""
_LARGEST = {"lr": 10.0, "weight_decay": 10.0, "dispersion": 1000.0}
_LARGEST_COUNT, _LARGEST_NUMBER = 1000, 1e6
"""Of other settings, `seed` and the `length` of a stream apart."""
_MEMORY_PER_VIEW = 2**26
"""Bytes of a stream's memory that are read and written in the time of a view."""


def check_settings(recipe: Recipe, limits: Limits, field: str) -> None:
    """Refuse settings beyond what strangers may ask for."""
    if recipe.tunes and recipe.steps > limits.steps:
        message = f"{field}: {recipe.steps} steps are more than the limit of {limits.steps}"
        raise ApiError(422, "invalid_method", message, field=field)
    for name, value in recipe.settings.items():
        if isinstance(value, str | bool) or name in ("seed", "length"):
            continue
        largest = _LARGEST.get(name, _LARGEST_COUNT if isinstance(value, int) else _LARGEST_NUMBER)
        if value > largest:
            message = f"{field}: {name}={value:g} is more than this server allows, {largest:g}"
            raise ApiError(422, "invalid_method", message, field=field)


def check_memory(recipe: Recipe, classes: int, nbytes: float, most: int) -> None:
    """Refuse a stream whose memory, of at most `nbytes`, would not fit."""
    if nbytes == math.inf:
        hint = ", such as 'ecalp:nodes=1000'" if recipe.memory == "ecalp" else ""
        message = f"method: the memory of '{recipe.name}' grows with the stream; a server needs a bound{hint}"
        raise ApiError(422, "invalid_method", message, field="method")
    if nbytes > most:
        message = (
            f"method: the memory of '{recipe.name}' for {classes} classes takes {nbytes / 1e6:,.0f} MB, more than the "
            f"{most / 1e6:,.0f} MB that this server has for sessions: ask for fewer classes or less capacity"
        )
        raise ApiError(422, "too_costly", message, field="method")


def cost(
    recipes: Sequence[Recipe], views: int, classes: int, images: int, *, dim: int = 0, reward_model: bool = False
) -> int:
    """Work for a request: encoding `views` of each image, what each recipe tunes, and what it remembers.

    `dim`: length of the features, which sizes of memories depend on.
    """
    views = 1 if all(recipe.weak_only for recipe in recipes) else views
    towers = 2 if reward_model and any(recipe.needs_reward for recipe in recipes) else 1
    per_image = towers * views
    for recipe in recipes:
        if recipe.needs_hidden:  # forth and back through the last blocks, and forth again
            per_image += recipe.steps * views
        elif recipe.needs_prompts:
            per_image += recipe.steps * -(-min(recipe.active or classes, classes) // _CLASSES_PER_VIEW)
        if recipe.remembers and (nbytes := most_bytes(recipe, classes, dim)) < math.inf:
            per_image += int(nbytes / _MEMORY_PER_VIEW)
    return images * per_image


def check_cost(total: int, limits: Limits) -> None:
    """Refuse what would take too long."""
    if total > limits.cost:
        message = (
            f"the request costs as much as encoding {total} views, more than the limit of {limits.cost}: "
            "ask for fewer images, views, steps or methods"
        )
        raise ApiError(422, "too_costly", message)
