"""The two-line API: class names in, answers with their reasons out.

    classifier = Classifier(["tabby cat", "red fox"], method="use")
    classifier("photo.jpg").label

An image without an id of its own is known by its content: the same pixels get the same views under any file name.
"""

import inspect
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image

from usetta import methods
from usetta.adaptive import ADAPTIVE, Views, accepted_changes, least_views, most_views
from usetta.answer_warnings import AnswerWarning, chance_warning, is_near_chance
from usetta.coop import load_context
from usetta.episode import Episode
from usetta.feature_cache import FeatureCache
from usetta.images import SOURCES, ImageError, ImageSource, is_web_address
from usetta.methods.recipe import Recipe
from usetta.models import Model, load_model
from usetta.models.base import view_recipe
from usetta.models.devices import device_of
from usetta.models.objects import as_model
from usetta.pipeline import ImageRequest, Pipeline
from usetta.prediction import Comparison, Explanation, ImageOrigin, Prediction
from usetta.progress import track
from usetta.prompts import DEFAULT_TEMPLATE
from usetta.rejection import NONE_OF_THESE, Calibration, Score, make_rejection
from usetta.stream_memory import StreamMemory
from usetta.text_head import TextHead
from usetta.views import ViewRecipe
from usetta.views.show import as_bytes
from usetta.web import FetchError, fetch

_MAX_BYTES = 2**28
"""Of an image that is fetched."""


