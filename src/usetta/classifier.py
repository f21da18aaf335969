"""The two-line API: class names in, answers with their reasons out.

    classifier = Classifier(["tabby cat", "red fox"], method="se")
    classifier("photo.jpg").label

Pictures are taken one at a time through decoding, views and the image tower, so a picture's features never depend on
its neighbours; the recipe then runs on `batch_size` pictures together. A picture without an id of its own is known by
its content: the same pixels get the same views under any file name.
"""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from PIL import Image

from usetta import methods
from usetta.images import ImageError, ImageSource, open_image, picture_id
from usetta.models import Model, load_model
from usetta.progress import track
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts
from usetta.recipe import Recipe, Result, run
from usetta.views import ViewRecipe, make_views

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Prediction:
    """The answer for one picture, and why."""

    source: str
    """Where the picture came from: its path, or what kind of object it was."""
    classes: tuple[str, ...]
    probs: np.ndarray[Any, Any]
    """(C,): probability of each class, in the order of `classes`."""
    zero_shot: np.ndarray[Any, Any]
    """(C,): what the weak view alone says."""
    entropies: np.ndarray[Any, Any]
    """(N,): entropy in nats of each view's own prediction; view 0 is the weak view, the picture itself."""
    view_labels: tuple[str, ...]
    """(N,): the class each view would choose by itself."""
    chosen: tuple[int, ...]
    """The strong views that took part, most certain first."""
    delta: float | None
    """Share of the strong views that are less certain than the weak one; None without strong views."""
    beta: float
    """Weight of the weak view in the answer."""

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.classes[int(self.probs.argmax())]

    @property
    def confidence(self) -> float:
        """The probability of `label`."""
        return float(self.probs.max())

    def ranked(self, top: int | None = None) -> list[tuple[str, float]]:
        """The classes by falling probability, at most `top` of them."""
        order = np.argsort(-self.probs, kind="stable")[:top]
        return [(self.classes[i], float(self.probs[i])) for i in order]

    def as_dict(self, top: int | None = 5) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        weak = int(self.zero_shot.argmax())
        return {
            "source": self.source,
            "label": self.label,
            "probability": round(self.confidence, 6),
            "ranked": [{"label": label, "probability": round(p, 6)} for label, p in self.ranked(top)],
            "zero_shot": {"label": self.classes[weak], "probability": round(float(self.zero_shot[weak]), 6)},
            "why": {
                "delta": None if self.delta is None else round(self.delta, 6),
                "beta": round(self.beta, 6),
                "chosen_views": list(self.chosen),
                "chosen_labels": [self.view_labels[i] for i in self.chosen],
                "entropies": [round(float(h), 6) for h in self.entropies],
            },
        }


@dataclass(frozen=True)
class Explanation:
    """A prediction together with the views it was made from."""

    prediction: Prediction
    method: str
    views: np.ndarray[Any, Any]
    """(N, S, S, 3), uint8: the views as pictures, the weak one first."""

    def figure(self, shown: int = 24) -> "Figure":
        """The weak view, the `shown` most certain strong views and the probabilities, as a matplotlib figure."""
        from usetta.report.explain import draw

        return draw(self, shown)

    def save(self, path: str | os.PathLike[str], shown: int = 24) -> None:
        """Write the figure to `path`; the suffix chooses the format (PNG, SVG, PDF, JPEG)."""
        self.figure(shown).savefig(path)


