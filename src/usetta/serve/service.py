"""The server without HTTP: slots for requests, threads that make views, and one thread that owns the models.

An image goes to the thread pool (`Pipeline.make_stage`) and then, as a job, to the model thread (`Pipeline.encode`); an
adaptive one goes round until it is settled. No job waits for others to fill a batch: those that arrive while the model
is busy are taken together when it is free. On a CPU these are no more than there are cores: a single image gets them
all, and as soon as others are on their way each gets one, so that none is idle while cores wait for each other.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread, current_thread

import torch
from torch import Tensor

from usetta.adaptive import least_views
from usetta.cancellation import WorkCancelledError, checked_by
from usetta.coop import load_context, template_of
from usetta.episode import Episode
from usetta.feature_cache import FeatureCache
from usetta.models import Model, ModelError, load_model
from usetta.models.base import view_recipe
from usetta.pipeline import ImageRequest, PendingImage, Pipeline
from usetta.prediction import Prediction
from usetta.rejection import Calibration
from usetta.serve.monitoring import ServerMetrics
from usetta.serve.parsing import Upload
from usetta.serve.prompt_cache import LearnedContext, PromptCache
from usetta.serve.schemas import ApiError
from usetta.serve.sessions import SessionCache, SessionTurn
from usetta.serve.settings import Settings
from usetta.serve.worker import ClassifyTask, FairBudget, Job, JobQueue, TaskProgress, launch
from usetta.stream_memory import StreamMemory, most_bytes

_KEPT_PIXELS = 4_000_000
"""An image of more pixels is not kept open between stages but decoded again: 64 requests may hold one each."""

_log = logging.getLogger("usetta.serve")


class ModelService:
    """Answers tasks about images with the models of `settings`, or with `model` in place of the first.

    Its methods are for the event loop, except for the constructor.
    """

    def __init__(self, settings: Settings, metrics: ServerMetrics, model: Model | None = None) -> None:
        self.settings = settings
        self.calibration = None if settings.calibration is None else Calibration.load(settings.calibration)
        self.models: dict[str, Model] = {}
        """By name, the default first; complete when the service is ready."""
        self.is_ready = False
        self.is_shutting_down = False
        """Whether new requests are refused because the server is about to end."""
        self.failure: Exception | None = None
        """Why the models could not be loaded, or the model thread has ended."""
        self.in_flight = 0
        """Requests that hold a slot: being read, waiting or being answered."""
        self.pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="usetta-images")
        self.parsers = ThreadPoolExecutor(1, thread_name_prefix="usetta-parser")
        """Apart from `pool`, so that no body waits behind an image that takes long."""
        self._metrics = metrics
        self._given = model
        self._pipelines: dict[str, Pipeline] = {}
        self._prompts: PromptCache | None = None
        self.sessions = SessionCache(
            settings.limits.sessions, settings.session_bytes, settings.session_seconds, metrics.sessions.set
        )
        self._queue = JobQueue()
        self._budget = FairBudget(settings.views_ahead, settings.views_ahead // 2)
        self._decoders = FairBudget(settings.threads, settings.threads)
        self._slots: Counter[str] = Counter()
        self._thread = Thread(target=self._run, name="usetta-model", daemon=True)
        self._seconds_per_job = 0.1
        self._images = 0  # being decoded, waiting or being answered

    def start(self) -> None:
        """Start to load the models, and to answer once they are loaded."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what waits, and end the threads."""
        self.is_shutting_down = True
        self.parsers.shutdown(cancel_futures=True)
        self.pool.shutdown(cancel_futures=True)
        self._queue.close()
        if self.is_ready:  # otherwise it is still loading, which may take minutes
            self._thread.join()

    @property
    def default(self) -> str:
        """The name of the model that answers requests which name none."""
        return next(iter(self.models))

    @property
    def waiting(self) -> int:
        """Jobs that wait for the model."""
        return len(self._queue)

    def check_ready(self) -> None:
        """Refuse what cannot be answered now."""
        if self.is_shutting_down:
            raise ApiError(503, "shutting_down", "the server is shutting down", headers={"retry-after": "5"})
        if not self.is_ready:
            raise ApiError(503, "loading", "the model is not loaded yet", headers={"retry-after": "5"})

    @contextmanager
    def slot(self, caller: str) -> Iterator[None]:
        """One of the slots for requests; without a free one, the error says when to try again."""
        self.check_ready()
        limits = self.settings.limits
        seconds = max(1, math.ceil(self.in_flight * self._seconds_per_job))
        headers = {"retry-after": str(seconds)}
        if self.in_flight >= limits.queue:
            message = f"{limits.queue} requests are in progress, as many as the server takes; try again in {seconds} s"
            raise ApiError(503, "queue_full", message, headers=headers)
        if self._slots[caller] >= limits.queue_per_caller:
            message = (
                f"{limits.queue_per_caller} requests of yours are in progress, as many as one caller may have; "
                f"try again in {seconds} s"
            )
            raise ApiError(429, "too_many_requests", message, headers=headers)
        self._count_in_flight(caller, 1)
        try:
            yield
        finally:
            self._count_in_flight(caller, -1)

    def _count_in_flight(self, caller: str, change: int) -> None:
        self.in_flight += change
        self._slots[caller] += change
        self._slots += Counter()  # without callers who have none
        self._metrics.queue.set(self.in_flight)

    async def answer(
        self,
        task: ClassifyTask,
        upload: Upload,
        *,
        keep_pixels: bool = False,
        on_progress: Callable[[TaskProgress], None] | None = None,
    ) -> tuple[Episode, list[Prediction]]:
        """The views of an image and the prediction of each method; an ImageError or RefusedError says what is wrong.

        To cancel it takes the image out of the queue, or ends the work on it after the current chunk of views or step
        of a method. `on_progress` is called by any thread.
        """
        if task.session is None:
            return await self._answer(task, upload, keep_pixels, on_progress, None)
        (recipe,), model = task.recipes, self.models[task.prompts.model]
        nbytes = most_bytes(recipe, len(task.prompts.classes), model.embed_dim)
        make = partial(StreamMemory, recipe, model, task.prompts.classes)
        async with self.sessions.turn(task.session, nbytes, make) as turn:
            return await self._answer(task, upload, keep_pixels, on_progress, turn)

    async def _answer(
        self,
        task: ClassifyTask,
        upload: Upload,
        keep_pixels: bool,
        on_progress: Callable[[TaskProgress], None] | None,
        turn: SessionTurn | None,
    ) -> tuple[Episode, list[Prediction]]:
        request = self._request(task, upload, keep_pixels)
        pipeline, pending = self._pipelines[task.prompts.model], PendingImage(request)
        loop = asyncio.get_running_loop()
        if on_progress is not None:
            on_progress(TaskProgress("waiting", 0, request.views.views))
        work = _Work()
        self._images += 1
        try:
            async with self._budget.reserve(task.caller, request.views.views):
                while True:
                    async with self._decoders.reserve(task.caller, 1):
                        # The views of a single image have all threads, as the model waits for them.
                        threads = self.settings.threads if self._images == 1 else 1
                        await loop.run_in_executor(self.pool, _make_stage, pipeline, pending, work, threads)
                    work.job = job = Job(task, upload.source, pending, on_progress)
                    if turn is not None:
                        job.memory = turn.memory
                        turn.job = job.result
                    self._queue.put(job)
                    predictions = await asyncio.wrap_future(job.result)
                    if predictions is not None:
                        assert pending.episode is not None
                        return pending.episode, predictions
        finally:
            work.abandon()
            self._images -= 1

    def _request(self, task: ClassifyTask, upload: Upload, keep_pixels: bool) -> ImageRequest:
        every = view_recipe(self.models[task.prompts.model], task.views, augmix=task.augmix, seed=task.seed)
        adaptive = task.adaptive and not task.weak_only
        return ImageRequest(
            upload.file,
            replace(every, views=1) if task.weak_only else every,
            settled=partial(self._is_settled, task) if adaptive else None,
            hidden=task.needs_hidden,
            reward=task.needs_rewards,
            keep_pixels=keep_pixels,
            max_pixels=self.settings.limits.pixels,
            part_of=every,
        )

    def _is_settled(self, task: ClassifyTask, features: Tensor) -> bool:
        """Called by `Pipeline.encode`, that is in the model thread, which owns the prompts."""
        assert self._prompts is not None
        how = {"most": task.views, "least": least_views(*task.recipes)}
        return self._prompts.head(task.prompts).is_settled(features, **how)

    def _run(self) -> None:
        """The model thread."""
        try:
            self._prompts = prompts = self._load()
            pipelines = self._pipelines.values()
            can_share_cores = all(pipeline.can_share_cores for pipeline in pipelines)  # also warms the towers up
            _log.info("cores", extra={"fields": {"threads": torch.get_num_threads(), "shared": can_share_cores}})
            self.is_ready = True
            views = self.settings.batch_views or max(pipeline.views_at_once for pipeline in pipelines)
            on_device = any(pipeline.batches_images for pipeline in pipelines)
            images = views if on_device else torch.get_num_threads()
            previous: Callable[[], None] | None = None
            while (jobs := self._queue.take(views, images, wait=previous is None)) or previous:
                start = time.perf_counter()
                share_cores = self._images > 1
                answer = self._launch(jobs, share_cores, between=partial(self._serve_others, views)) if jobs else None
                if on_device:  # it gets the images that wait before the last ones are answered
                    answer, previous = previous, answer
                if answer is not None:
                    answer()
                self._observe(len(jobs), time.perf_counter() - start, prompts)
                del jobs, answer  # otherwise the views stay in memory until the next request
        except Exception as error:  # noqa: BLE001 - whatever it is, the server must know and end
            self.is_ready, self.failure = False, error

    def _launch(
        self, jobs: Sequence[Job], share_cores: bool, between: Callable[[Job], None] = lambda _job: None
    ) -> Callable[[], None]:
        assert self._prompts is not None
        return launch(jobs, self._pipelines, self._prompts, share_cores=share_cores, between=between)

    def _serve_others(self, views: int, job: Job) -> None:
        """Between two steps of a method: other callers do not wait until all steps of a long job are done."""
        if current_thread() is not self._thread:
            return
        with torch.no_grad():
            for other in self._queue.take(views, 1, wait=False, but=job.caller):
                self._launch([other], share_cores=False)()

    def _observe(self, jobs: int, seconds: float, prompts: PromptCache) -> None:
        prompts.trim()
        if jobs:
            self._seconds_per_job += 0.1 * (seconds / jobs - self._seconds_per_job)
            self._metrics.batches.observe(jobs)
        self._metrics.text_lists.set(len(prompts))
        self._metrics.text_bytes.set(prompts.nbytes)

    def _load(self) -> PromptCache:
        settings = self.settings
        first = self._given or self._load_model(settings.model)
        self.models[first.name] = first
        if (known := self.calibration) is not None:
            known.rejection(first.name, first.fingerprint, known.method)  # an error if it is about another model
        for name in settings.extra_models:
            model = self._load_model(name, offline=True)
            if model.name in self.models:
                raise ModelError(f"two models are called {model.name}: {name} and one before it")
            self.models[model.name] = model
        reward_model = None
        if settings.reward_model is not None:
            reward_model = self._load_model(settings.reward_model, offline=True)
        cache = None if settings.cache is None else FeatureCache(settings.cache.expanduser())
        for name, model in self.models.items():
            self._pipelines[name] = Pipeline(model, reward_model=reward_model, cache=cache)
        learned = None
        if settings.context is not None:
            context, template = load_context(settings.context, first), template_of(settings.context)
            learned = LearnedContext(first.name, context, template)
        reward_name = reward_model and reward_model.name
        _log.info("models", extra={"fields": {"models": list(self.models), "reward_model": reward_name}})
        return PromptCache(self.models, settings.text_bytes, learned, reward_model)

    def _load_model(self, name: str, *, offline: bool = False) -> Model:
        return load_model(name, device=self.settings.device, precision=self.settings.precision, offline=offline)


@dataclass
class _Work:
    """What is done for one image, as long as somebody waits for it."""

    job: Job | None = None
    is_abandoned: bool = False

    def abandon(self) -> None:
        """Nobody waits any more."""
        self.is_abandoned = True
        if self.job is not None:
            self.job.is_abandoned = True

    def check(self) -> None:
        """Called by any thread between steps."""
        if self.is_abandoned:
            raise WorkCancelledError


def _make_stage(pipeline: Pipeline, pending: PendingImage, work: _Work, threads: int) -> None:
    """The views of the next stage; a large image is not kept open between stages."""
    with checked_by(work.check):
        work.check()
        pipeline.make_stage(pending, threads=threads)
    if pending.image is not None and pending.image.width * pending.image.height > _KEPT_PIXELS:
        pending.image = None
