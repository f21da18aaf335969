"""How `usetta classify` prints answers: as text, JSON or CSV, each line as soon as it is known."""

import csv
import json
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

from usetta.cli.app import printable
from usetta.files import spreadsheet_safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from usetta.batch.sources import BatchImage
    from usetta.images import ImageError
    from usetta.prediction import Prediction

    Outcome = Prediction | ImageError

_WIDEST = 60
"""Characters of a name at most that answers are aligned by."""


def sentence(answer: "Prediction", top: int = 1) -> str:
    """The most probable classes, and what zero-shot says if it says something else."""
    text = ", ".join(f"{label}  {probability:.1%}" for label, probability in answer.ranked(top))
    if answer.rejected:
        from usetta.rejection import NONE_OF_THESE

        return f"{NONE_OF_THESE}  (closest: {text})"
    weak = answer.classes[int(answer.zero_shot.argmax())]
    return text if weak == answer.label else f"{text}  (zero-shot: {weak}  {float(answer.zero_shot.max()):.1%})"


def text_writer(images: "Iterable[BatchImage]", top: int) -> "Callable[[BatchImage, Outcome], None]":
    """Writes a line of text per image, with names aligned."""
    width = min(_WIDEST, max(len(printable(image.name)) for image in images))

    def write(image: "BatchImage", outcome: "Outcome") -> None:
        if not isinstance(outcome, Exception):
            _line(f"{printable(image.name):<{width}}  {printable(sentence(outcome, top))}")

    return write


def json_writer(top: int) -> "Callable[[BatchImage, Outcome], None]":
    """Writes a JSON object per image."""

    def write(image: "BatchImage", outcome: "Outcome") -> None:
        answer = {"error": outcome.reason} if isinstance(outcome, Exception) else outcome.to_dict(top)
        _line(json.dumps({**answer, "source": image.name}))

    return write


def csv_writer(top: int, rejects: bool = False) -> "Callable[[BatchImage, Outcome], None]":
    """Writes a row per image below a header; with `rejects` it has two more columns."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    more = [f"{name}_{rank}" for rank in range(2, top + 1) for name in ("label", "probability")]
    more = [*(["rejected", "calibrated"] if rejects else []), *more]
    table.writerow(["source", "label", "probability", "zero_shot_label", "zero_shot_probability", "error", *more])

    def write(image: "BatchImage", outcome: "Outcome") -> None:
        if isinstance(outcome, Exception):
            cells: list[Any] = [image.name, "", "", "", "", outcome.reason]
        else:
            best, *others = [(label, round(probability, 6)) for label, probability in outcome.ranked(top)]
            zero_shot = outcome.to_dict(1)["zero_shot"]
            rejection = [str(outcome.rejected).lower(), outcome.to_dict(1)["calibrated"]] if rejects else []
            cells = [image.name, *best, zero_shot["label"], zero_shot["probability"], "", *rejection, *chain(*others)]
        table.writerow(map(spreadsheet_safe, cells))
        sys.stdout.flush()

    return write


def _line(text: str) -> None:
    """One line to standard output, at once: what has been computed survives whatever comes next."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
