"""Class names × templates → text features, computed once and kept.

Names are cleaned as CLIP's benchmarks do: underscores become spaces, nothing else changes (the tokenizer lower-cases by
itself). Several templates make an ensemble: features are averaged over templates, each of unit length, and brought
back to unit length. Two equal names are allowed (ImageNet has "missile" twice): they get equal probabilities.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from usetta.models.base import TextTower

DEFAULT_TEMPLATE = "a photo of a {}."
_CHUNK = 64  # texts encoded at once, so that 1000 classes need no more memory than 64


class ClassPrompts:
    """The prompts of a list of classes for one text tower."""

    def __init__(
        self, tower: TextTower, classes: Sequence[str], templates: str | Sequence[str] = DEFAULT_TEMPLATE
    ) -> None:
        templates = [templates] if isinstance(templates, str) else list(templates)
        _check_classes(classes)
        _check_templates(templates)
        names = [name.replace("_", " ") for name in classes]
        self._tower = tower
        self._ids = [tower.tokenize([template.replace("{}", name) for name in names]) for template in templates]
        self._features: Tensor | None = None

    def features(self) -> Tensor:
        """Unit-length text features (C, D), in the order of the classes."""
        if self._features is None:
            with torch.inference_mode():
                total = torch.stack([self._encode(ids) for ids in self._ids]).mean(dim=0)
            self._features = torch.nn.functional.normalize(total, dim=-1).clone()
        return self._features

    def _encode(self, ids: Tensor) -> Tensor:
        return torch.cat([self._tower.encode(self._tower.embed(part), part) for part in torch.split(ids, _CHUNK)])


def _check_classes(classes: Sequence[str]) -> None:
    if isinstance(classes, str):
        raise ValueError(f"classes must be a list of names, not one string ({classes!r})")
    if not classes:
        raise ValueError("there must be at least one class")
    for position, name in enumerate(classes, start=1):
        if not isinstance(name, str):
            raise ValueError(f"class {position} is not a name but {name!r}")
        if not name.replace("_", " ").strip():
            raise ValueError(f"class {position} has an empty name")


def _check_templates(templates: Sequence[str]) -> None:
    if not templates:
        raise ValueError("there must be at least one template")
    for template in templates:
        if template.count("{}") != 1:
            raise ValueError(
                f"a template holds '{{}}' once, where the class name goes; this one does not: {template!r}"
            )
