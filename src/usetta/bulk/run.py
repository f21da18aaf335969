"""Classify any number of pictures into a directory of Parquet files, by any engine, and go on where it was stopped.

A picture is answered by itself, one after the other, and its random draws are keyed by its content, as everywhere in
`Classifier`. So an answer depends on nothing but the picture and the settings: not on the source it came from, nor on
the pictures that travelled with it, on the worker or on the part that it is written to.
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

from usetta.bulk.parts import Parts, Row, Seen
from usetta.bulk.sources import Picture, pictures
from usetta.classifier import Classifier, Prediction
from usetta.engines import Engine, Lost, ThisProcess
from usetta.engines.model import SameModel
from usetta.images import ImageError
from usetta.models import Model
from usetta.recipe import Recipe

_AT_ONCE = 8
"""Pictures that travel together,"""
_BYTES = 2**24
"""as long as they bring no more bytes than this."""


@dataclass(frozen=True, eq=False)
class Setting:
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
class Summary:
    """What a call of `classify` did."""

    pictures: int
    """That were classified, or tried."""
    bad: int
    """Of these, those that have no answer."""
    before: int
    """Pictures that were there already."""
    seconds: float


def classify(
    model: Model,
    setting: Setting,
    sources: Sequence[str],
    out: Path,
    *,
    column: str | None = None,
    engine: Engine | None = None,
    load: Callable[[], Model] | None = None,
    say: Callable[[str], object] = lambda text: None,
    period: float = 60,
) -> Summary:
    """Classify the pictures of `sources` that the directory `out` lacks.

    `engine`: where this is done, by default here; workers elsewhere get the model by `load`, which is pickled. Bad
    pictures, and every `period` seconds how far it is, are told by `say`.
    """
    started = told = time.monotonic()
    classifier = setting.classifier(model)  # which checks the settings
    hire: Callable[[], BatchHand] = partial(BatchHand, classifier, setting.top)
    if engine is not None:
        if load is None:
            raise ValueError("workers of an engine load their model themselves: say how by load")
        hire = _Hire(setting, SameModel(load, model.fingerprint))
    done = bad = before = 0
    with closing(Seen()) as seen, Parts(out, setting.facts(model)) as parts:
        for source, key in parts.finished():
            before += seen.add(source, key)
        new = (picture for picture in pictures(sources, column) if seen.add(picture.source, picture.key))
        with closing((engine or ThisProcess()).run(hire, _batches(new))) as results:
            for batch, found in results:
                for row in _lost(batch, found) if isinstance(found, Lost) else found:
                    parts.add(row)
                    done += 1
                    if row.error is not None:
                        bad += 1
                        say(f"{row.source}: {row.key}: {row.error}")
                if time.monotonic() - told >= period:
                    told = time.monotonic()
                    say(f"{done} pictures, {done / (told - started):.3g}/s, {bad} bad, {parts.rows} in {out}")
    return Summary(done, bad, before, time.monotonic() - started)


@dataclass(frozen=True)
class Batch:
    """Pictures that travel together."""

    key: tuple[int, ...]
    pictures: tuple[Picture, ...]

    def parts(self) -> list["Batch"]:
        """Its pictures, one by one."""
        return [Batch((*self.key, i), (picture,)) for i, picture in enumerate(self.pictures)]


class BatchHand:
    """Answers batches."""

    def __init__(self, classifier: Classifier, top: int) -> None:
        self._classifier = classifier
        self._top = top

    def run(self, batches: Iterable[Batch]) -> Generator[list[Row], None, None]:
        """A row for each picture of each batch."""
        for batch in batches:
            yield [self._row(picture) for picture in batch.pictures]

    def _row(self, picture: Picture) -> Row:
        try:
            (answer,) = self._classifier.stream([picture.read()])
        except ImageError as error:
            answer = error
        if isinstance(answer, ImageError):
            return Row(picture.source, picture.key, error=answer.reason)
        return _told(picture, answer, self._top)


@dataclass(frozen=True, eq=False)
class _Hire:
    """How a worker elsewhere comes by its hand; it travels."""

    setting: Setting
    load: SameModel

    def __call__(self) -> BatchHand:
        return BatchHand(self.setting.classifier(self.load()), self.setting.top)


def _batches(found: Iterable[Picture]) -> Iterator[Batch]:
    number, some, size = 0, list[Picture](), 0
    for picture in found:
        some.append(picture)
        size += len(picture.place) if isinstance(picture.place, bytes) else 0
        if len(some) == _AT_ONCE or size >= _BYTES:
            yield Batch((number,), tuple(some))
            number, some, size = number + 1, [], 0
    if some:
        yield Batch((number,), tuple(some))


def _told(picture: Picture, answer: Prediction, top: int) -> Row:
    labels, probabilities = zip(*answer.ranked(top), strict=True)
    return Row(
        picture.source,
        picture.key,
        label=answer.label,
        confidence=answer.confidence,
        top_labels=labels,
        top_probabilities=probabilities,
        zero_shot=answer.classes[int(answer.zero_shot.argmax())],
        delta=answer.delta,
        beta=answer.beta,
        skipped=answer.skipped,
    )


def _lost(batch: Batch, found: Lost) -> list[Row]:
    return [Row(picture.source, picture.key, error=found.reason) for picture in batch.pictures]
