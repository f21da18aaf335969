"""What every request passes before a route sees it, whatever is mounted on the application: plain ASGI.

Outermost first: `RequestLog` gives it an id, logs it and turns uncaught errors into a 500; `ShutdownGuard` refuses it
while the server shuts down; `KeyGuard` asks for a key; `BodyLimit` counts the bytes of its body while they are read.
"""

import asyncio
import hmac
import logging
import time
import uuid
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from usetta.serve import static
from usetta.serve.monitoring import ServerMetrics
from usetta.serve.schemas import ApiError
from usetta.serve.service import ModelService

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""For health checks: need no key, and are answered during shutdown."""
QUIET_ROUTES = frozenset({static.ROUTE})
"""The page's own files, several for each visit, which are not logged."""

_log = logging.getLogger("usetta.serve")


_LINGER = 1.0
"""Seconds in which the rest of a refused body is read and thrown away."""


def log_fields(scope: Scope) -> dict[str, Any]:
    """Fields that the log has about a request; handlers add to them."""
    fields: dict[str, Any] = scope.setdefault("state", {}).setdefault("usetta_log_fields", {})
    return fields


class RequestLog:
    """The log, the metrics, and the last resort."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = log_fields(scope)["id"] = uuid.uuid4().hex
        status = 0
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            _log.error("failed", exc_info=error, extra={"fields": {"id": request_id}})
            if status:  # the answer has begun, so it can only be cut off
                raise
            failed = ApiError(500, "internal_error", "the server failed; its log says why", error_id=request_id)
            await failed.response()(scope, receive, send_with_id)
        finally:
            self._record(scope, status, time.perf_counter() - start)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, status).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        more = log_fields(scope)
        fields = {"id": more.pop("id"), "verb": scope["method"], "route": route, "status": status}
        level = logging.DEBUG if route in QUIET_ROUTES and status < 400 else logging.INFO
        _log.log(level, "request", extra={"fields": {**fields, "ms": round(seconds * 1000, 1), **more}})


class ShutdownGuard:
    """Refuses new requests while the server shuts down."""

    def __init__(self, app: ASGIApp, service: ModelService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._service.is_shutting_down and scope["path"] not in OPEN_PATHS:
            headers = {"connection": "close", "retry-after": "5"}
            error = ApiError(503, "shutting_down", "the server is shutting down", headers=headers)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class KeyGuard:
    """Refuses requests without a key, if there are keys, unless their path is one of `open_paths`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._keys
            or scope["path"] in self._open
            or self._has_key(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
            return
        message = "send a key, as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
        error = ApiError(401, "unauthorized", message, headers={"www-authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = given.encode("latin-1")  # how headers are decoded, so that these are the bytes that were sent
        return sum(hmac.compare_digest(sent, key) for key in self._keys) > 0  # not `any`: all take the same time


class _TooLargeError(Exception):
    """More bytes came than the limit allows."""


class BodyLimit:
    """Refuses bodies above the limit, by their declared length or as soon as so many bytes have come."""

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

        async def counting_receive() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._limit:
                raise _TooLargeError
            return message

        async def noticing_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counting_receive, noticing_send)
        except _TooLargeError:
            if not started:
                await self._refuse(receive, send)

    async def _refuse(self, receive: Receive, send: Send) -> None:
        """Answer at once, then read a little more before the connection is closed.

        Closing it with bytes unread resets it, and a client that is still sending may then never see the answer.
        """
        # The rest of the body is never read, so the connection cannot be used again.
        message = f"the body is larger than the limit of {self._limit:,} bytes"
        answer = ApiError(413, "too_large", message, headers={"connection": "close"}).response()
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})
