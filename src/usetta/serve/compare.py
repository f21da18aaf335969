"""What several methods say about one image, from one encoding of its views, with progress for callers who want it.

A caller who accepts `text/event-stream` gets server-sent events instead of one JSON object:

    event: progress    {"stage": "views", "views": 12, "total": 64}
    event: answer      what the JSON would have been
    event: error       the inside of an error, if it appears after the events have begun

An error before the first event is an ordinary response with its status.
"""

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from PIL import Image
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from torch import Tensor

from usetta.methods.recipe import Recipe
from usetta.methods.stats import ADAPTIVE
from usetta.prediction import Prediction
from usetta.serve.middleware import log_fields
from usetta.serve.parsing import ParsedRequest
from usetta.serve.requests import DISCONNECTED, answer_of, refusals
from usetta.serve.schemas import ApiError, CompareOptions
from usetta.serve.service import ModelService
from usetta.serve.worker import ClassifyTask, TaskProgress
from usetta.views.show import as_bytes

EVENTS = "text/event-stream"

_THUMBNAIL = 160
"""Pixels of a side."""

Emit = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Sends an event of that name."""


async def compare(
    service: ModelService,
    parsed: ParsedRequest[CompareOptions],
    task: ClassifyTask,
    on_progress: Callable[[TaskProgress], None] | None = None,
) -> dict[str, Any]:
    """The answer of every method, and what the model sees in each view."""
    upload, options = parsed.uploads[0], parsed.options
    with refusals(upload):
        episode, predictions = await service.answer(
            task, upload, keep_pixels=options.show_views, on_progress=on_progress
        )
    first = predictions[0]
    images: Sequence[str | None] = [None] * len(first.entropies)
    if episode.pixels is not None:
        images = await asyncio.get_running_loop().run_in_executor(service.pool, _thumbnails, episode.pixels)
    return {
        "answers": [
            answer_of(service, prediction, task, recipe, options)
            | {"before_tuning": _before(prediction, options.top), "beta_range": _beta_range(prediction, recipe)}
            for prediction, recipe in zip(predictions, task.recipes, strict=True)
        ],
        "views": [
            {"label": label, "entropy": round(float(entropy), 6), "image": image}
            for label, entropy, image in zip(first.view_labels, first.entropies, images, strict=True)
        ],
    }


async def compare_with_events(
    service: ModelService, parsed: ParsedRequest[CompareOptions], task: ClassifyTask, emit: Emit
) -> None:
    """The same as events: progress as it is made, then the answer."""
    loop, progress = asyncio.get_running_loop(), asyncio.Queue[TaskProgress | None]()

    def on_progress(step: TaskProgress) -> None:
        loop.call_soon_threadsafe(progress.put_nowait, step)

    work = asyncio.ensure_future(compare(service, parsed, task, on_progress))
    work.add_done_callback(lambda _work: progress.put_nowait(None))
    try:
        while (step := await progress.get()) is not None:
            await emit("progress", asdict(step))
        await emit("answer", work.result())
    finally:
        work.cancel()


class EventStream(Response):
    """A response that is sent while it is made: `work` gets a function that sends events.

    What `work` raises before the first event is left to the handlers of errors.
    """

    def __init__(self, work: Callable[[Emit], Awaitable[Response]]) -> None:
        # Proxies that collect a response before they pass it on would keep all progress until the end.
        super().__init__(media_type=EVENTS, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do the work, and send what it emits."""
        started = False

        async def emit(name: str, data: dict[str, Any]) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            event = f"event: {name}\ndata: {json.dumps(data)}\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})

        try:
            response = await self._work(emit)
        except Exception as error:
            if not started:
                raise
            fields = log_fields(scope)
            failed = ApiError(500, "internal_error", "the server failed; its log says why", error_id=fields["id"])
            refused = error if isinstance(error, ApiError) else failed
            fields["error"] = refused.code  # the status in the log is 200
            await emit("error", refused.as_dict())
            if refused is failed:
                raise
        else:
            if response.status_code == DISCONNECTED:
                return
        await send({"type": "http.response.body", "body": b""})


def _before(prediction: Prediction, top: int) -> list[dict[str, Any]] | None:
    if prediction.before is None:
        return None
    order = np.argsort(-prediction.before, kind="stable")[:top]
    return [{"label": prediction.classes[i], "probability": round(float(prediction.before[i]), 6)} for i in order]


def _beta_range(prediction: Prediction, recipe: Recipe) -> tuple[float, float] | None:
    if recipe.readout != "se" or recipe.beta != ADAPTIVE or prediction.delta is None:
        return None
    return round(0.5 - recipe.gamma / 2, 6), round(0.5 + recipe.gamma / 2, 6)


def _thumbnails(pixels: Tensor) -> list[str]:
    """Views (N, 3, S, S) as data URLs of small images."""
    urls = []
    for view in as_bytes(pixels):
        image, buffer = Image.fromarray(view), io.BytesIO()
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
        image.save(buffer, "JPEG", quality=80)
        urls.append(f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return urls
