"""The server without HTTP: places for requests, threads that make views, and one thread that owns the models.

There is no time that an image waits for company: what arrives while the model is busy goes together when it is free.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from usetta.coop import load_context, template_of
from usetta.images import image_id, open_image
from usetta.models import Model, ModelError, load_model
from usetta.prediction import Explanation, Prediction
from usetta.serve.errors import ApiError
from usetta.serve.metrics import Metrics
from usetta.serve.parsing import Upload
from usetta.serve.prompt_cache import Learned, PromptCache
from usetta.serve.queue import JobQueue, ViewBudget
from usetta.serve.settings import Settings
from usetta.serve.worker import Job, Question, solve
from usetta.views import ViewRecipe, make_views

_log = logging.getLogger("usetta.serve")


class ModelService:
    """Answers questions about images with the models of `settings`, or with `model` in place of the first.

    Its methods are for the event loop, but for the constructor.
    """

    def __init__(self, settings: Settings, metrics: Metrics, model: Model | None = None) -> None:
        self.settings = settings
        self.models: dict[str, Model] = {}
        """By name, the default first; complete when the engine is ready."""
        self.ready = False
        self.leaving = False
        """Whether the server is about to stop: nothing new is begun."""
        self.failure: Exception | None = None
        """Why the models could not be loaded, or the thread that owns them has ended."""
        self.taken = 0
        """Requests that have a place."""
        self.pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="usetta-images")
        self._metrics = metrics
        self._given = model
        self._line = JobQueue()
        self._room = ViewBudget(settings.views_ahead)
        self._worker = Thread(target=self._work, name="usetta-model", daemon=True)
        self._pace = 0.1
        self.seconds_per_view: float | None = None
        """Of late; None before the first answer."""

    def start(self) -> None:
        """Begin to load the models, and to answer once they are there."""
        self._worker.start()

    def stop(self) -> None:
        """Answer what waits, and end the threads."""
        self.leaving = True
        self.pool.shutdown(cancel_futures=True)
        self._line.close()
        if self.ready:  # else it is loading, which may take minutes that nobody wants to wait
            self._worker.join()

    @property
    def default(self) -> str:
        """The name of the model that answers if none is named."""
        return next(iter(self.models))

    def check_ready(self) -> None:
        """Refuse what cannot be answered now."""
        if self.leaving:
            raise ApiError(503, "shutting_down", "the server is stopping", headers={"retry-after": "5"})
        if not self.ready:
            raise ApiError(503, "loading", "the model is not loaded yet", headers={"retry-after": "5"})

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests; without a free one, the caller is told when to come back."""
        self.check_ready()
        limit = self.settings.limits.queue
        if self.taken >= limit:
            seconds = max(1, math.ceil(self.taken * self._pace))
            raise ApiError(
                503,
                "queue_full",
                f"{limit} requests are waiting, as many as the server takes; try again in {seconds} s",
                headers={"retry-after": str(seconds)},
            )
        self._hold(1)
        try:
            yield
        finally:
            self._hold(-1)

    def _hold(self, places: int) -> None:
        self.taken += places
        self._metrics.queue.set(self.taken)

    async def answer(self, question: Question, upload: Upload) -> Prediction:
        """The answer of the first method about one image; ImageError and RefusedError tell what is wrong with either.

        A caller who no longer wants it cancels, and the image leaves the line unless it is being worked on.
        """
        _, answers = await self._answers(question, upload)
        return answers[0]

    async def explain(self, question: Question, upload: Upload) -> list[Explanation]:
        """The answer of every method about one image, with the views that it comes from; errors as in `answer`."""
        pixels, answers = await self._answers(question, upload)
        images = await asyncio.get_running_loop().run_in_executor(self.pool, _as_images, pixels)
        names = [recipe.name for recipe in question.recipes]
        return [Explanation(each, name, images) for each, name in zip(answers, names, strict=True)]

    async def _answers(self, question: Question, upload: Upload) -> tuple[Tensor, list[Prediction]]:
        views = 1 if question.weak_only else question.views
        async with self._room.take(views):
            loop = asyncio.get_running_loop()
            pixels = await loop.run_in_executor(self.pool, self._look, replace(question, views=views), upload)
            job = Job(question, upload.source, pixels)
            self._line.put(job)
            return pixels, await asyncio.wrap_future(job.answer)

    def _look(self, question: Question, upload: Upload) -> Tensor:
        """The views of an image, as `Classifier` makes them."""
        image = open_image(upload.file(), max_pixels=self.settings.limits.pixels)
        size = self.models[question.wording.model].image_size
        recipe = ViewRecipe(views=question.views, size=size, augmix=question.augmix, seed=question.seed)
        return make_views(image, image_id(image), recipe)

    def _work(self) -> None:
        try:
            texts = PromptCache(self.models, self.settings.text_bytes, self._load())
            self.ready = True
            while jobs := self._line.take(self.settings.batch_views):
                self._solve(jobs, texts)
                del jobs  # else the views stay in memory until the next request
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must know and stop
            self.ready, self.failure = False, error

    def _solve(self, jobs: list[Job], texts: PromptCache) -> None:
        start = time.perf_counter()
        solve(jobs, self.models, texts)
        texts.trim()
        seconds = time.perf_counter() - start
        self._pace += 0.1 * (seconds / len(jobs) - self._pace)
        per_view = seconds / sum(len(job.pixels) for job in jobs)
        before = per_view if self.seconds_per_view is None else self.seconds_per_view
        self.seconds_per_view = before + 0.3 * (per_view - before)
        self._metrics.batches.observe(len(jobs))
        self._metrics.text_lists.set(len(texts))
        self._metrics.text_bytes.set(texts.nbytes)

    def _load(self) -> Learned | None:
        settings = self.settings
        first = self._given or load_model(settings.model, precision=settings.precision, device=settings.device)
        self.models[first.name] = first
        for name in settings.also:
            model = load_model(name, precision=settings.precision, device=settings.device, offline=True)
            if model.name in self.models:
                raise ModelError(f"two models are called {model.name}: {name} and one before it")
            self.models[model.name] = model
        _log.info("models", extra={"fields": {"models": list(self.models)}})
        if settings.context is None:
            return None
        return Learned(first.name, load_context(settings.context, first), template_of(settings.context))


def _as_images(pixels: Tensor) -> np.ndarray[Any, Any]:
    """Views (N, 3, S, S) as images (N, S, S, 3) of bytes."""
    shown = pixels if pixels.dtype == torch.uint8 else (pixels * 255).round().to(torch.uint8)
    return shown.permute(0, 2, 3, 1).numpy()
