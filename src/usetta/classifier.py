"""The two-line API: class names in, answers with their reasons out.

    classifier = Classifier(["tabby cat", "red fox"], method="use")
    classifier("photo.jpg").label

An image without an id of its own is known by its content: the same pixels get the same views under any file name.
"""

import io
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image

from usetta import methods
from usetta.adaptive import ADAPTIVE, Views, is_settled, most_views
from usetta.coop import load_context
from usetta.episode import Episode, answer, check
from usetta.feature_cache import FeatureCache
from usetta.images import ImageError, ImageSource
from usetta.methods.recipe import Recipe, Result
from usetta.methods.select import tuned_views
from usetta.models import Model, load_model
from usetta.models.devices import device_of
from usetta.pipeline import ImageRequest, Pipeline
from usetta.prediction import Explanation, ImageOrigin, Prediction
from usetta.progress import track
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts
from usetta.views import ViewRecipe
from usetta.views.show import as_bytes

_BLENDS = ("weak", "strong", "average", "uniform", "se")
"""Readouts that give the weak view a weight β and others 1 − β."""


class TextHead:
    """The text side of a classifier: prompts of a class list for a model, and predictions from episodes."""

    def __init__(
        self,
        classes: Sequence[str],
        model: Model,
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        context: torch.Tensor | None = None,
        reward_model: Model | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.model = model
        self.prompts = ClassPrompts(model.text, classes, templates, context)
        self._templates = templates
        self._reward_model = reward_model

    @cached_property
    def reward_prompts(self) -> ClassPrompts:
        """The prompts for the reward model: the words of the template, whatever context was learned."""
        return ClassPrompts((self._reward_model or self.model).text, self.classes, self._templates)

    @property
    def nbytes(self) -> int:
        """Memory of the prompts and of the graphs that tuning keeps."""
        # The attribute is asked through `vars`, because asking for the property would compute it.
        return self.prompts.nbytes + (self.reward_prompts.nbytes if "reward_prompts" in vars(self) else 0)

    def check(self, recipe: Recipe, views: int) -> None:
        """Refuse a recipe that cannot run, before any image is read."""
        check(recipe, self.model, self.prompts, views)

    def is_settled(self, features: torch.Tensor) -> bool:
        """Whether features (n, D) of the first views, on the CPU, leave no doubt, see `adaptive`."""
        return is_settled(features, self._features_on_host, self.model.logit_scale)

    @cached_property
    def _features_on_host(self) -> torch.Tensor:
        return self.prompts.features().cpu()

    def predict(
        self,
        recipe: Recipe,
        episodes: Sequence[Episode],
        names: Sequence[str],
        origins: Sequence[ImageOrigin] | None = None,
    ) -> list[Prediction]:
        """The predictions of `recipe` for images of these names."""
        known: Sequence[ImageOrigin | None] = origins or [None] * len(names)
        return [
            self._prediction(recipe, result, name, origin)
            for result, name, origin in zip(self.answer(recipe, episodes), names, known, strict=True)
        ]

    def answer(self, recipe: Recipe, episodes: Sequence[Episode]) -> list[Result]:
        """What `recipe` answers for each of several images, see `episode.answer`."""
        reward_prompts = self.reward_prompts if recipe.needs_reward else None
        return answer(recipe, episodes, self.model, self.prompts, reward_prompts)

    def _prediction(self, recipe: Recipe, result: Result, name: str, origin: ImageOrigin | None) -> Prediction:
        delta = float(result.delta)
        skipped = bool(result.skipped)
        tuned_on: tuple[int, ...] = ()
        if recipe.tunes and not skipped:
            tuned_on = tuple(tuned_views(recipe, result.entropies[None])[0].tolist())
        return Prediction(
            source=name,
            classes=self.classes,
            probs=result.probs.numpy(),
            zero_shot=result.weak_probs.numpy(),
            before=result.before.numpy() if recipe.tunes else None,
            skipped=skipped if recipe.tunes else None,
            tuned_on=tuned_on,
            entropies=result.entropies.numpy(),
            view_labels=tuple(self.classes[c] for c in result.view_labels.tolist()),
            chosen=tuple(result.chosen.tolist()),
            delta=None if np.isnan(delta) else delta,
            beta=float(result.weights[0]) if recipe.readout in _BLENDS else None,
            weights=result.weights.numpy(),
            origin=origin,
        )


class Classifier:
    """Classifies images into `classes`, with the conventions of scikit-learn where they fit.

    `model` is a name (see `usetta.list_models`), a weights file or a loaded model. A name is loaded to `device` in
    `precision`, "auto" being the fastest that agrees with fp32 on this machine; a loaded model stays as it is. `method`
    is a name (see `usetta.methods`, also for `tpt+se` and `use:steps=2`) or a recipe. `views` counts the weak view;
    "adaptive" means up to 64, but fewer where they leave no doubt (see `usetta.adaptive`). `augmix` adds AugMix to the
    strong views, as the paper does on fine-grained datasets. `templates` holds one or more texts with `{}` for the
    class name; a method that tunes the prompt takes one, with words before the name. `context` is a learned context
    for it (see `usetta.coop`). `reward_model` gives RLCF its rewards, which otherwise come from the model itself.
    `cache` is a folder that keeps features of views. `batch_size` images are answered together, by default 1 on a CPU
    and 8 elsewhere; `threads` make views.
    """

    def __init__(
        self,
        classes: Sequence[str],
        model: str | Model = "auto",
        method: str | Recipe = "se",
        *,
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        context: torch.Tensor | str | os.PathLike[str] | None = None,
        reward_model: str | Model | None = None,
        views: Views = ADAPTIVE,
        augmix: bool = False,
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        cache: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        threads: int = 2,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        most = most_views(views)
        self.recipe = methods.get(method)

        def load(name: str | Model, device: str) -> Model:
            return load_model(name, device=device, precision=precision) if isinstance(name, str) else name

        self.model = load(model, device)
        self.classes = tuple(classes)
        if isinstance(context, str | os.PathLike):
            context = load_context(context, self.model)
        # A reward model by name goes where the model is.
        beside = str(device_of(self.model)) if device == "auto" else device
        reward = None if reward_model is None else load(reward_model, beside)
        self._head = TextHead(classes, self.model, templates, context, reward)
        self._head.check(self.recipe, most)
        self._views = ViewRecipe(views=most, size=self.model.image_size, augmix=augmix, seed=seed)
        self._adaptive = views == ADAPTIVE
        features = None if cache is None else FeatureCache(Path(cache).expanduser())
        self._pipeline = Pipeline(self.model, reward_model=reward, cache=features, threads=threads)
        self.batch_size = batch_size or self._pipeline.images_at_once

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:3]) + (", …" if len(self.classes) > 3 else "")
        views = ADAPTIVE if self._adaptive else self._views.views
        device, precision = (getattr(self.model, name, "?") for name in ("device", "precision"))
        return (
            f"<Classifier {self.recipe.name} by {self.model.name} ({device}, {precision}), {views} views, "
            f"{len(self.classes)} classes: {names}>"
        )

    @property
    def classes_(self) -> np.ndarray[Any, Any]:
        """The class names as an array, as scikit-learn's classifiers call them."""
        return np.array(self.classes)

    @overload
    def __call__(self, images: ImageSource, progress: bool | None = None) -> Prediction: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, images: Iterable[ImageSource], progress: bool | None = None) -> list[Prediction]: ...
    def __call__(
        self, images: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> Prediction | list[Prediction]:
        """A Prediction for one image, a list of them for several; an image that cannot be read raises ImageError."""
        predictions = self._collect(_as_many(images), progress)
        return predictions[0] if _is_one(images) else predictions

    def predict(
        self, images: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The labels (n,) of the images."""
        return np.array([p.label for p in self._collect(_as_many(images), progress)])

    def predict_proba(
        self, images: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The probabilities (n, C) of the images, columns in the order of `classes_`."""
        predictions = self._collect(_as_many(images), progress)
        return np.stack([p.probs for p in predictions]) if predictions else np.empty((0, len(self.classes)), np.float32)

    def explain(self, image: ImageSource) -> Explanation:
        """The prediction for one image together with its views, even where the method uses the weak one only."""
        return self.compare(image, [self.recipe])[0]

    def compare(self, image: ImageSource, recipes: Iterable[str | Recipe]) -> list[Explanation]:
        """What several methods answer for one image, all from one encoding of its views."""
        wanted = [methods.get(recipe) for recipe in recipes]
        for recipe in wanted:
            self._head.check(recipe, self._views.views)
        request = self._request(image, wanted, self._views, keep_pixels=True)
        (episode,) = self._pipeline.stream([request])
        if isinstance(episode, ImageError):
            raise episode
        assert episode.pixels is not None
        views = as_bytes(episode.pixels)
        origin = ImageOrigin(image, self._views)
        predictions = [self._head.predict(recipe, [episode], [_name(image)], [origin])[0] for recipe in wanted]
        return [Explanation(p, recipe.name, views) for p, recipe in zip(predictions, wanted, strict=True)]

    def stream(
        self, images: Iterable[ImageSource | Callable[[], ImageSource]]
    ) -> Generator[Prediction | ImageError, None, None]:
        """A prediction for each image, in order, as soon as it is known; an unreadable image yields its error instead.

        The next images are opened while this one is encoded, so `images` is read a few items ahead. An image may also
        be a function that fetches it.
        """
        # Methods that need the weak view alone get one; for them there is nothing to be adaptive about.
        views = replace(self._views, views=1) if self.recipe.weak_only else self._views
        origins: list[ImageOrigin] = []  # of the images under way

        def requests() -> Iterator[ImageRequest]:
            for image in images:
                origins.append(ImageOrigin(image, views))
                yield self._request(image, [self.recipe], views)

        with closing(self._pipeline.stream(requests())) as outcomes:
            while batch := list(islice(outcomes, self.batch_size)):
                episodes = [outcome for outcome in batch if isinstance(outcome, Episode)]
                own = [origin for origin, outcome in zip(origins, batch, strict=False) if isinstance(outcome, Episode)]
                del origins[: len(batch)]
                predictions = iter(self._head.predict(self.recipe, episodes, [_name(o.source) for o in own], own))
                for outcome in batch:
                    yield outcome if isinstance(outcome, ImageError) else next(predictions)

    def _request(
        self,
        image: ImageSource | Callable[[], ImageSource],
        recipes: Sequence[Recipe],
        views: ViewRecipe,
        *,
        keep_pixels: bool = False,
    ) -> ImageRequest:
        return ImageRequest(
            image,
            views,
            settled=self._head.is_settled if self._adaptive and views.views > 1 else None,
            hidden=any(recipe.needs_hidden for recipe in recipes),
            reward=any(recipe.needs_reward for recipe in recipes),
            keep_pixels=keep_pixels,
            part_of=self._views,
        )

    def _collect(self, images: Iterable[ImageSource], progress: bool | None) -> list[Prediction]:
        images = list(images)
        predictions = []
        for outcome in track(self.stream(images), len(images), "Classifying", progress):
            if isinstance(outcome, ImageError):
                raise outcome
            predictions.append(outcome)
        return predictions


def _name(source: object) -> str:
    """What an image is called in a prediction."""
    if isinstance(source, str | os.PathLike):
        return str(Path(source))
    return f"<{type(source).__name__}>"


def _is_one(images: object) -> bool:
    return isinstance(images, str | os.PathLike | bytes | bytearray | Image.Image | np.ndarray | io.IOBase)


def _as_many(images: Any) -> Iterable[ImageSource]:
    return [images] if _is_one(images) else images
