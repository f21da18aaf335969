"""usetta: CLIP-like models that classify images better at test time, without labels.

    >>> from usetta import Classifier
    >>> classifier = Classifier(["tabby cat", "red fox", "golden retriever"], method="se")
    >>> classifier("photo.jpg").label

or `usetta.classify("photo.jpg", ["tabby cat", "red fox"])` for a single call.

The public names are loaded when they are first used, so that importing the package (and `usetta --help`) is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from usetta import methods
    from usetta.answer_warnings import AnswerWarning
    from usetta.classifier import Classifier, classify
    from usetta.images import ImageError
    from usetta.methods.recipe import Recipe
    from usetta.models import ModelError, list_models, load_model
    from usetta.models.objects import from_open_clip
    from usetta.prediction import Explanation, Prediction

_HOME = {
    "AnswerWarning": "usetta.answer_warnings",
    "Classifier": "usetta.classifier",
    "Explanation": "usetta.prediction",
    "ImageError": "usetta.images",
    "ModelError": "usetta.models",
    "Prediction": "usetta.prediction",
    "Recipe": "usetta.methods.recipe",
    "classify": "usetta.classifier",
    "from_open_clip": "usetta.models.objects",
    "list_models": "usetta.models",
    "load_model": "usetta.models",
    "methods": "usetta",
}

__all__ = [
    "AnswerWarning",
    "Classifier",
    "Explanation",
    "ImageError",
    "ModelError",
    "Prediction",
    "Recipe",
    "__version__",
    "classify",
    "from_open_clip",
    "list_models",
    "load_model",
    "methods",
]


def __getattr__(name: str) -> Any:
    if name == "methods":
        return import_module("usetta.methods")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'usetta' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
