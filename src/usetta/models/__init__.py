"""Towers and weights: CLIP written here, adapters for other hub models, and how to load either by name."""

from usetta.models.base import Model, ModelError, TextTower
from usetta.models.registry import LoadOptions, ModelEntry, list_models, load_model, pull_model, register_model

__all__ = [
    "LoadOptions",
    "Model",
    "ModelEntry",
    "ModelError",
    "TextTower",
    "list_models",
    "load_model",
    "pull_model",
    "register_model",
]
