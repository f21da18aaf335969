"""Errors as callers see them: one shape for all, and never a stack trace.

    {"error": {"code": "too_large", "message": "the body is larger than ...", "field": "image"}}

`code` is for programs and does not change; `message` is for people, and is the library's own where it has one.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from usetta.images import ImageError


class ApiError(Exception):
    """What a caller is told instead of an answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        error_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.error_id = error_id
        self.headers = dict(headers or {})

    def as_dict(self) -> dict[str, Any]:
        """The inside of the body."""
        told = {"code": self.code, "message": self.message, "field": self.field, "id": self.error_id}
        return {name: value for name, value in told.items() if value is not None}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse({"error": self.as_dict()}, status_code=self.status, headers=self.headers)


def too_large(limit: int) -> ApiError:
    """The body is longer than the server reads. What is left of it is never read, so the connection ends."""
    return ApiError(
        413,
        "too_large",
        f"the body is larger than the limit of {limit:,} bytes",
        headers={"connection": "close"},
    )


def unreadable(error: ImageError, field: str) -> ApiError:
    """An image that cannot be opened."""
    return ApiError(422, "unreadable_image", f"{field}: {error.reason}", field=field)


def invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a request; what was sent is not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = f"{field}: {first['msg']}" if field else first["msg"]
    return ApiError(422, "invalid_request", message, field=field or None)


def install(app: FastAPI) -> None:
    """Give every error of `app` the one shape, those of the framework included."""

    async def told(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def by_framework(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        code = status.phrase.lower().replace(" ", "_").replace("-", "_")
        return ApiError(status, code, str(error.detail), headers=error.headers).response()

    app.add_exception_handler(ApiError, told)
    app.add_exception_handler(HTTPException, by_framework)
