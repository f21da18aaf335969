"""The weak view of an image and its strong views (AugMix: Hendrycks et al., 2020).

`recipe` says which views there are and draws what is random about them; `make` and `augmix` turn draws into pixels.
"""

from usetta.views.augmix import Operation
from usetta.views.make import apply_view, make_views, weak_view
from usetta.views.recipe import (
    MAX_VIEWS,
    Interpolation,
    ResizeMode,
    ViewDraw,
    ViewRandom,
    ViewRecipe,
    draw_view,
    draw_views,
)

__all__ = [
    "MAX_VIEWS",
    "Interpolation",
    "Operation",
    "ResizeMode",
    "ViewDraw",
    "ViewRandom",
    "ViewRecipe",
    "apply_view",
    "draw_view",
    "draw_views",
    "make_views",
    "weak_view",
]
