"""What the page asks: one image, several methods, one encoding of its views.

Everything goes the way of the API: the same schema with the same limits, the same engine. What is wrong is an
`ApiError` with a sentence for people.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from usetta.images import ImageError
from usetta.prediction import Explanation
from usetta.serve.errors import ApiError, invalid, unreadable
from usetta.serve.parsing import Upload
from usetta.serve.requests import ask
from usetta.serve.schemas import requests
from usetta.serve.service import ModelService
from usetta.serve.worker import RefusedError

MOST_METHODS = 32
"""That are compared at once; there are fewer names."""

_DATA = re.compile(r"data:[^,;]*(?:;name=(?P<name>[^,;]*))?(?:;[^,;]*)*;base64,")


@dataclass(frozen=True)
class Comparison:
    """What several methods say about one image."""

    model: str
    explanations: list[Explanation]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        first = self.explanations[0].prediction
        answers = [{"method": each.method} | each.prediction.as_dict(top=None) for each in self.explanations]
        for answer in answers:
            del answer["source"]
        return {"source": first.source, "model": self.model, "classes": list(first.classes), "answers": answers}


async def compare(
    engine: ModelService, image: str, classes: Sequence[str], methods: Sequence[str], views: int
) -> Comparison:
    """The answers of `methods` about `image`, a file in base64 or as a data URL."""
    if not image:
        raise _wrong("image", "There is no image yet: drop one on the field, or take an example.")
    names = list(dict.fromkeys(name.strip() for name in classes if name.strip()))
    if len(names) < 2:
        raise _wrong("classes", "Type at least two classes, so that there is something to choose from.")
    if not methods:
        raise _wrong("methods", "Choose at least one method.")
    if len(methods) > MOST_METHODS:
        raise _wrong("methods", f"These are more than {MOST_METHODS} methods.")
    try:
        given = {"classes": names, "method": methods[0], "views": views}
        asked = requests(engine.settings.limits).options.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from None
    question = ask(asked, engine, also=methods[1:])
    try:
        return Comparison(question.wording.model, await engine.explain(question, _upload(image)))
    except ImageError as error:
        raise unreadable(error, "image") from error
    except RefusedError as error:
        raise ApiError(422, "invalid_request", str(error)) from error


def split_classes(text: str) -> list[str]:
    """Class names as people type them: one per line, or all on one line with commas between."""
    text = text.strip()
    return re.split(r"[\r\n]+", text) if re.search(r"[\r\n]", text) else text.split(",")


def _upload(image: str) -> Upload:
    """The image with the name that the page wrote into its data URL (`data:image/png;name=cat.png;base64,...`)."""
    head = _DATA.match(image[:1000])
    if head is None:
        return Upload("image", "image", image)
    return Upload(unquote(head["name"] or "")[:255] or "image", "image", image[head.end() :])


def _wrong(field: str, message: str) -> ApiError:
    return ApiError(422, "invalid_request", message, field=field)
