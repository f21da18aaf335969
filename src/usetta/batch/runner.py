"""Classify any number of images into Parquet, by any engine, and resume where it was stopped.

Random draws are keyed by the content of an image, as everywhere in `Classifier`. So an answer depends on nothing but
the image and the settings: not on the source it came from, nor on the images that travelled with it, on the worker or
on the file that it is written to.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from usetta.adaptive import ADAPTIVE, Views
from usetta.answer_warnings import is_near_chance
from usetta.batch.parts import Parts, PredictionRow, SeenKeys
from usetta.batch.sources import BatchImage, SourceOptions, images
from usetta.classifier import Classifier
from usetta.distributed import Engine, Failed, LocalEngine, Pace, Shard, VerifiedLoader, has_gpus
from usetta.images import ImageError
from usetta.methods.recipe import Recipe
from usetta.models import Model
from usetta.prediction import Prediction
from usetta.rejection import Calibration, Score

_BATCH_IMAGES = 8
"""Images that travel together at most,"""
_BATCH_BYTES = 2**24
"""as long as they carry no more bytes than this."""


@dataclass(frozen=True, eq=False)
class BatchSettings:
    """What the answers depend on beside the model; it is pickled for workers."""

    classes: tuple[str, ...]
    recipe: Recipe
    templates: tuple[str, ...]
    context: Tensor | None = None
    views: Views = ADAPTIVE
    augmix: bool = False
    seed: int = 0
    top: int = 5
    cache: Path | None = None
    """Folder of a feature cache; answers do not depend on it."""
    max_pixels: int | None = None
    """Larger images are refused; by default as by `images.open_image`."""
    reject: Score | None = None
    reject_below: float | None = None
    calibration: Calibration | None = None

    def classifier(self, model: Model, reward_model: Model | None = None) -> Classifier:
        """A classifier with these settings."""
        if self.recipe.remembers:
            raise ValueError(
                f"method '{self.recipe.name}' remembers earlier images, but these are classified in any order by any "
                "worker; leave out --out, or use Classifier.stream"
            )
        return Classifier(
            self.classes,
            model,
            self.recipe,
            templates=self.templates,
            context=self.context,
            reward_model=reward_model,
            views=self.views,
            augmix=self.augmix,
            seed=self.seed,
            cache=self.cache,
            max_pixels=self.max_pixels,
            reject=self.reject,
            reject_below=self.reject_below,
            calibration=self.calibration,
        )

    def facts(self, model: Model, reward_model: Model | None = None) -> dict[str, Any]:
        """Everything that an answer depends on, as plain values."""
        context = None
        if self.context is not None:
            context = hashlib.sha256(self.context.detach().cpu().double().numpy().tobytes()).hexdigest()
        facts = {
            "model": {"name": model.name, "fingerprint": model.fingerprint, "logit_scale": model.logit_scale},
            "precision": getattr(model, "precision", "fp32"),
            "method": self.recipe.record(),
            "templates": list(self.templates),
            "context": context,
            "views": self.views,
            "augmix": self.augmix,
            "seed": self.seed,
            "top": self.top,
            "classes": list(self.classes),
        }
        # Only where it differs from what there was before there was a choice, so that old directories can be resumed.
        weak_view = [getattr(model, "resize_mode", "shortest"), getattr(model, "interpolation", "bicubic")]
        if weak_view != ["shortest", "bicubic"]:
            facts["weak_view"] = weak_view
        if self.reject_below is not None or self.calibration is not None:
            calibration = asdict(self.calibration) if self.calibration else None
            facts["rejection"] = {"by": self.reject, "below": self.reject_below, "calibration": calibration}
        if reward_model is not None:
            facts["reward_model"] = {"name": reward_model.name, "fingerprint": reward_model.fingerprint}
        return facts


@dataclass(frozen=True)
class BatchSummary:
    """What a call of `classify` did."""

    images: int
    """Images that were classified or tried."""
    failed: int
    """Those of them that have no answer."""
    before: int
    """Images that had an answer already."""
    seconds: float
    near_chance: int = 0
    """Answers whose best class is hardly better than chance, see `answer_warnings`."""


def classify(
    model: Model,
    settings: BatchSettings,
    sources: Sequence[str],
    out: Path,
    *,
    options: SourceOptions | None = None,
    reward_model: Model | None = None,
    engine: Engine | None = None,
    shard: Shard | None = None,
    load: Callable[[], Model] | None = None,
    load_reward_model: Callable[[], Model] | None = None,
    log: Callable[[str], object] = lambda text: None,
    period: float = 60,
) -> BatchSummary:
    """Classify the images of `sources` that `out` lacks, a Parquet file or a directory of them.

    `options`: how sources are read. `engine`: where this is done, by default in this process; workers elsewhere get the
    models by `load` and `load_reward_model`, which are pickled. `shard`: the share of this process, if several write to
    `out`. Unreadable images, and the progress every `period` seconds, are reported by `log`.
    """
    started = reported = time.monotonic()
    classifier = settings.classifier(model, reward_model)  # which checks the settings
    make_worker: Callable[[], BatchWorker] = partial(BatchWorker, classifier, settings.top)
    if engine is not None:
        if load is None or (reward_model is not None and load_reward_model is None):
            raise ValueError("workers of an engine load their models themselves: pass load and load_reward_model")
        reward = None
        if reward_model is not None and load_reward_model:
            reward = VerifiedLoader(load_reward_model, reward_model.fingerprint)
        make_worker = _BatchWorkerFactory(settings, VerifiedLoader(load, model.fingerprint), reward)
    done = failed = before = near_chance = 0
    together = classifier.batch_size > 1 or has_gpus(engine)
    # In this process images need no company, unless a device computes several at once.
    pace = Pace(_BATCH_IMAGES if together or engine else 1, fixed=together)
    with closing(SeenKeys()) as seen, Parts(out, settings.facts(model, reward_model), shard) as parts:
        for source, key in parts.finished():
            before += seen.add(source, key)
        mine = (shard or Shard()).take(images(sources, options))
        new = (image for image in mine if seen.add(image.source, image.key))
        with closing((engine or LocalEngine()).run(make_worker, _batches(new, pace))) as results:
            for batch, result in results:
                pace.returned(batch.key)
                for row in _failed_rows(batch, result) if isinstance(result, Failed) else result:
                    parts.add(row)
                    done += 1
                    if row.error is not None:
                        failed += 1
                        log(f"{row.source}: {row.key}: {row.error}")
                    elif row.confidence is not None:
                        near_chance += is_near_chance(row.confidence, len(settings.classes))
                if time.monotonic() - reported >= period:
                    reported = time.monotonic()
                    speed = done / (reported - started)
                    log(f"{done} image{'s' * (done != 1)}, {speed:.3g}/s, {failed} failed, {parts.rows} in {out}")
    return BatchSummary(done, failed, before, time.monotonic() - started, near_chance)


@dataclass(frozen=True)
class ImageBatch:
    """Images that travel together."""

    key: tuple[int, ...]
    images: tuple[BatchImage, ...]

    def parts(self) -> list["ImageBatch"]:
        """Its images, one by one."""
        return [ImageBatch((*self.key, i), (image,)) for i, image in enumerate(self.images)]


class BatchWorker:
    """Answers batches; the next images are fetched and opened while one is encoded."""

    def __init__(self, classifier: Classifier, top: int) -> None:
        self._classifier = classifier
        self._top = top

    def run(self, batches: Iterable[ImageBatch]) -> Generator[list[PredictionRow], None, None]:
        """A row for each image of each batch. Batches are taken ahead of their rows."""
        taken: deque[ImageBatch] = deque()

        def sources() -> Iterator[Callable[[], str | bytes]]:
            for batch in batches:
                taken.append(batch)
                yield from (image.read for image in batch.images)

        with closing(self._classifier.stream(sources())) as outcomes:
            for first in outcomes:
                batch = taken.popleft()
                answers = [first, *islice(outcomes, len(batch.images) - 1)]
                yield [self._row(image, answer) for image, answer in zip(batch.images, answers, strict=True)]

    def _row(self, image: BatchImage, answer: Prediction | ImageError) -> PredictionRow:
        if isinstance(answer, ImageError):
            return PredictionRow(image.source, image.key, error=answer.reason)
        labels, probabilities = zip(*answer.ranked(self._top), strict=True)
        return PredictionRow(
            image.source,
            image.key,
            label=answer.label,
            confidence=answer.confidence,
            rejected=answer.rejected,
            calibrated=answer.calibrated,
            top_labels=labels,
            top_probabilities=probabilities,
            zero_shot=answer.classes[int(answer.zero_shot.argmax())],
            delta=answer.delta,
            beta=answer.beta,
            skipped=answer.skipped,
            views=len(answer.entropies),
        )


@dataclass(frozen=True, eq=False)
class _BatchWorkerFactory:
    """Makes a worker where it works; it is pickled, so it holds settings, not models."""

    settings: BatchSettings
    load: VerifiedLoader
    load_reward_model: VerifiedLoader | None

    def __call__(self) -> BatchWorker:
        reward_model = self.load_reward_model() if self.load_reward_model else None
        return BatchWorker(self.settings.classifier(self.load(), reward_model), self.settings.top)


def _batches(stream: Iterable[BatchImage], pace: Pace) -> Iterator[ImageBatch]:
    number, batch, size = 0, list[BatchImage](), 0
    for image in stream:
        batch.append(image)
        size += len(image.place) if isinstance(image.place, bytes) else 0
        if len(batch) >= pace.images or size >= _BATCH_BYTES:
            pace.sent((number,))
            yield ImageBatch((number,), tuple(batch))
            number, batch, size = number + 1, [], 0
    if batch:
        pace.sent((number,))
        yield ImageBatch((number,), tuple(batch))


def _failed_rows(batch: ImageBatch, failure: Failed) -> list[PredictionRow]:
    return [PredictionRow(image.source, image.key, error=failure.reason) for image in batch.images]
