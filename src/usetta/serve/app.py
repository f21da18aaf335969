"""The application: its routes, and what OpenAPI says of them.

`create_app` returns a FastAPI application whose `state.engine` answers images without HTTP, and which has a web page
at `/`: the guards stand before it as well.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from usetta import __version__, methods
from usetta.methods.recipe import READOUTS
from usetta.models import Model
from usetta.serve import errors, parsing, schemas
from usetta.serve.errors import ApiError
from usetta.serve.guards import BodyLimit, Keys, Leaving, Watch
from usetta.serve.metrics import Metrics
from usetta.serve.parsing import ParsedRequest
from usetta.serve.requests import answer_all, answer_one, attend_question
from usetta.serve.service import ModelService
from usetta.serve.settings import Limits, Settings
from usetta.serve.worker import Question

_ERRORS = {
    401: "There are keys, and none of them was sent.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is of a type that is not read here.",
    422: "Something is wrong with the request or its image.",
    500: "The server failed.",
    503: "Too many requests are waiting, or the server is starting or stopping.",
    504: "There was no answer in time.",
}


def create_app(settings: Settings | None = None, model: Model | None = None) -> FastAPI:
    """The application; a loaded `model` takes the place of the one that `settings` name."""
    settings = settings or Settings()
    metrics = Metrics()
    engine = ModelService(settings, metrics, model)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await asyncio.to_thread(engine.stop)

    # FastAPI's pages about its document load scripts from other hosts, so there are none.
    app = FastAPI(title="usetta", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = engine
    errors.install(app)
    _add_work(app, engine, settings.limits)
    _add_lists(app, engine)
    _add_health(app, engine, metrics)
    if settings.page:
        from usetta.serve.page.routes import add_page  # Gradio takes seconds to import

        add_page(app, engine)
    app.add_middleware(BodyLimit, limit=settings.limits.upload)  # the last one added is the outermost
    app.add_middleware(Keys, keys=settings.keys)
    app.add_middleware(Leaving, engine=engine)
    app.add_middleware(Watch, metrics=metrics)
    if settings.keys:
        _tell_about_keys(app)
    return app


def _add_work(app: FastAPI, engine: ModelService, limits: Limits) -> None:
    schema = schemas.requests(limits)
    image = schemas.EXAMPLE_IMAGE
    read_one = partial(parsing.read_one, schema=schema)
    read_many = partial(parsing.read_many, schema=schema, most=limits.images)

    @app.post(
        "/v1/classify",
        summary="Classify an image",
        response_model=schemas.Answer,
        responses=_errors(*_ERRORS),
        openapi_extra=_body(schema.one, schema.options, "image", _FILE, image),
    )
    async def classify(request: Request) -> Response:
        async def respond(asked: ParsedRequest, question: Question) -> Response:
            answer = await answer_one(engine, asked, question)
            return answer.response() if isinstance(answer, ApiError) else JSONResponse(answer)

        return await attend_question(request, engine, read_one, respond)

    @app.post(
        "/v1/classify/batch",
        summary="Classify several images into the same classes",
        response_model=schemas.BatchAnswer,
        responses=_errors(*_ERRORS),
        openapi_extra=_body(schema.many, schema.options, "images", {"type": "array", "items": _FILE}, [image] * 2),
    )
    async def classify_batch(request: Request) -> Response:
        async def respond(asked: ParsedRequest, question: Question) -> Response:
            answers = await answer_all(engine, asked, question)
            told = [
                {"source": upload.source, "error": each.as_dict()} if isinstance(each, ApiError) else each
                for upload, each in zip(asked.uploads, answers, strict=True)
            ]
            return JSONResponse({"answers": told})

        return await attend_question(request, engine, read_many, respond)


def _add_lists(app: FastAPI, engine: ModelService) -> None:
    @app.get("/v1/methods", summary="What `method` may be", responses=_errors(401, 503))
    async def list_methods() -> schemas.Methods:
        named = [schemas.Method(name=name, description=methods.get(name).description) for name in methods.names()]
        return schemas.Methods(methods=named, readouts=list(READOUTS))

    @app.get("/v1/models", summary="What `model` may be", responses=_errors(401, 503))
    async def list_models() -> schemas.ServedModels:
        engine.check_ready()
        return schemas.ServedModels(
            models=[
                schemas.ServedModel(name=name, default=name == engine.default, image_size=model.image_size)
                for name, model in engine.models.items()
            ]
        )


def _add_health(app: FastAPI, engine: ModelService, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Whether the server is alive", openapi_extra={"security": []})
    async def healthz() -> schemas.State:
        return schemas.State(status="alive")

    @app.get(
        "/readyz", summary="Whether it answers requests now", responses=_errors(503), openapi_extra={"security": []}
    )
    async def readyz() -> schemas.State:
        engine.check_ready()
        return schemas.State(status="ready")

    @app.get(
        "/metrics",
        summary="Counters for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(401, 503)},
    )
    async def read_metrics() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)


_FILE = {"type": "string", "format": "binary"}


def _body(
    asked: type[schemas.Options], options: type[schemas.Options], name: str, file: dict[str, Any], example: Any
) -> dict[str, Any]:
    """What OpenAPI says of a body: JSON, or a form with the same fields and files as they are."""
    form = options.model_json_schema()
    form["properties"][name] = file
    form["required"].append(name)
    named = {name: example, "classes": schemas.EXAMPLE_CLASSES, "views": 8}
    content = {
        parsing.JSON: {"schema": asked.model_json_schema(), "examples": {"an image of four pixels": {"value": named}}},
        parsing.FORM: {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": schemas.ErrorBody, "description": _ERRORS[status]} for status in statuses}


def _tell_about_keys(app: FastAPI) -> None:
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
