"""The way of a request from its body to its answer: in a place, in time, and as long as the caller is there."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from usetta import methods
from usetta.images import ImageError
from usetta.methods.recipe import Recipe
from usetta.prompts import TEMPLATES
from usetta.serve.errors import ApiError, unreadable
from usetta.serve.guards import notes
from usetta.serve.parsing import ParsedRequest, check_content_type
from usetta.serve.prompt_cache import PromptKey
from usetta.serve.schemas import Options
from usetta.serve.service import ModelService
from usetta.serve.settings import Limits
from usetta.serve.worker import Question, RefusedError

T = TypeVar("T")

GONE = 499
"""What the log says of a caller who hung up; nobody gets to see this status."""


async def attend(
    request: Request, engine: ModelService, respond: Callable[[bytes], Coroutine[Any, Any, Response]]
) -> Response:
    """What `respond` makes of the body of a request, which has a place and its time.

    The place is taken before the body is read, so that the bodies in memory are as many as the places.
    """
    seconds, arrived = engine.settings.limits.seconds, False
    with engine.place():
        try:
            async with asyncio.timeout(seconds):
                body = b"".join([chunk async for chunk in request.stream()])
                arrived = True
                return await _while_there(request, respond(body))
        except TimeoutError:
            raise _late(seconds, arrived) from None
        except ClientDisconnect:
            return Response(status_code=GONE)


async def attend_question(
    request: Request,
    engine: ModelService,
    read: Callable[[str, bytes], ParsedRequest],
    respond: Callable[[ParsedRequest, Question], Coroutine[Any, Any, Response]],
) -> Response:
    """The response to a request whose body is understood by `read`, in a thread, and answered by `respond`."""
    content_type = request.headers.get("content-type", "")
    check_content_type(content_type, request.headers.get("content-encoding", ""))

    async def process(body: bytes) -> Response:
        asked = await asyncio.get_running_loop().run_in_executor(engine.pool, read, content_type, body)
        question = ask(asked.options, engine)
        (recipe,) = question.recipes
        notes(request.scope).update(method=recipe.name, views=question.views, images=len(asked.uploads))
        return await respond(asked, question)

    return await attend(request, engine, process)


def ask(options: Options, engine: ModelService, *, also: Sequence[str] = ()) -> Question:
    """The question that `options` ask, of other methods `also`, within the limits that need the library to be known."""
    limits = engine.settings.limits
    recipes = tuple(dict.fromkeys(_recipe(method, limits) for method in (options.method, *also)))
    model = options.model or engine.default
    if model not in engine.models:
        message = f"model: this server does not have {model!r}; it has {', '.join(engine.models)}"
        raise ApiError(422, "unknown_model", message, field="model")
    templates = tuple(options.templates) if options.templates else None
    count = sum(len(TEMPLATES.get(template, ("",))) for template in templates or ())
    if count > limits.templates:
        message = f"templates: {count} are more than the limit of {limits.templates}"
        raise ApiError(422, "invalid_request", message, field="templates")
    wording = PromptKey(model, tuple(options.classes), templates)
    return Question(wording, recipes, options.views, options.augmix, options.seed)


def _recipe(method: str, limits: Limits) -> Recipe:
    try:
        recipe = methods.get(method)
    except ValueError as error:
        raise ApiError(422, "invalid_method", str(error), field="method") from error
    if recipe.tunes and recipe.steps > limits.steps:
        message = f"method: {recipe.steps} steps are more than the limit of {limits.steps}"
        raise ApiError(422, "invalid_method", message, field="method")
    return recipe


async def answer_one(
    engine: ModelService, asked: ParsedRequest, question: Question, place: int = 0
) -> dict[str, Any] | ApiError:
    """The answer about one of the images, or what is wrong with it; what is wrong with the question is raised."""
    upload = asked.uploads[place]
    try:
        found = await engine.answer(question, upload)
    except ImageError as error:
        return unreadable(error, upload.field)
    except RefusedError as error:
        raise ApiError(422, "invalid_request", str(error)) from error
    answer = found.as_dict(asked.options.top)
    told = {"source": answer.pop("source"), "model": question.wording.model, "method": question.recipes[0].name}
    return told | answer


async def answer_all(engine: ModelService, asked: ParsedRequest, question: Question) -> list[dict[str, Any] | ApiError]:
    """The answers about all images, or for each what is wrong with it."""
    return await _all(answer_one(engine, asked, question, i) for i in range(len(asked.uploads)))


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; when one fails, the others are given up."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is given up when the caller hangs up."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await _ended(task, gone)


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _late(seconds: float, arrived: bool) -> ApiError:
    if arrived:
        return ApiError(504, "timeout", f"there was no answer within {seconds:g} s")
    message = f"the body did not arrive within {seconds:g} s"
    return ApiError(408, "request_timeout", message, headers={"connection": "close"})
