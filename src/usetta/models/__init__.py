"""Towers and weights: CLIP written here, adapters for other hub models, and how to load either by name."""

from usetta.models.base import Model, ModelError, TextTower
from usetta.models.builtin import pull_model
from usetta.models.registry import list_models, load_model

__all__ = ["Model", "ModelError", "TextTower", "list_models", "load_model", "pull_model"]
