"""The two-line API: class names in, answers with their reasons out.

    classifier = Classifier(["tabby cat", "red fox"], method="use")
    classifier("photo.jpg").label

Images are taken one at a time through decoding, views and the image tower, so an image's features never depend on
its neighbours; the recipe then runs on `batch_size` images together. An image without an id of its own is known by
its content: the same pixels get the same views under any file name.
"""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from PIL import Image

from usetta import methods
from usetta.adaptive import ADAPTIVE, STAGES, is_settled, stages
from usetta.coop import load_context
from usetta.episode import Episode, answer, check, encode, encode_with_hidden
from usetta.images import ImageError, ImageSource, image_id, open_image
from usetta.methods.recipe import Recipe, Result
from usetta.methods.select import tuned_views
from usetta.models import Model, load_model
from usetta.progress import track
from usetta.prompts import DEFAULT_TEMPLATE, ClassPrompts
from usetta.views import ViewRecipe, make_views

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Prediction:
    """The answer for one image, and why."""

    source: str
    """Where the image came from: its path, or what kind of object it was."""
    classes: tuple[str, ...]
    probs: np.ndarray[Any, Any]
    """(C,): probability of each class, in the order of `classes`."""
    zero_shot: np.ndarray[Any, Any]
    """(C,): what the weak view alone says before anything is tuned, that is zero-shot CLIP."""
    before: np.ndarray[Any, Any] | None
    """(C,): what the method would have said without tuning; None where it tunes nothing."""
    skipped: bool | None
    """Whether tuning was left out because the views already agreed; None where the method tunes nothing."""
    tuned_on: tuple[int, ...]
    """The views that the loss looked at in the first step; none where nothing was tuned."""
    entropies: np.ndarray[Any, Any]
    """(N,): entropy in nats of each view's own prediction before tuning; view 0 is the weak one, the image itself."""
    view_labels: tuple[str, ...]
    """(N,): the class each view would choose by itself before tuning."""
    chosen: tuple[int, ...]
    """The most confident strong views, most confident first; `weights` tells whether they count in the answer."""
    delta: float | None
    """Share of the strong views that are less confident than the weak one when β is set; None without strong views."""
    beta: float | None
    """Weight of the weak view against the chosen ones; None where views are weighed one by one, as R-TPT does."""
    weights: np.ndarray[Any, Any]
    """(N,): the weight of each view in the answer; they sum to 1."""

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.classes[int(self.probs.argmax())]

    @property
    def confidence(self) -> float:
        """The probability of `label`."""
        return float(self.probs.max())

    @property
    def reason(self) -> str:
        """Why this answer, in one plain sentence."""
        if self.skipped:
            return "skipped: the views already agree"
        if self.before is not None:
            old = self.classes[int(self.before.argmax())]
            new = "" if old == self.label else f"{self.label} "
            return f"tuned: {old} {float(self.before.max()):.1%} -> {new}{self.confidence:.1%}"
        if self.beta is None:
            return f"{int((self.weights > 0).sum())} of {len(self.weights)} views count, each with a weight of its own"
        if self.beta == 1:
            return "the image alone, looked at once"
        confident = (
            f"its {len(self.chosen)} most confident views" if len(self.chosen) > 1 else "its most confident view"
        )
        return f"the image itself counts {self.beta:.1%}, {confident} {1 - self.beta:.1%}"

    def ranked(self, top: int | None = None) -> list[tuple[str, float]]:
        """The classes by falling probability, at most `top` of them."""
        order = np.argsort(-self.probs, kind="stable")[:top]
        return [(self.classes[i], float(self.probs[i])) for i in order]

    def as_dict(self, top: int | None = 5) -> dict[str, Any]:
        """The answer as plain values, for JSON."""
        return {
            "source": self.source,
            "label": self.label,
            "probability": round(self.confidence, 6),
            "ranked": [{"label": label, "probability": round(p, 6)} for label, p in self.ranked(top)],
            "zero_shot": self._best(self.zero_shot),
            "why": {
                "reason": self.reason,
                "views": len(self.entropies),
                "skipped": self.skipped,
                "before": None if self.before is None else self._best(self.before),
                "tuned_on": list(self.tuned_on),
                "delta": None if self.delta is None else round(self.delta, 6),
                "beta": None if self.beta is None else round(self.beta, 6),
                "chosen_views": list(self.chosen),
                "chosen_labels": [self.view_labels[i] for i in self.chosen],
                "entropies": [round(float(h), 6) for h in self.entropies],
                "weights": [round(float(w), 6) for w in self.weights],
            },
        }

    def _best(self, probs: np.ndarray[Any, Any]) -> dict[str, Any]:
        best = int(probs.argmax())
        return {"label": self.classes[best], "probability": round(float(probs[best]), 6)}


