"""What every request passes before it is looked at, whatever is mounted on the application: plain ASGI, no framework.

Outermost first: `Watch` gives it a number, logs it and turns what nobody caught into a 500; `Leaving` refuses it when
the server stops; `Keys` asks for a key; `BodyLimit` counts its bytes while they are read.
"""

import asyncio
import base64
import binascii
import hmac
import logging
import time
import uuid
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from usetta.serve.errors import ApiError, too_large
from usetta.serve.metrics import Metrics
from usetta.serve.service import ModelService

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""What those who look after the server may see without a key, and while it stops."""
QUIET_ROUTES = frozenset({"/assets/{path:path}", "/static/{path:path}"})
"""The page's own files, dozens for each visit, which the log does not tell of."""

_log = logging.getLogger("usetta.serve")


def notes(scope: Scope) -> dict[str, Any]:
    """What the log shall tell about a request; handlers add to it."""
    found: dict[str, Any] = scope.setdefault("state", {}).setdefault("usetta_notes", {})
    return found


class Watch:
    """The log, the metrics, and the last resort."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        status = 0
        start = time.perf_counter()

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, numbered)
        except Exception as error:
            _log.error("failed", exc_info=error, extra={"fields": {"id": request_id}})
            if status:  # the answer has begun, so that nothing but ending it is left
                raise
            failed = ApiError(500, "internal_error", "the server failed; its log tells why", error_id=request_id)
            await failed.response()(scope, receive, numbered)
        finally:
            self._note(scope, request_id, status, time.perf_counter() - start)

    def _note(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, status).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        said = {"id": request_id, "verb": scope["method"], "route": route, "status": status}
        level = logging.DEBUG if route in QUIET_ROUTES and status < 400 else logging.INFO
        _log.log(level, "request", extra={"fields": {**said, "ms": round(seconds * 1000, 1), **notes(scope)}})


class Leaving:
    """Nothing new once the server is told to stop."""

    def __init__(self, app: ASGIApp, engine: ModelService) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._engine.leaving and scope["path"] not in OPEN_PATHS:
            headers = {"connection": "close", "retry-after": "5"}
            error = ApiError(503, "shutting_down", "the server is stopping", headers=headers)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class Keys:
    """Only those who have a key, if there are keys.

    A browser that asks for the page is told to ask for a password, which is a key under any name; it then sends it with
    everything that the page loads.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._keys
            or scope["path"] in OPEN_PATHS
            or self._known(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        message = "send a key, as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
        scheme = 'Basic realm="usetta: the password is a key", charset="UTF-8"' if scope["path"] == "/" else "Bearer"
        error = ApiError(401, "unauthorized", message, headers={"www-authenticate": scheme})
        await error.response()(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = given.encode("latin-1")  # how headers are decoded, so that these are the bytes that were sent
        if scheme.lower() == "basic":
            with suppress(binascii.Error, ValueError):
                sent = base64.b64decode(token.strip(), validate=True).partition(b":")[2]
        return sum(hmac.compare_digest(sent, key) for key in self._keys) > 0  # all of them, to take the same time


class _TooLargeError(Exception):
    """More bytes came than the limit allows."""


class BodyLimit:
    """No more bytes of a body than the limit, told by its length or counted as they come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._limit:
            await self._refuse(receive, send)
            return
        count, started = 0, False

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._limit:
                raise _TooLargeError
            return message

        async def noticed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noticed)
        except _TooLargeError:
            if not started:
                await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """Answer at once, then read a little more before the connection is closed.

        Closing it with bytes unread resets it, and a client that is still sending may then never see the answer.
        """
        answer = too_large(self._limit).response()
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


_LINGER = 1.0
"""Seconds in which the rest of a refused body is read and thrown away."""
