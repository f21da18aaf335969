"""The two functions behind the page, which Gradio's clients can call as well, with plain values.

A call goes the way of the API: the same schema with the same limits, the same service; one encoding of an image's views
serves all methods. What is wrong is an `ApiError` with a sentence for people. Gradio's own way from a request to a
function is not taken: it fetches what an object among the values names, and prints what callers sent when something is
wrong. Here values are texts, numbers and lists of texts, or the call is refused.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError

from usetta.adaptive import ADAPTIVE
from usetta.images import ImageError
from usetta.serve.page import show
from usetta.serve.page.show import PageComparison
from usetta.serve.parsing import Upload
from usetta.serve.requests import make_task
from usetta.serve.schemas import ApiError, invalid_request, request_schemas, unreadable_image
from usetta.serve.service import ModelService
from usetta.serve.worker import RefusedError

MOST_METHODS = 32
"""That are compared at once; there are fewer names."""

_DATA_URL = re.compile(r"data:[^,;]*(?:;name=(?P<name>[^,;]*))?(?:;[^,;]*)*;base64,")


class ShowCall(BaseModel):
    """What a click asks for."""

    image: str | None
    classes: str
    methods: list[str]
    extra_methods: list[str]
    views: int | str


class CompareCall(BaseModel):
    """What a program asks for."""

    image: str
    classes: list[str]
    methods: list[str]
    views: int | str = ADAPTIVE


PageCall = ShowCall | CompareCall
_KINDS: dict[str, type[ShowCall] | type[CompareCall]] = {"show": ShowCall, "compare": CompareCall}


class _Body(BaseModel):
    """What Gradio's clients send; other fields are for features that this server does not have."""

    data: list[str | int | float | list[str] | None]
    fn_index: int | None = None
    session_hash: str | None = None


class PageCalls:
    """The functions of the page, and the numbers that Gradio gave to them."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self._drawing = asyncio.Lock()  # matplotlib's fonts are not safe for several threads
        self.numbers: Mapping[int, str] = {}

    async def parse(self, name: str, body: bytes) -> tuple[PageCall, str]:
        """The call in a body, of the function `name` unless the body has its number, and the session it names."""
        return await asyncio.get_running_loop().run_in_executor(self._service.pool, self._parse, name, body)

    def _parse(self, name: str, body: bytes) -> tuple[PageCall, str]:
        try:
            sent = _Body.model_validate_json(body)
        except ValidationError as error:
            raise ApiError(422, "malformed_body", "the body is not a call with plain values") from error
        kind = _KINDS.get(name if sent.fn_index is None else self.numbers.get(sent.fn_index, ""))
        if kind is None:
            raise ApiError(404, "not_found", "there is no such function")
        if len(sent.data) > len(kind.model_fields):
            raise ApiError(422, "invalid_request", "there are more values than the function takes")
        try:
            return kind.model_validate(dict(zip(kind.model_fields, sent.data, strict=False))), sent.session_hash or ""
        except ValidationError as error:
            raise invalid_request(error) from error

    async def answer(self, call: PageCall) -> str | dict[str, Any]:
        """What the function returns: HTML for a click, plain values for a program."""
        if isinstance(call, CompareCall):
            return (await self._compare(call.image, call.classes, call.methods, call.views)).as_dict()
        methods = [*call.methods, *call.extra_methods]
        comparison = await self._compare(call.image or "", split_classes(call.classes), methods, call.views)
        async with self._drawing:
            pace = self._service.seconds_per_view
            return await asyncio.get_running_loop().run_in_executor(self._service.pool, show.answer, comparison, pace)

    async def _compare(
        self, image: str, classes: Sequence[str], methods: Sequence[str], views: int | str
    ) -> PageComparison:
        """The answers of `methods` about `image`, a file in base64 or as a data URL."""
        if not image:
            raise _invalid("image", "There is no image yet: drop one on the field, or take an example.")
        names = list(dict.fromkeys(name.strip() for name in classes if name.strip()))
        if len(names) < 2:
            raise _invalid("classes", "Type at least two classes, so that there is something to choose from.")
        if not methods:
            raise _invalid("methods", "Choose at least one method.")
        if len(methods) > MOST_METHODS:
            raise _invalid("methods", f"These are more than {MOST_METHODS} methods.")
        try:
            values = {"classes": names, "method": methods[0], "views": views}
            options = request_schemas(self._service.settings.limits).options.model_validate(values)
        except ValidationError as error:
            raise invalid_request(error) from None
        task = make_task(options, self._service, methods[1:])
        try:
            return PageComparison(task.prompts.model, await self._service.explain(task, _upload(image)))
        except ImageError as error:
            raise unreadable_image(error, "image") from error
        except RefusedError as error:
            raise ApiError(422, "invalid_request", str(error)) from error


def split_classes(text: str) -> list[str]:
    """Class names as people type them: one per line, or all on one line with commas between."""
    text = text.strip()
    return re.split(r"[\r\n]+", text) if re.search(r"[\r\n]", text) else text.split(",")


def _upload(image: str) -> Upload:
    """The image with the name that the page wrote into its data URL (`data:image/png;name=cat.png;base64,...`)."""
    head = _DATA_URL.match(image[:1000])
    if head is None:
        return Upload("image", "image", image)
    return Upload(unquote(head["name"] or "")[:255] or "image", "image", image[head.end() :])


def _invalid(field: str, message: str) -> ApiError:
    return ApiError(422, "invalid_request", message, field=field)