class Classifier:
    """Classifies pictures into `classes`, with the conventions of scikit-learn where they fit.

    `model` is a name (see `usetta.list_models`), a weights file or a loaded model; `method` a name (see
    `usetta.methods.names`) or a recipe. `views` counts the weak view; `augmix` adds AugMix to the strong views, as the
    paper does on fine-grained data sets. `templates` holds one or more texts with `{}` for the class name.
    """

    def __init__(
        self,
        classes: Sequence[str],
        model: str | Model = "auto",
        method: str | Recipe = "se",
        *,
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        views: int = 64,
        augmix: bool = False,
        seed: int = 0,
        batch_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.recipe = methods.get(method)
        if views < 2 and not self.recipe.weak_only:
            raise ValueError(f"method '{self.recipe.name}' compares views, so it needs at least 2, not {views}")
        self.model = load_model(model) if isinstance(model, str) else model
        self.classes = tuple(classes)
        self.batch_size = batch_size
        self._prompts = ClassPrompts(self.model.text, classes, templates)
        self._view_recipe = ViewRecipe(views=views, size=self.model.image_size, augmix=augmix, seed=seed)

    @property
    def classes_(self) -> np.ndarray[Any, Any]:
        """The class names as an array, as scikit-learn's classifiers call them."""
        return np.array(self.classes)

    @overload
    def __call__(self, pictures: ImageSource, progress: bool | None = None) -> Prediction: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, pictures: Iterable[ImageSource], progress: bool | None = None) -> list[Prediction]: ...
    def __call__(
        self, pictures: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> Prediction | list[Prediction]:
        """A Prediction for one picture, a list of them for several; a picture that cannot be read raises ImageError."""
        answers = self._collect(_as_many(pictures), progress)
        return answers[0] if _is_one(pictures) else answers

    def predict(
        self, pictures: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The labels (n,) of the pictures."""
        return np.array([p.label for p in self._collect(_as_many(pictures), progress)])

    def predict_proba(
        self, pictures: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The probabilities (n, C) of the pictures, columns in the order of `classes_`."""
        answers = self._collect(_as_many(pictures), progress)
        return np.stack([p.probs for p in answers]) if answers else np.empty((0, len(self.classes)), np.float32)

    def explain(self, picture: ImageSource) -> Explanation:
        """The prediction for one picture together with its views, even where the method uses the weak one only."""
        return self.compare(picture, [self.recipe])[0]

    def compare(self, picture: ImageSource, recipes: Iterable[str | Recipe]) -> list[Explanation]:
        """What several methods say about one picture, all from one encoding of its views."""
        image = open_image(picture)
        pixels = make_views(image, picture_id(image), self._view_recipe)
        features = self.model.encode_images(pixels)[None]
        if pixels.dtype != torch.uint8:
            pixels = (pixels * 255).round().to(torch.uint8)
        shown = pixels.permute(0, 2, 3, 1).numpy()
        return [
            Explanation(self._answer([_name(picture)], features, recipe)[0], recipe.name, shown)
            for recipe in map(methods.get, recipes)
        ]

    def stream(self, pictures: Iterable[ImageSource]) -> Iterator[Prediction | ImageError]:
        """An answer for each picture, in order, as soon as it is known; a bad picture yields its error instead."""
        remaining = iter(pictures)
        while batch := list(islice(remaining, self.batch_size)):
            outcomes: dict[int, Prediction | ImageError] = {}
            features: dict[int, torch.Tensor] = {}
            for i, picture in enumerate(batch):
                try:
                    features[i] = self._features(picture)
                except ImageError as error:
                    outcomes[i] = error
            if features:
                sources = [_name(batch[i]) for i in features]
                answers = self._answer(sources, torch.stack(list(features.values())), self.recipe)
                outcomes |= zip(features, answers, strict=True)
            yield from (outcomes[i] for i in range(len(batch)))

    def _collect(self, pictures: Iterable[ImageSource], progress: bool | None) -> list[Prediction]:
        pictures = list(pictures)
        answers = []
        for outcome in track(self.stream(pictures), len(pictures), "Classifying", progress):
            if isinstance(outcome, ImageError):
                raise outcome
            answers.append(outcome)
        return answers

    def _features(self, picture: ImageSource) -> torch.Tensor:
        """Features (N, D) of the views of one picture."""
        image = open_image(picture)
        recipe = replace(self._view_recipe, views=1) if self.recipe.weak_only else self._view_recipe
        return self.model.encode_images(make_views(image, picture_id(image), recipe))

    def _answer(self, sources: list[str], features: torch.Tensor, recipe: Recipe) -> list[Prediction]:
        result = run(recipe, features, self._prompts.features(), self.model.logit_scale)
        return [self._prediction(source, result, i) for i, source in enumerate(sources)]

    def _prediction(self, source: str, result: Result, i: int) -> Prediction:
        delta = float(result.delta[i])
        return Prediction(
            source=source,
            classes=self.classes,
            probs=result.probs[i].cpu().numpy(),
            zero_shot=result.weak_probs[i].cpu().numpy(),
            entropies=result.entropies[i].cpu().numpy(),
            view_labels=tuple(self.classes[c] for c in result.view_labels[i].tolist()),
            chosen=tuple(result.chosen[i].tolist()),
            delta=None if np.isnan(delta) else delta,
            beta=float(result.beta[i]),
        )


def _is_one(pictures: object) -> bool:
    return isinstance(pictures, str | os.PathLike | bytes | bytearray | Image.Image | np.ndarray | io.IOBase)


def _as_many(pictures: Any) -> Iterable[ImageSource]:
    return [pictures] if _is_one(pictures) else pictures


def _name(picture: ImageSource) -> str:
    if isinstance(picture, str | os.PathLike):
        return str(Path(picture))
    return f"<{type(picture).__name__}>"
