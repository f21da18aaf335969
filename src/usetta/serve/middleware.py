"""What every request passes before a route sees it, whatever is mounted on the application: plain ASGI.

Outermost first: `RequestLog` gives it an id, logs it and turns uncaught errors into a 500; `HostGuard` refuses it if it
is meant for another server; `ShutdownGuard` refuses it while the server shuts down; `KeyGuard` asks for a key;
`BodyLimit` counts the bytes of its body while they are read.
"""

import asyncio
import hmac
import logging
import re
import time
import uuid
from contextlib import suppress
from ipaddress import ip_address
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


_CALLER = "usetta_caller"


def caller_of(scope: Scope) -> str:
    """Who sends a request: the key, or the address where there are no keys. Callers share the server fairly."""
    client = scope.get("client")
    caller: str = scope.get("state", {}).get(_CALLER) or (client[0] if client else "")
    return caller


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


class HostGuard:
    """Refuses requests that address the server by a name that is not its own.

    A page of evil.example can make a browser resolve that name to this machine, and would then count as the same
    origin. It cannot change the name that the browser sends.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = "" if scope["type"] != "http" else _host_name(Headers(scope=scope).get("host", ""))
        if not host or self._is_own(host):
            await self._app(scope, receive, send)
            return
        message = f"this server is not called {host[:100]!r}; start it with --allowed-host to add a name"
        await ApiError(421, "unknown_host", message).response()(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        if host == "localhost" or host in self._hosts or "*" in self._hosts:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        # An address cannot be made to point elsewhere; a server on all addresses has them all.
        return address.is_loopback or bool(self._hosts & {"0.0.0.0", "::"})  # noqa: S104


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets; what is not of that form is the name of nobody."""
    whole = header.strip().lower()
    parts = re.fullmatch(r"\[([^\]]*)\](:\d*)?|([^:]*)(:\d*)?", whole)
    return (parts[1] or parts[3] or "").rstrip(".") if parts else whole


class KeyGuard:
    """Refuses requests without a key, if there are keys, unless their path is one of `open_paths`."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        key = self._key(Headers(scope=scope))
        if key or scope["path"] in self._open:
            scope.setdefault("state", {})[_CALLER] = key
            await self._app(scope, receive, send)
            return
        message = "send a key, as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
        error = ApiError(401, "unauthorized", message, headers={"www-authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _key(self, headers: Headers) -> str | None:
        """The key that was sent, if it is one of the server's."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = given.encode("latin-1")  # how headers are decoded, so that these are the bytes that were sent
        matches = sum(hmac.compare_digest(sent, key) for key in self._keys)  # not `any`: all take the same time
        return given if matches else None


class _TooLargeError(Exception):
    """More bytes came than the limit allows."""


class BodyLimit:
    """Refuses bodies above the limit, by their declared length or as soon as so many bytes have come."""

    def __init__(self, app: ASGIApp, limit: int, json_limit: int) -> None:
        self._app = app
        self._limit = limit
        self._json_limit = min(limit, json_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_json = "json" in headers.get("content-type", "").lower()
        limit, length = self._json_limit if is_json else self._limit, headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            await self._refuse(receive, send, limit)
            return
        count, started = 0, False

        async def counting_receive() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > limit:
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
                await self._refuse(receive, send, limit)

    async def _refuse(self, receive: Receive, send: Send, limit: int) -> None:
        """Answer at once, then read a little more before the connection is closed.

        Closing it with bytes unread resets it, and a client that is still sending may then never see the answer.
        """
        # The rest of the body is never read, so the connection cannot be used again.
        hint = "" if limit == self._limit else f" for JSON; a form may have {self._limit:,}"
        message = f"the body is larger than the limit of {limit:,} bytes{hint}"
        answer = ApiError(413, "too_large", message, headers={"connection": "close"}).response()
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": bytes(answer.body), "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})
