"""The application with its routes and its OpenAPI document, and the process that serves it.

`create_app` returns a FastAPI application whose `state.service` answers without HTTP. Middleware applies to everything
that is mounted on it, the web pages included.

On SIGTERM or SIGINT the listener stays open while requests in flight are answered, so that a load balancer sees a 503
and not a refused connection. Then the process ends with 0. A second SIGINT ends it at once.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from usetta import __version__, methods
from usetta.methods.recipe import READOUTS
from usetta.models import Model
from usetta.serve import parsing, schemas, static
from usetta.serve.compare import EVENTS, Emit, EventStream, compare, compare_with_events
from usetta.serve.connections import ConnectionLimits, GuardedProtocol
from usetta.serve.middleware import (
    OPEN_PATHS,
    BodyLimit,
    HostGuard,
    KeyGuard,
    RequestLog,
    ShutdownGuard,
    caller_of,
)
from usetta.serve.monitoring import ServerMetrics
from usetta.serve.parsing import ParsedRequest
from usetta.serve.requests import answer_all, answer_one, handle_task
from usetta.serve.schemas import ApiError
from usetta.serve.service import ModelService
from usetta.serve.settings import Limits, Settings
from usetta.serve.worker import ClassifyTask

_log = logging.getLogger("usetta.serve")

_FILE = {"type": "string", "format": "binary"}
_ERRORS = {
    401: "The server has keys, and none of them was sent.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    421: "The request is for a server of another name.",
    415: "The body is of a type that the server does not read.",
    422: "Something is wrong with the request or its image, or it would take too long.",
    429: "Too many requests of one caller are in progress.",
    500: "The server failed.",
    503: "Too many requests are in progress, or the server is starting or shutting down.",
    504: "There was no answer in time.",
}


def create_app(settings: Settings | None = None, model: Model | None = None) -> FastAPI:
    """The application; a loaded `model` is used instead of the one that `settings` name."""
    settings = settings or Settings()
    metrics = ServerMetrics()
    service = ModelService(settings, metrics, model)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.stop)

    # FastAPI's pages about its document load scripts from other hosts; `static` has one that does not.
    app = FastAPI(title="usetta", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_error_handlers(app)
    _add_work(app, service, settings.limits)
    _add_sessions(app, service)
    _add_lists(app, service)
    _add_health(app, service, metrics)
    if settings.page:
        static.add_pages(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit, limit=settings.limits.upload, json_limit=settings.limits.json)
    open_paths = OPEN_PATHS | static.PATHS if settings.page else OPEN_PATHS
    app.add_middleware(KeyGuard, keys=settings.keys, open_paths=open_paths)
    app.add_middleware(ShutdownGuard, service=service)
    app.add_middleware(HostGuard, hosts=settings.hosts)
    app.add_middleware(RequestLog, metrics=metrics)
    if settings.keys:
        _describe_keys(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Give every error of `app` the one shape, those of the framework included."""

    async def own(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def by_framework(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        code = status.phrase.lower().replace(" ", "_").replace("-", "_")
        return ApiError(status, code, str(error.detail), headers=error.headers).response()

    app.add_exception_handler(ApiError, own)
    app.add_exception_handler(HTTPException, by_framework)


def _add_work(app: FastAPI, service: ModelService, limits: Limits) -> None:
    schema = schemas.request_schemas(limits)
    image = schemas.EXAMPLE_IMAGE
    read_one = partial(parsing.read_one, options=schema.options, request=schema.one)
    read_many = partial(parsing.read_many, options=schema.options, request=schema.many, most=limits.images)
    read_compare = partial(parsing.read_one, options=schema.compare_options, request=schema.compare)

    @app.post(
        "/v1/classify",
        summary="Classify an image",
        response_model=schemas.ImageAnswer,
        responses=_errors(*_ERRORS),
        openapi_extra=_body(schema.one, schema.options, "image", _FILE, image),
    )
    async def classify(request: Request) -> Response:
        async def respond(parsed: ParsedRequest[schemas.ClassifyOptions], task: ClassifyTask) -> Response:
            return JSONResponse(await answer_one(service, parsed, task))

        return await handle_task(request, service, read_one, respond)

    @app.post(
        "/v1/classify/batch",
        summary="Classify several images into the same classes",
        response_model=schemas.BatchAnswer,
        responses=_errors(*_ERRORS),
        openapi_extra=_body(schema.many, schema.options, "images", {"type": "array", "items": _FILE}, [image] * 2),
    )
    async def classify_batch(request: Request) -> Response:
        async def respond(parsed: ParsedRequest[schemas.ClassifyOptions], task: ClassifyTask) -> Response:
            return JSONResponse({"answers": await answer_all(service, parsed, task)})

        return await handle_task(request, service, read_many, respond)

    @app.post(
        "/v1/compare",
        summary="Compare several methods on one image",
        description="All methods answer from one encoding of the image's views. With `Accept: text/event-stream` the "
        "answer comes as server-sent events: `progress` (`stage`, `views`, `total`), then `answer` or `error`.",
        response_model=schemas.CompareAnswer,
        responses={200: {"content": {EVENTS: {"schema": {"type": "string"}}}}, **_errors(*_ERRORS)},
        openapi_extra=_body(schema.compare, schema.compare_options, "image", _FILE, image),
    )
    async def compare_methods(request: Request) -> Response:
        async def respond(parsed: ParsedRequest[schemas.CompareOptions], task: ClassifyTask) -> Response:
            return JSONResponse(await compare(service, parsed, task))

        async def stream(emit: Emit) -> Response:
            async def respond(parsed: ParsedRequest[schemas.CompareOptions], task: ClassifyTask) -> Response:
                await compare_with_events(service, parsed, task, emit)
                return Response()

            return await handle_task(request, service, read_compare, respond)

        if EVENTS in request.headers.get("accept", ""):
            return EventStream(stream)
        return await handle_task(request, service, read_compare, respond)


def _add_sessions(app: FastAPI, service: ModelService) -> None:
    # The name is described here, since FastAPI would add an error of its own shape for it.
    name = {"name": "session", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

    @app.delete(
        "/v1/sessions/{session:path}",
        summary="Forget what a session has learned",
        responses=_errors(401, 503),
        openapi_extra={"parameters": [name]},
    )
    async def forget_session(request: Request) -> schemas.ForgottenSession:
        service.check_ready()
        owner = caller_of(request.scope) if service.settings.keys else ""
        return schemas.ForgottenSession(forgotten=service.sessions.forget(request.path_params["session"], owner))


def _add_lists(app: FastAPI, service: ModelService) -> None:
    @app.get("/v1/methods", summary="What `method` may be", responses=_errors(401, 503))
    async def list_methods() -> schemas.MethodList:
        named = [schemas.MethodInfo(name=name, description=methods.get(name).description) for name in methods.names()]
        return schemas.MethodList(methods=named, readouts=list(READOUTS))

    @app.get("/v1/models", summary="What `model` may be, and the limits of this server", responses=_errors(401, 503))
    async def list_models() -> schemas.ServedModelList:
        service.check_ready()
        return schemas.ServedModelList(
            models=[
                schemas.ServedModel(name=name, default=name == service.default, image_size=model.image_size)
                for name, model in service.models.items()
            ],
            limits=service.settings.limits,
        )


def _add_health(app: FastAPI, service: ModelService, metrics: ServerMetrics) -> None:
    @app.get("/healthz", summary="Whether the server is alive", openapi_extra={"security": []})
    async def healthz() -> schemas.ServerStatus:
        return schemas.ServerStatus(status="alive")

    @app.get(
        "/readyz", summary="Whether it answers requests now", responses=_errors(503), openapi_extra={"security": []}
    )
    async def readyz() -> schemas.ServerStatus:
        service.check_ready()
        return schemas.ServerStatus(status="ready")

    @app.get(
        "/metrics",
        summary="Counters for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(401, 503)},
    )
    async def read_metrics() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _body(
    request: type[schemas.SharedOptions],
    options: type[schemas.SharedOptions],
    name: str,
    file: dict[str, Any],
    example: Any,
) -> dict[str, Any]:
    """A body in OpenAPI: JSON, or a form with the same fields and with files instead of base64."""
    form = options.model_json_schema()
    form["properties"][name] = file
    form["required"].append(name)
    values = {name: example, "classes": schemas.EXAMPLE_CLASSES, "views": 8}
    content = {
        parsing.JSON: {
            "schema": request.model_json_schema(),
            "examples": {"an image of four pixels": {"value": values}},
        },
        parsing.FORM: {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.ErrorBody, "description": _ERRORS[status]} for status in statuses}


def _describe_keys(app: FastAPI) -> None:
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        document["security"] = [{"bearer": []}, {"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]


class ApiServer(uvicorn.Server):
    """Uvicorn that answers requests in flight before it ends."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: ModelService,
        connections: ConnectionLimits,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(config)
        self.service = service
        self._connections = connections
        self._announce = announce

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down. Uvicorn's own handler is not called, since it would raise the signal again at the end."""
        if self.service.is_shutting_down and sig == signal.SIGINT:
            self.should_exit = self.force_exit = True
        self.service.is_shutting_down = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end now."""
        self._connections.close_stale()
        if self.service.failure is not None or (self.service.is_shutting_down and not self.service.in_flight):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Log the address: the port may have been chosen by the system."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            _log.info("listening", extra={"fields": {"host": host, "port": port}})
            if self._announce is not None:
                # All addresses of this machine are none that a browser could open.
                name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
                self._announce(f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/")


def make_server(
    settings: Settings, model: Model | None = None, announce: Callable[[str], None] | None = None
) -> ApiServer:
    """A server that waits for `run(sockets=[...])`; `announce` is called with its address when it listens."""
    app = create_app(settings, model)
    connections = ConnectionLimits(settings.limits)
    config = uvicorn.Config(
        app,
        http=partial(GuardedProtocol, connections),  # type: ignore[arg-type]  # it is called as a class would be
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=100,  # connections that are accepted at a time, and so before the limits see them
        timeout_graceful_shutdown=10,  # seconds for callers who do not read their answer
    )
    return ApiServer(config, app.state.service, connections, announce)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; an OSError says why it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error


def run(settings: Settings, host: str, port: int, announce: Callable[[str], None] | None = None) -> None:
    """Serve until a signal ends it; ModelError if the models cannot be loaded."""
    listener = listen(host, port)
    server = make_server(replace(settings, hosts=(host, *settings.hosts)), announce=announce)
    server.run(sockets=[listener])
    if server.service.failure is not None:
        raise server.service.failure
