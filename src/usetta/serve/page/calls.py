"""What the page and Gradio's clients can have done: two functions, called with plain values.

Gradio's own way from a request to a function is not taken: it fetches what an object among the values names, and prints
what callers sent when something is wrong. Here values are texts, numbers and lists of texts, or the call is refused.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from usetta.serve.errors import ApiError, invalid
from usetta.serve.page import show
from usetta.serve.page.compare import compare, split_classes
from usetta.serve.service import ModelService

VIEWS = 16
"""Views unless one says otherwise: a few seconds on a CPU, where the paper's 64 would take four times as long."""


class Show(BaseModel):
    """What a click asks for."""

    image: str | None
    classes: str
    chosen: list[str]
    also: list[str]
    views: int


class Compare(BaseModel):
    """What a program asks for."""

    image: str
    classes: list[str]
    methods: list[str]
    views: int = VIEWS


Call = Show | Compare
_KINDS: dict[str, type[Show] | type[Compare]] = {"show": Show, "compare": Compare}


class _Body(BaseModel):
    """What Gradio's clients send; the rest of it is for what is not here."""

    data: list[str | int | float | list[str] | None]
    fn_index: int | None = None
    session_hash: str | None = None


class Calls:
    """The functions of the page, and the numbers that Gradio gave to them."""

    def __init__(self, engine: ModelService) -> None:
        self._engine = engine
        self._drawing = asyncio.Lock()  # matplotlib's fonts are not for several threads
        self.numbers: Mapping[int, str] = {}

    async def read(self, name: str, body: bytes) -> tuple[Call, str]:
        """The call in a body, of the function `name` unless the body tells its number, and the session it names."""
        return await asyncio.get_running_loop().run_in_executor(self._engine.pool, self._read, name, body)

    def _read(self, name: str, body: bytes) -> tuple[Call, str]:
        try:
            sent = _Body.model_validate_json(body)
        except ValidationError as error:
            raise ApiError(422, "malformed_body", "the body is no call with plain values") from error
        kind = _KINDS.get(name if sent.fn_index is None else self.numbers.get(sent.fn_index, ""))
        if kind is None:
            raise ApiError(404, "not_found", "there is no such function")
        if len(sent.data) > len(kind.model_fields):
            raise ApiError(422, "invalid_request", "these are more values than the function takes")
        try:
            return kind.model_validate(dict(zip(kind.model_fields, sent.data, strict=False))), sent.session_hash or ""
        except ValidationError as error:
            raise invalid(error) from error

    async def answer(self, call: Call) -> str | dict[str, Any]:
        """What the function returns."""
        return await (self.show(call) if isinstance(call, Show) else self.compare(call))

    async def show(self, call: Show) -> str:
        """The answer to a click as HTML."""
        methods = [*call.chosen, *call.also]
        found = await compare(self._engine, call.image or "", split_classes(call.classes), methods, call.views)
        async with self._drawing:
            pace = self._engine.seconds_per_view
            return await asyncio.get_running_loop().run_in_executor(self._engine.pool, show.answer, found, pace)

    async def compare(self, call: Compare) -> dict[str, Any]:
        """The same as plain values."""
        return (await compare(self._engine, call.image, call.classes, call.methods, call.views)).as_dict()