@dataclass(frozen=True)
class Explanation:
    """A prediction together with the views it was made from."""

    prediction: Prediction
    method: str
    views: np.ndarray[Any, Any]
    """(N, S, S, 3), uint8: the views as images, the weak one first."""

    def figure(self, shown: int = 24) -> "Figure":
        """The weak view, the `shown` most confident strong views and the probabilities, as a matplotlib figure."""
        from usetta.report.explain import draw

        return draw(self, shown)

    def save(self, path: str | os.PathLike[str], shown: int = 24) -> None:
        """Write the figure to `path`; the suffix chooses the format (PNG, SVG, PDF, JPEG)."""
        self.figure(shown).savefig(path)


_BLENDS = ("weak", "strong", "average", "uniform", "se")
"""Readouts that are a weight β of the weak view and 1 − β of others."""


class Classifier:
    """Classifies images into `classes`, with the conventions of scikit-learn where they fit.

    `model` is a name (see `usetta.list_models`), a weights file or a loaded model; `method` a name (see
    `usetta.methods`, also for `tpt+se` and `use:steps=2`) or a recipe. `views` counts the weak view, and "adaptive" is
    up to 64, but fewer where they leave no doubt (see `usetta.adaptive`); `augmix` adds AugMix to the strong views, as
    the paper does on fine-grained datasets. `templates` holds one or more texts with
    `{}` for the class name; a method that tunes the prompt takes one, with words before the name. `context` is a
    learned context for it (see `usetta.coop`), `reward` the model that judges for RLCF, which otherwise judges itself.
    """

    def __init__(
        self,
        classes: Sequence[str],
        model: str | Model = "auto",
        method: str | Recipe = "se",
        *,
        templates: str | Sequence[str] = DEFAULT_TEMPLATE,
        context: torch.Tensor | str | os.PathLike[str] | None = None,
        reward: str | Model | None = None,
        views: int | Literal["adaptive"] = 64,
        augmix: bool = False,
        seed: int = 0,
        batch_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.recipe = methods.get(method)
        self.model = load_model(model) if isinstance(model, str) else model
        self.classes = tuple(classes)
        self.batch_size = batch_size
        if isinstance(context, str | os.PathLike):
            context = load_context(context, self.model)
        self._prompts = ClassPrompts(self.model.text, classes, templates, context)
        self._judge = load_model(reward) if isinstance(reward, str) else reward
        self._templates = templates
        self._adaptive = isinstance(views, str)
        if self._adaptive and views != ADAPTIVE:
            raise ValueError(f"views must be a number or '{ADAPTIVE}', not {views!r}")
        most = STAGES[-1] if isinstance(views, str) else views
        check(self.recipe, self.model, self._prompts, most)
        self._view_recipe = ViewRecipe(views=most, size=self.model.image_size, augmix=augmix, seed=seed)

    @cached_property
    def _words(self) -> ClassPrompts:
        """The prompts as the reward model reads them: in words, whatever context was learned."""
        return ClassPrompts((self._judge or self.model).text, self.classes, self._templates)

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
        answers = self._collect(_as_many(images), progress)
        return answers[0] if _is_one(images) else answers

    def predict(
        self, images: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The labels (n,) of the images."""
        return np.array([p.label for p in self._collect(_as_many(images), progress)])

    def predict_proba(
        self, images: ImageSource | Iterable[ImageSource], progress: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """The probabilities (n, C) of the images, columns in the order of `classes_`."""
        answers = self._collect(_as_many(images), progress)
        return np.stack([p.probs for p in answers]) if answers else np.empty((0, len(self.classes)), np.float32)

    def explain(self, image: ImageSource) -> Explanation:
        """The prediction for one image together with its views, even where the method uses the weak one only."""
        return self.compare(image, [self.recipe])[0]

    def compare(self, image: ImageSource, recipes: Iterable[str | Recipe]) -> list[Explanation]:
        """What several methods say about one image, all from one encoding of its views."""
        found = [methods.get(recipe) for recipe in recipes]
        for recipe in found:
            check(recipe, self.model, self._prompts, self._view_recipe.views)
        hidden = any(recipe.needs_hidden for recipe in found)
        pixels, seen = self._look_at(open_image(image), self._view_recipe, hidden=hidden)
        if pixels.dtype != torch.uint8:
            pixels = (pixels * 255).round().to(torch.uint8)
        shown = pixels.permute(0, 2, 3, 1).numpy()
        return [Explanation(self._answer([_name(image)], [seen], recipe)[0], recipe.name, shown) for recipe in found]

    def stream(self, images: Iterable[ImageSource]) -> Iterator[Prediction | ImageError]:
        """An answer for each image, in order, as soon as it is known; a bad image yields its error instead."""
        recipe = replace(self._view_recipe, views=1) if self.recipe.weak_only else self._view_recipe
        remaining = iter(images)
        while batch := list(islice(remaining, self.batch_size)):
            outcomes: dict[int, Prediction | ImageError] = {}
            seen: dict[int, Episode] = {}
            for i, image in enumerate(batch):
                try:
                    _, seen[i] = self._look_at(open_image(image), recipe, hidden=self.recipe.needs_hidden)
                except ImageError as error:
                    outcomes[i] = error
            if seen:
                answers = self._answer([_name(batch[i]) for i in seen], list(seen.values()), self.recipe)
                outcomes |= zip(seen, answers, strict=True)
            yield from (outcomes[i] for i in range(len(batch)))

    def _collect(self, images: Iterable[ImageSource], progress: bool | None) -> list[Prediction]:
        images = list(images)
        answers = []
        for outcome in track(self.stream(images), len(images), "Classifying", progress):
            if isinstance(outcome, ImageError):
                raise outcome
            answers.append(outcome)
        return answers

    def _look_at(self, image: Image.Image, recipe: ViewRecipe, *, hidden: bool) -> tuple[torch.Tensor, Episode]:
        """The views of an image, as many as it takes, and what the tower sees in them."""
        parts = stages(recipe.views) if self._adaptive else [range(recipe.views)]
        name, pixels, seen = image_id(image), [], None
        for part in parts:
            pixels.append(make_views(image, name, recipe, part=part))
            more = self._encode(pixels[-1], weak=int(part.start == 0), hidden=hidden)
            seen = seen + more if seen else more
            if len(parts) > 1 and is_settled(seen.features, self._prompts.features(), self.model.logit_scale):
                break
        assert seen is not None
        return torch.cat(pixels), seen

    def _encode(self, pixels: torch.Tensor, *, weak: int, hidden: bool) -> Episode:
        judged = encode(self._judge, pixels, weak=weak) if self._judge else None
        if not hidden:
            return Episode(encode(self.model, pixels, weak=weak), judged)
        features, states = encode_with_hidden(self.model, pixels)
        return Episode(features, judged, states)

    def _answer(self, sources: list[str], seen: list[Episode], recipe: Recipe) -> list[Prediction]:
        words = self._words if recipe.loss == "reward" else None
        found: dict[int, Prediction] = {}
        for count in {len(each.features) for each in seen}:  # images with equally many views go together
            places = [place for place, each in enumerate(seen) if len(each.features) == count]
            result = answer(recipe, [seen[place] for place in places], self.model, self._prompts, words)
            found |= {place: self._prediction(sources[place], recipe, result, i) for i, place in enumerate(places)}
        return [found[place] for place in range(len(seen))]

    def _prediction(self, source: str, recipe: Recipe, result: Result, i: int) -> Prediction:
        delta = float(result.delta[i])
        skipped = bool(result.skipped[i])
        return Prediction(
            source=source,
            classes=self.classes,
            probs=result.probs[i].cpu().numpy(),
            zero_shot=result.weak_probs[i].cpu().numpy(),
            before=result.before[i].cpu().numpy() if recipe.tunes else None,
            skipped=skipped if recipe.tunes else None,
            tuned_on=tuple(tuned_views(recipe, result.entropies[i : i + 1])[0].tolist())
            if recipe.tunes and not skipped
            else (),
            entropies=result.entropies[i].cpu().numpy(),
            view_labels=tuple(self.classes[c] for c in result.view_labels[i].tolist()),
            chosen=tuple(result.chosen[i].tolist()),
            delta=None if np.isnan(delta) else delta,
            beta=float(result.weights[i, 0]) if recipe.readout in _BLENDS else None,
            weights=result.weights[i].cpu().numpy(),
        )


def _is_one(images: object) -> bool:
    return isinstance(images, str | os.PathLike | bytes | bytearray | Image.Image | np.ndarray | io.IOBase)


def _as_many(images: Any) -> Iterable[ImageSource]:
    return [images] if _is_one(images) else images


def _name(image: ImageSource) -> str:
    if isinstance(image, str | os.PathLike):
        return str(Path(image))
    return f"<{type(image).__name__}>"
