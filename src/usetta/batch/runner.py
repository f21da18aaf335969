"""Classify any number of images into a directory of Parquet files, by any engine, and go on where it was stopped.

An image is answered by itself, one after the other, and its random draws are keyed by its content, as everywhere in
`Classifier`. So an answer depends on nothing but the image and the settings: not on the source it came from, nor on
the images that travelled with it, on the worker or on the part that it is written to.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from usetta.batch.parts import Parts, PredictionRow, SeenKeys
from usetta.batch.sources import BatchImage, images
from usetta.classifier import Classifier, Prediction
from usetta.distributed import Engine, Failed, LocalEngine, VerifiedLoader
from usetta.images import ImageError
from usetta.methods.recipe import Recipe
from usetta.models import Model

_AT_ONCE = 8
"""Images that travel together,"""
_BYTES = 2**24
"""as long as they bring no more bytes than this."""


@dataclass(frozen=True, eq=False)
class BatchSettings:
    """What the answers depend on beside the model; it travels."""

    classes: tuple[str, ...]
    recipe: Recipe
    templates: tuple[str, ...]
    context: Tensor | None = None
    views: int | Literal["adaptive"] = 64
    augmix: bool = False
    seed: int = 0
    top: int = 5

    def classifier(self, model: Model) -> Classifier:
        """What answers."""
        return Classifier(
            self.classes,
            model,
            self.recipe,
            templates=self.templates,
            context=self.context,
            views=self.views,
            augmix=self.augmix,
            seed=self.seed,
        )

    def facts(self, model: Model) -> dict[str, Any]:
        """Everything that an answer depends on, as plain values."""
        context = None
        if self.context is not None:
            context = hashlib.sha256(self.context.detach().cpu().double().numpy().tobytes()).hexdigest()
        recipe = {name: value for name, value in asdict(self.recipe).items() if name != "description"}
        return {
            "model": {"name": model.name, "fingerprint": model.fingerprint, "logit_scale": model.logit_scale},
            "precision": getattr(model, "precision", "fp32"),
            "method": recipe,
            "templates": list(self.templates),
            "context": context,
            "views": self.views,
            "augmix": self.augmix,
            "seed": self.seed,
            "top": self.top,
            "classes": list(self.classes),
        }


@dataclass(frozen=True)
class BatchSummary:
    """What a call of `classify` did."""

    images: int
    """That were classified, or tried."""
    bad: int
    """Of these, those that have no answer."""
    before: int
    """Images that were there already."""
    seconds: float


def classify(
    model: Model,
    setting: BatchSettings,
    sources: Sequence[str],
    out: Path,
    *,
    column: str | None = None,
    engine: Engine | None = None,
    load: Callable[[], Model] | None = None,
    say: Callable[[str], object] = lambda text: None,
    period: float = 60,
) -> BatchSummary:
    """Classify the images of `sources` that the directory `out` lacks.

    `engine`: where this is done, by default here; workers elsewhere get the model by `load`, which is pickled. Bad
    images, and every `period` seconds how far it is, are told by `say`.
    """
    started = told = time.monotonic()
    classifier = setting.classifier(model)  # which checks the settings
    make_worker: Callable[[], BatchWorker] = partial(BatchWorker, classifier, setting.top)
    if engine is not None:
        if load is None:
            raise ValueError("workers of an engine load their model themselves: say how by load")
        make_worker = _BatchWorkerFactory(setting, VerifiedLoader(load, model.fingerprint))
    done = bad = before = 0
    with closing(SeenKeys()) as seen, Parts(out, setting.facts(model)) as parts:
        for source, key in parts.finished():
            before += seen.add(source, key)
        new = (image for image in images(sources, column) if seen.add(image.source, image.key))
        with closing((engine or LocalEngine()).run(make_worker, _batches(new))) as results:
            for batch, found in results:
                for row in _lost(batch, found) if isinstance(found, Failed) else found:
                    parts.add(row)
                    done += 1
                    if row.error is not None:
                        bad += 1
                        say(f"{row.source}: {row.key}: {row.error}")
                if time.monotonic() - told >= period:
                    told = time.monotonic()
                    say(f"{done} images, {done / (told - started):.3g}/s, {bad} bad, {parts.rows} in {out}")
    return BatchSummary(done, bad, before, time.monotonic() - started)


@dataclass(frozen=True)
class Batch:
    """Images that travel together."""

    key: tuple[int, ...]
    images: tuple[BatchImage, ...]

    def parts(self) -> list["Batch"]:
        """Its images, one by one."""
        return [Batch((*self.key, i), (image,)) for i, image in enumerate(self.images)]


class BatchWorker:
    """Answers batches."""

    def __init__(self, classifier: Classifier, top: int) -> None:
        self._classifier = classifier
        self._top = top

    def run(self, batches: Iterable[Batch]) -> Generator[list[PredictionRow], None, None]:
        """A row for each image of each batch."""
        for batch in batches:
            yield [self._row(image) for image in batch.images]

    def _row(self, image: BatchImage) -> PredictionRow:
        try:
            (answer,) = self._classifier.stream([image.read()])
        except ImageError as error:
            answer = error
        if isinstance(answer, ImageError):
            return PredictionRow(image.source, image.key, error=answer.reason)
        return _told(image, answer, self._top)


@dataclass(frozen=True, eq=False)
class _BatchWorkerFactory:
    """How a worker elsewhere comes by its hand; it travels."""

    setting: BatchSettings
    load: VerifiedLoader

    def __call__(self) -> BatchWorker:
        return BatchWorker(self.setting.classifier(self.load()), self.setting.top)


def _batches(found: Iterable[BatchImage]) -> Iterator[Batch]:
    number, some, size = 0, list[BatchImage](), 0
    for image in found:
        some.append(image)
        size += len(image.place) if isinstance(image.place, bytes) else 0
        if len(some) == _AT_ONCE or size >= _BYTES:
            yield Batch((number,), tuple(some))
            number, some, size = number + 1, [], 0
    if some:
        yield Batch((number,), tuple(some))


def _told(image: BatchImage, answer: Prediction, top: int) -> PredictionRow:
    labels, probabilities = zip(*answer.ranked(top), strict=True)
    return PredictionRow(
        image.source,
        image.key,
        label=answer.label,
        confidence=answer.confidence,
        top_labels=labels,
        top_probabilities=probabilities,
        zero_shot=answer.classes[int(answer.zero_shot.argmax())],
        delta=answer.delta,
        beta=answer.beta,
        skipped=answer.skipped,
    )


def _lost(batch: Batch, found: Failed) -> list[PredictionRow]:
    return [PredictionRow(image.source, image.key, error=found.reason) for image in batch.images]