class Classifier:
    """Classifies images into `classes`, with the conventions of scikit-learn where they fit.

    `model` is a name (see `usetta.list_models`), a weights file or a loaded model: of this package, of open_clip as
    `(model, preprocess, tokenizer)`, or CLIP or SigLIP of transformers as `(model, processor)`. A name is loaded to
    `device` in `precision`, "auto" being the fastest that agrees with fp32 on this machine; a loaded model stays as it
    is. `method`
    is a name (see `usetta.methods`, also for `tpt+se` and `use:steps=2`) or a recipe. `views` counts the weak view;
    "adaptive" means up to 64, but fewer where they leave no doubt (see `usetta.adaptive`). `augmix` adds AugMix to the
    strong views, as the paper does on fine-grained datasets. `templates` holds one or more texts with `{}` for the
    class name; a method that tunes the prompt takes one, with words before the name. `context` is a learned context
    for it (see `usetta.coop`). `reward_model` gives RLCF its rewards, which otherwise come from the model itself.
    `cache` is a folder that keeps features of views. `batch_size` images are answered together, by default 1 on a CPU
    and 8 elsewhere; `threads` make views. Images of more than `max_pixels` are refused (default: 100 million).
    `allow_urls` lets images be fetched by http and https. Answers with a score below `reject_below` are rejected as
    none of the classes (`Prediction.rejected`): `reject` is the score, "confidence", "margin" or "entropy", see
    `usetta.rejection`; `calibration` is a file of `usetta calibrate`, which has a threshold of its own.

    Answers that should not be trusted come with an `AnswerWarning`, see `usetta.answer_warnings`.
    """

    def __init__(
        self,
        classes: Sequence[str],
        model: str | Model | object = "auto",
        method: str | Recipe = "se",
        *,
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        context: torch.Tensor | str | os.PathLike[str] | None = None,
        reward_model: str | Model | object | None = None,
        views: Views = ADAPTIVE,
        augmix: bool = False,
        seed: int = 0,
        device: str = "auto",
        precision: str = "auto",
        cache: str | os.PathLike[str] | None = None,
        batch_size: int | None = None,
        threads: int = 2,
        max_pixels: int | None = None,
        allow_urls: bool = False,
        reject: Score | None = None,
        reject_below: float | None = None,
        calibration: Calibration | str | os.PathLike[str] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        most = most_views(views)
        self.recipe = methods.get(method)

        def load(given: object, device: str) -> Model:
            if isinstance(given, str | os.PathLike):
                return load_model(str(given), device=device, precision=precision)
            return as_model(given)

        self.model = load(model, device)
        self.classes = tuple(classes)
        if isinstance(context, str | os.PathLike):
            context = load_context(context, self.model)
        # A reward model by name goes where the model is.
        beside = str(device_of(self.model)) if device == "auto" else device
        reward = None if reward_model is None else load(reward_model, beside)
        self._head = TextHead(classes, self.model, templates, context, reward, cached=True)
        self._head.check(self.recipe, most)
        self._rejection = None
        if not (reject is None and reject_below is None and calibration is None):
            known = {"model": self.model.name, "fingerprint": self.model.fingerprint, "method": self.recipe.name}
            self._rejection = make_rejection(reject, reject_below, calibration, **known)
        self._memory = StreamMemory(self.recipe, self.model, self.classes) if self.recipe.remembers else None
        self._views = view_recipe(self.model, most, augmix=augmix, seed=seed)
        self._adaptive = views if isinstance(views, str) else None
        self._max_pixels = max_pixels
        features = None if cache is None else FeatureCache(Path(cache).expanduser())
        self._allow_urls = allow_urls
        self._warned = False
        self._pipeline = Pipeline(self.model, reward_model=reward, cache=features, threads=threads)
        self.batch_size = batch_size or self._pipeline.images_at_once

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:3]) + (", …" if len(self.classes) > 3 else "")
        views = self._adaptive or self._views.views
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
        """The labels (n,) of the images; "none of these" where the answer is rejected."""
        predictions = self._collect(_as_many(images), progress)
        return np.array([NONE_OF_THESE if p.rejected else p.label for p in predictions])

    def predict_proba(
        self, images: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The probabilities (n, C) of the images, columns in the order of `classes_`."""
        predictions = self._collect(_as_many(images), progress)
        return np.stack([p.probs for p in predictions]) if predictions else np.empty((0, len(self.classes)), np.float32)

    def explain(self, image: ImageSource) -> Explanation:
        """The prediction for one image together with its views, even where the method uses the weak one only."""
        return self.compare(image, [self.recipe])[0]

    def compare(self, image: ImageSource, recipes: Iterable[str | Recipe]) -> Comparison:
        """What several methods answer for one image, all from one encoding of its views."""
        wanted = [methods.get(recipe) for recipe in recipes]
        for recipe in wanted:
            self._head.check(recipe, self._views.views)
        source = self._source(image)
        request = self._request(source, wanted, self._views, keep_pixels=True)
        (episode,) = self._pipeline.stream([request])
        if isinstance(episode, ImageError):
            raise episode
        assert episode.pixels is not None
        views = as_bytes(episode.pixels)
        origin = ImageOrigin(source, self._views)
        with self._head.prompts.steps.kept():
            predictions = [
                replace(
                    self._head.predict(recipe, [episode], [_name(image)], [origin], self._copied_memory(recipe), 1)[0],
                    rejection=self._rejection,
                )
                for recipe in wanted
            ]
        self._warn(predictions[:1])
        return Comparison(Explanation(p, recipe.name, views) for p, recipe in zip(predictions, wanted, strict=True))

    def stream(
        self, images: Iterable[ImageSource | Callable[[], ImageSource]]
    ) -> Generator[Prediction | ImageError, None, None]:
        """A prediction for each image, in order, as soon as it is known; an unreadable image yields its error instead.

        A method for streams, such as `tda`, learns from every image that it answers, here and in all other calls but
        `explain` and `compare`; `reset` makes it forget, `save_state` and `load_state` carry its memory over to another
        process. A classifier is one stream: what one user's images teach it changes the answers to the next user.

        The next images are opened while this one is encoded, so `images` is read a few items ahead. An image may also
        be a function that fetches it. What is doubtful about a single answer is in its `warnings` only.
        """
        with closing(self._stream(images)) as outcomes:
            for outcome in outcomes:
                self._warn()
                yield outcome

    @property
    def seen(self) -> int:
        """Images that a method for streams has learned from; 0 for other methods."""
        return self._memory.seen if self._memory else 0

    def reset(self) -> None:
        """Forget all images."""
        self._stream_memory().reset()

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write what the method has learned from images so far to a file."""
        self._stream_memory().save(Path(path))

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Go on where the classifier stopped that wrote this file; it must have had the same method and classes."""
        self._stream_memory().load(Path(path), device_of(self.model))

    def _stream_memory(self) -> StreamMemory:
        if self._memory is None:
            raise ValueError(f"method '{self.recipe.name}' answers every image by itself, so it has no state")
        return self._memory

    def _copied_memory(self, recipe: Recipe) -> StreamMemory | None:
        """A memory to look at an image with, without learning from it; an empty one for other recipes."""
        if self._memory and recipe == self.recipe:
            return self._memory.copy()
        return StreamMemory(recipe, self.model, self.classes) if recipe.remembers else None

    def _stream(
        self, images: Iterable[ImageSource | Callable[[], ImageSource]]
    ) -> Generator[Prediction | ImageError, None, None]:
        # Methods that need the weak view alone get one; for them there is nothing to be adaptive about.
        views = replace(self._views, views=1) if self.recipe.weak_only else self._views
        length = self.seen + len(images) if isinstance(images, Sized) else None
        names: list[str] = []  # of the images under way
        origins: list[ImageOrigin] = []

        def requests() -> Iterator[ImageRequest]:
            for image in images:
                source = self._source(image)
                names.append(_name(image))
                origins.append(ImageOrigin(source, views))
                yield self._request(source, [self.recipe], views)

        with closing(self._pipeline.stream(requests())) as outcomes:
            while batch := list(islice(outcomes, self.batch_size)):
                episodes = [outcome for outcome in batch if isinstance(outcome, Episode)]
                own = [i for i, outcome in enumerate(batch) if isinstance(outcome, Episode)]
                answers = self._head.predict(
                    self.recipe, episodes, [names[i] for i in own], [origins[i] for i in own], self._memory, length
                )
                predictions = (replace(answer, rejection=self._rejection) for answer in answers)
                del names[: len(batch)], origins[: len(batch)]
                for outcome in batch:
                    yield outcome if isinstance(outcome, ImageError) else next(predictions)

    def _source(self, image: ImageSource | Callable[[], ImageSource]) -> ImageSource | Callable[[], ImageSource]:
        """What the pipeline opens: the image as it was given, or a function that fetches it."""
        if not (isinstance(image, str) and is_web_address(image)):
            return image
        return partial(_fetch, image) if self._allow_urls else partial(_refuse_url, image)

    def _warn(self, predictions: Sequence[Prediction] = ()) -> None:
        """Warn about the class names, but only once, and about predictions that are hardly better than chance."""
        texts = () if self._warned else self._head.warnings
        self._warned = True
        doubtful = [p for p in predictions if is_near_chance(p.confidence, len(p.classes))]
        if doubtful:
            text = chance_warning(len(self.classes), len(doubtful), len(predictions))
            texts += (f"{text}, such as {doubtful[0].source}" if len(predictions) > 1 else text,)
        for text in texts:
            warnings.warn(text, AnswerWarning, stacklevel=_user_level())

    def _request(
        self,
        image: ImageSource | Callable[[], ImageSource],
        recipes: Sequence[Recipe],
        views: ViewRecipe,
        *,
        keep_pixels: bool = False,
    ) -> ImageRequest:
        settled = None
        if self._adaptive and views.views > 1:
            accepted = accepted_changes(self._adaptive)
            settled = partial(self._head.is_settled, least=least_views(*recipes), accepted=accepted)
        return ImageRequest(
            image,
            views,
            settled=settled,
            hidden=any(recipe.needs_hidden for recipe in recipes),
            reward=any(recipe.needs_reward for recipe in recipes),
            keep_pixels=keep_pixels,
            max_pixels=self._max_pixels,
            part_of=self._views,
        )

    def _collect(self, images: Iterable[ImageSource], progress: bool | None) -> list[Prediction]:
        images = list(images)
        predictions = []
        for outcome in track(self._stream(images), len(images), "Classifying", progress):
            if isinstance(outcome, ImageError):
                raise outcome
            predictions.append(outcome)
        if predictions:
            self._warn(predictions)
        return predictions


@overload
def classify(images: ImageSource, classes: Sequence[str], **options: Any) -> Prediction: ...
@overload
def classify(images: Iterable[ImageSource], classes: Sequence[str], **options: Any) -> list[Prediction]: ...
def classify(
    images: ImageSource | Iterable[ImageSource], classes: Sequence[str], **options: Any
) -> Prediction | list[Prediction]:
    """The prediction for one image, or a list of them for several, by a `Classifier` with these `options`.

    Every call loads the model; keep a `Classifier` to classify more than once.
    """
    return Classifier(classes, **options)(images)


def _name(source: object) -> str:
    """What an image is called in a prediction."""
    if isinstance(source, str) and is_web_address(source):
        return source
    if isinstance(source, str | os.PathLike):
        return str(Path(source))
    return f"<{type(source).__name__}>"


def _as_many(images: Any) -> Iterable[ImageSource]:
    if _is_one(images):
        return [images]
    if isinstance(images, Iterable):
        return images
    raise TypeError(f"expected an image ({SOURCES}) or a list of images, not {images!r}")


def _is_one(images: object) -> bool:
    if hasattr(images, "read") or hasattr(images, "is_floating_point"):  # a file, a tensor
        return True
    return isinstance(images, str | os.PathLike | bytes | bytearray | Image.Image | np.ndarray)


def _fetch(url: str) -> bytes:
    try:
        return fetch(url, _MAX_BYTES)
    except FetchError as error:
        raise ImageError(url, f"cannot be fetched: {error}") from error


def _refuse_url(url: str) -> ImageSource:
    raise ImageError(url, "is a URL; to fetch images, make the classifier with allow_urls=True")


def _user_level() -> int:
    """The `stacklevel` with which the caller warns about the line that called this package."""
    frame, level = inspect.currentframe(), 0
    while frame and frame.f_globals["__name__"].split(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    return level
