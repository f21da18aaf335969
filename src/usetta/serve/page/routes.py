"""The few addresses of Gradio that a page needs, each let through by name; all others do not exist here.

Gradio's server can do much that this one promises not to: fetch addresses, read and keep files, answer other origins.
So it is not mounted: its page and its static files are passed on, and calls of functions are answered here (`calls`). A
content security policy makes the browser refuse what is not from here.
"""

import json
import time
import uuid
from collections import OrderedDict
from importlib.resources import files
from typing import Any

import gradio as gr
from fastapi import FastAPI, Request
from gradio.routes import App
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from usetta.serve.page import layout, show
from usetta.serve.page.calls import PageCall, PageCalls, ShowCall
from usetta.serve.parsing import JSON, check_content_type
from usetta.serve.requests import handle
from usetta.serve.schemas import ApiError
from usetta.serve.service import ModelService

PASSED_ON = (
    "/",
    "/config",
    "/theme.css",
    "/manifest.json",
    "/favicon.ico",
    "/gradio_api/info",
    "/assets/{path:path}",
    "/static/{path:path}",
)
"""What Gradio answers to GET."""

_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; font-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)


def add_page(app: FastAPI, service: ModelService) -> None:
    """Put the page on `app`."""
    calls = PageCalls(service)
    blocks = layout.build(show.welcome(None), service.settings.limits)
    calls.numbers = {number: str(fn.api_name) for number, fn in blocks.fns.items()}
    _add_files(app, _gradio(blocks))
    _add_run(app, service, calls)
    _add_queue(app, service, calls)


def _add_files(app: FastAPI, gradio: ASGIApp) -> None:
    async def pass_on(request: Request) -> Response:
        return _GradioResponse(gradio)

    for path in PASSED_ON:
        app.get(path, include_in_schema=False)(pass_on)

    @app.get("/examples/{name}.jpg", include_in_schema=False)
    async def example(name: str) -> Response:
        if name not in layout.EXAMPLES:
            raise ApiError(404, "not_found", "Not Found")
        image = (files("usetta.serve.page") / "examples" / f"{name}.jpg").read_bytes()
        return Response(image, media_type="image/jpeg", headers={"cache-control": "max-age=3600"})


def _add_run(app: FastAPI, service: ModelService, calls: PageCalls) -> None:
    """What the page does on a click, and `curl` can do too: one request, one answer."""

    @app.post("/gradio_api/run/{name}", include_in_schema=False)
    async def run(name: str, request: Request) -> Response:
        _check_json(request)
        call: PageCall | None = None

        async def respond(body: bytes) -> Response:
            nonlocal call
            call, _ = await calls.parse(name, body)
            return JSONResponse({"data": [await calls.answer(call)]})

        try:
            return await handle(request, service, respond)
        except ApiError as error:
            if name == "show" or isinstance(call, ShowCall):  # the page shows the sentence instead of an answer
                return JSONResponse({"data": [show.problem(error.message)]})
            return JSONResponse({"error": error.message}, error.status, error.headers)


def _add_queue(app: FastAPI, service: ModelService, calls: PageCalls) -> None:
    """What Gradio's Python client does: it leaves its call, and then asks for the answer.

    The work is done when it asks, so that it has a slot, a time limit and somebody who waits. Until then the call is
    kept, but only as many as there are slots, and each for as long as a request may take.
    """
    kept: OrderedDict[str, tuple[str, PageCall, float]] = OrderedDict()
    limits = service.settings.limits

    @app.post("/gradio_api/queue/join", include_in_schema=False)
    async def join(request: Request) -> Response:
        _check_json(request)

        async def respond(body: bytes) -> Response:
            call, session = await calls.parse("", body)
            if not session:
                raise ApiError(422, "invalid_request", "the call names no session")
            event, now = uuid.uuid4().hex, time.monotonic()
            kept[event] = (session, call, now)
            while len(kept) > limits.queue or next(iter(kept.values()))[2] < now - limits.seconds:
                kept.popitem(last=False)
            return JSONResponse({"event_id": event})

        return await handle(request, service, respond)

    @app.get("/gradio_api/queue/data", include_in_schema=False)
    async def data(request: Request, session_hash: str = "") -> Response:
        async def respond(_body: bytes) -> Response:
            events: list[dict[str, Any]] = []
            while event := next((event for event, (session, *_) in kept.items() if session == session_hash), None):
                _, call, _ = kept.pop(event)
                events.append({"msg": "process_completed", "event_id": event} | await _output(calls, call))
            events.append({"msg": "close_stream"})
            return Response(
                "".join(f"data: {json.dumps(message)}\n\n" for message in events), media_type="text/event-stream"
            )

        return await handle(request, service, respond)


async def _output(calls: PageCalls, call: PageCall) -> dict[str, Any]:
    try:
        return {"success": True, "output": {"data": [await calls.answer(call)]}}
    except ApiError as error:
        return {"success": False, "output": {"error": error.message}}


def _check_json(request: Request) -> None:
    """JSON alone, which no page of another site can make a browser send."""
    check_content_type(request.headers.get("content-type", ""), request.headers.get("content-encoding", ""), (JSON,))


def _gradio(blocks: gr.Blocks) -> ASGIApp:
    """Gradio's application; its queue is never started, since nothing goes through it."""
    parent = FastAPI()
    gr.mount_gradio_app(
        parent,
        blocks,
        path="/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        theme=layout.theme(),
        css=layout.read("page.css"),
        head=f"<script>{layout.read('page.js')}</script>",
    )
    (gradio,) = (app for route in parent.routes if isinstance(app := getattr(route, "app", None), App))
    return gradio


class _GradioResponse(Response):
    """A response that Gradio gives."""

    def __init__(self, gradio: ASGIApp) -> None:
        super().__init__()
        self._gradio = gradio

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and the answer back under the policy."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["content-security-policy"] = _POLICY
                headers["referrer-policy"] = "no-referrer"
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        await self._gradio(_inner(scope), receive, guarded)


def _inner(scope: Scope) -> Scope:
    """The request as Gradio sees it: without an origin, or it would answer other ones; uncompressed, as all is here."""
    hidden = (b"origin", b"accept-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name not in hidden]
    return {**scope, "headers": headers, "state": {}}
