"""A request from its body to its answer: in a slot, in time, and only as long as the caller is connected."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from usetta import methods
from usetta.adaptive import ADAPTIVE, most_views
from usetta.images import ImageError
from usetta.methods.recipe import Recipe
from usetta.prediction import Prediction
from usetta.prompts import TEMPLATES
from usetta.rejection import Rejection
from usetta.serve.costs import check_cost, check_memory, check_settings, cost
from usetta.serve.middleware import caller_of, log_fields
from usetta.serve.parsing import Options, ParsedRequest, Upload, check_content_type
from usetta.serve.prompt_cache import PromptKey
from usetta.serve.schemas import ApiError, ClassifyOptions, CompareOptions, SharedOptions
from usetta.serve.service import ModelService
from usetta.serve.sessions import SessionKey
from usetta.serve.settings import Limits
from usetta.serve.worker import ClassifyTask, RefusedError
from usetta.stream_memory import most_bytes

T = TypeVar("T")

DISCONNECTED = 499
"""The status in the log if the caller hung up; nobody receives it."""


async def handle(
    request: Request, service: ModelService, respond: Callable[[bytes], Coroutine[Any, Any, Response]]
) -> Response:
    """What `respond` makes of the body of a request, within its time.

    The slot is taken before the body is read, so that there are never more bodies in memory than slots.
    """
    limits, arrived = service.settings.limits, False
    with service.slot(caller_of(request.scope)):
        try:
            async with asyncio.timeout(limits.seconds):
                body = await _read_body(request, limits.pause)
                arrived = True
                return await _while_connected(request, respond(body))
        except TimeoutError:
            raise _timeout_error(limits.seconds, arrived) from None
        except ClientDisconnect:
            return Response(status_code=DISCONNECTED)


async def _read_body(request: Request, pause: float) -> bytes:
    """The body, as long as no part of it takes longer than `pause` to arrive."""
    chunks: list[bytes] = []
    stream = request.stream()
    while True:
        waiting = asyncio.timeout(pause)
        try:
            async with waiting:
                chunks.append(await anext(stream))
        except StopAsyncIteration:
            return b"".join(chunks)
        except TimeoutError:
            if not waiting.expired():  # it was the time for the whole request
                raise
            message = f"no part of the body arrived for {pause:g} s"
            raise ApiError(408, "request_timeout", message, headers={"connection": "close"}) from None


async def handle_task(
    request: Request,
    service: ModelService,
    parse: Callable[[str, bytes], ParsedRequest[Options]],
    respond: Callable[[ParsedRequest[Options], ClassifyTask], Coroutine[Any, Any, Response]],
) -> Response:
    """The response to a request whose body is understood by `parse`, in a thread, and answered by `respond`."""
    content_type = request.headers.get("content-type", "")
    check_content_type(content_type, request.headers.get("content-encoding", ""))

    async def process(body: bytes) -> Response:
        parsed = await asyncio.get_running_loop().run_in_executor(service.parsers, parse, content_type, body)
        task, images = make_task(parsed.options, service, caller_of(request.scope)), len(parsed.uploads)
        names = ",".join(recipe.name for recipe in task.recipes)
        total = cost(
            task.recipes,
            task.views,
            len(task.prompts.classes),
            images,
            dim=service.models[task.prompts.model].embed_dim,
            reward_model=service.settings.reward_model is not None,
        )
        fields = {"method": names, "views": parsed.options.views, "images": images, "cost": total}
        log_fields(request.scope).update(fields)
        check_cost(total, service.settings.limits)
        return await respond(parsed, task)

    return await handle(request, service, process)


def make_task(options: ClassifyOptions | CompareOptions, service: ModelService, caller: str = "") -> ClassifyTask:
    """The task of `options`; checks the limits that a schema cannot."""
    limits = service.settings.limits
    if isinstance(options, CompareOptions):
        recipes = tuple(dict.fromkeys(_recipe(method, limits, "methods") for method in options.methods))
    else:
        recipes = (_recipe(options.method, limits, "method"),)
        _check_session(recipes[0], options.session)
    model = options.model or service.default
    if model not in service.models:
        message = f"model: this server does not have {model!r}; it has {', '.join(service.models)}"
        raise ApiError(422, "unknown_model", message, field="model")
    templates = tuple(options.templates) if options.templates else None
    count = sum(len(TEMPLATES.get(template, ("",))) for template in templates or ())
    if count > limits.templates:
        message = f"templates: {count} are more than the limit of {limits.templates}"
        raise ApiError(422, "invalid_request", message, field="templates")
    prompts = PromptKey(model, tuple(options.classes), templates)
    session = None
    if isinstance(options, ClassifyOptions) and options.session is not None:
        most = service.settings.session_bytes
        nbytes = most_bytes(recipes[0], len(prompts.classes), service.models[model].embed_dim)
        check_memory(recipes[0], len(prompts.classes), nbytes, most)
        session = SessionKey(options.session, caller if service.settings.keys else "", prompts, recipes[0])
    return ClassifyTask(
        prompts,
        recipes,
        views=min(most_views(options.views), limits.views),
        adaptive=options.views == ADAPTIVE,
        augmix=options.augmix,
        seed=options.seed,
        caller=caller,
        session=session,
    )


def _recipe(method: str, limits: Limits, field: str) -> Recipe:
    try:
        recipe = methods.get(method)
    except ValueError as error:
        raise ApiError(422, "invalid_method", str(error), field=field) from error
    if recipe.remembers and field == "methods":
        message = f"methods: '{recipe.name}' learns from every image that it answers; ask /v1/classify, with a session"
        raise ApiError(422, "invalid_method", message, field=field)
    check_settings(recipe, limits, field)
    return recipe


def _check_session(recipe: Recipe, session: str | None) -> None:
    if recipe.remembers and session is None:
        message = (
            f"method '{recipe.name}' remembers earlier images, and without a session a server would mix those of all "
            "its users: name one with the field 'session'"
        )
        raise ApiError(422, "session_required", message, field="session")
    if session is not None and not recipe.remembers:
        message = f"session: method '{recipe.name}' answers every image by itself, so it has nothing to remember"
        raise ApiError(422, "invalid_request", message, field="session")


async def answer_one(
    service: ModelService, parsed: ParsedRequest[ClassifyOptions], task: ClassifyTask, number: int = 0
) -> dict[str, Any]:
    """The answer about one of the images."""
    upload = parsed.uploads[number]
    with refusals(upload):
        _, (prediction,) = await service.answer(task, upload)
    return answer_of(service, prediction, task, task.recipes[0], parsed.options)


async def answer_all(
    service: ModelService, parsed: ParsedRequest[ClassifyOptions], task: ClassifyTask
) -> list[dict[str, Any]]:
    """The answers about all images, or what is wrong with an image; what is wrong with the task is raised."""

    async def answer(number: int) -> dict[str, Any]:
        try:
            return await answer_one(service, parsed, task, number)
        except ApiError as error:
            if error.code != "unreadable_image":
                raise
            return {"source": parsed.uploads[number].source, "error": error.as_dict()}

    return await _gather(answer(number) for number in range(len(parsed.uploads)))


def answer_of(
    service: ModelService, prediction: Prediction, task: ClassifyTask, recipe: Recipe, options: SharedOptions
) -> dict[str, Any]:
    """A prediction as callers see it."""
    known, below = service.calibration, options.reject_below
    if known and (task.prompts.model, recipe.name, options.reject) == (service.default, known.method, "confidence"):
        below = known.reject_below if below is None else below
        prediction = replace(prediction, rejection=Rejection(below, temperature=known.temperature))
    elif below is not None:
        prediction = replace(prediction, rejection=Rejection(below, options.reject))
    answer = prediction.to_dict(options.top)
    return {"source": answer.pop("source"), "model": task.prompts.model, "method": recipe.name} | answer


@contextmanager
def refusals(upload: Upload) -> Iterator[None]:
    """What the service says is wrong with an image or a task, as an error for the caller."""
    try:
        yield
    except ImageError as error:
        raise ApiError(422, "unreadable_image", f"{upload.field}: {error.reason}", field=upload.field) from error
    except RefusedError as error:
        raise ApiError(422, "invalid_request", str(error)) from error


async def _gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; when one fails, the others are cancelled, which `asyncio.gather` does not do."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the caller hangs up."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for future in (task, disconnect):
            future.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _timeout_error(seconds: float, arrived: bool) -> ApiError:
    if arrived:
        return ApiError(504, "timeout", f"there was no answer within {seconds:g} s")
    message = f"the body did not arrive within {seconds:g} s"
    return ApiError(408, "request_timeout", message, headers={"connection": "close"})
