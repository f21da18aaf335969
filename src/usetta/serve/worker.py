"""What the one thread that owns the models does: it takes jobs from a queue and answers them.

A job is an image whose views have been made (one stage of them, if the request is adaptive). Jobs that wait together
are taken together: `Pipeline` encodes them, once for all methods that are asked about, and unless the model is on a
CPU, images with the same classes and method go through the method together. What fails in a batch is tried again alone,
so that one request cannot spoil another.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition
from typing import Literal, TypeVar

from usetta.classifier import TextHead
from usetta.episode import Episode
from usetta.methods.recipe import Recipe
from usetta.pipeline import EncodeLaunch, PendingImage, Pipeline
from usetta.prediction import Prediction
from usetta.serve.prompt_cache import PromptCache, PromptKey

T = TypeVar("T")


class RefusedError(ValueError):
    """The library refuses a request; the message is for the caller."""


@dataclass(frozen=True)
class ClassifyTask:
    """What is asked about an image."""

    prompts: PromptKey
    recipes: tuple[Recipe, ...]
    """Methods that answer, no two alike."""
    views: int = 64
    """At most, if `adaptive`."""
    adaptive: bool = False
    augmix: bool = False
    seed: int = 0

    @property
    def weak_only(self) -> bool:
        """Whether no method uses more than the weak view."""
        return all(recipe.weak_only for recipe in self.recipes)

    @property
    def needs_hidden(self) -> bool:
        """Whether a method tunes the image tower."""
        return any(recipe.needs_hidden for recipe in self.recipes)

    @property
    def needs_rewards(self) -> bool:
        """Whether a method learns from rewards."""
        return any(recipe.needs_reward for recipe in self.recipes)


@dataclass(frozen=True)
class TaskProgress:
    """How far the answer about an image is."""

    stage: Literal["waiting", "text", "views", "methods"]
    """What is being done: nothing yet, encoding class names, encoding views, running the methods."""
    views: int
    """Views that have been encoded."""
    total: int
    """Views at most."""


@dataclass(eq=False)
class Job:
    """An image with a stage of views that waits for the model."""

    task: ClassifyTask
    name: str
    """Of the image, as the caller knows it."""
    pending: PendingImage
    on_progress: Callable[[TaskProgress], None] | None = None
    """Called by any thread."""
    result: Future[list[Prediction] | None] = field(default_factory=Future)
    """A prediction of each method, or None if the image needs more views and then another job."""
    views: int = field(init=False)
    """Of this stage."""
    _stages: int = field(init=False)
    _encoded: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.views = len(self.pending.stages[0])
        self._stages = len(self.pending.stages)

    @property
    def is_encoded(self) -> bool:
        """Whether the stage has been through the image tower."""
        return len(self.pending.stages) < self._stages

    def count_views(self, views: int) -> None:
        """So many more views of the stage have been encoded. Called by any thread."""
        self._encoded.append(views)
        self.report("views")

    def report(self, stage: Literal["text", "views", "methods"]) -> None:
        """Say how far it is."""
        if self.on_progress is None:
            return
        before = 0 if self.pending.episode is None else len(self.pending.episode.features)
        total = before if self.pending.is_done else self.pending.request.views.views
        # Two towers, or a tower in two parts, count every view twice.
        more = 0 if self.is_encoded else min(sum(self._encoded), self.views)
        self.on_progress(TaskProgress(stage, before + more, total))


class ViewBudget:
    """Bounds the number of views in memory; requests get their share in order. For one event loop."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, views: int) -> AsyncIterator[None]:
        """Wait until so many are free; an image with more views than the whole budget waits until it is alone."""
        async with self._turn:  # held while waiting, so that small images do not overtake a large one for ever
            while self._used and self._used + views > self._size:
                self._freed.clear()
                await self._freed.wait()
            self._used += views
        try:
            yield
        finally:
            self._used -= views
            self._freed.set()


class JobQueue:
    """Jobs that are ready for the model, first come first served. Any thread may put, one takes."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._changed = Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Let `take` return nothing once all jobs are taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, views: int, images: int, *, wait: bool = True) -> list[Job]:
        """Wait for a job and return it with those behind it, up to so many `views` and `images`.

        Cancelled jobs are dropped. Nothing is returned when the queue is closed and empty, or empty and nobody should
        `wait`.
        """
        batch: list[Job] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._jobs or self._closed or not wait)
                if not self._jobs:
                    return []
                left = views
                while self._jobs and (not batch or (self._jobs[0].views <= left and len(batch) < images)):
                    job = self._jobs.popleft()
                    if job.result.set_running_or_notify_cancel():  # false if the caller has hung up
                        batch.append(job)
                        left -= job.views
        return batch


@dataclass(frozen=True, eq=False)
class _Part:
    """One method of a job whose image is encoded."""

    job: Job
    head: TextHead
    episode: Episode
    recipe: Recipe
    predictions: dict[Recipe, Prediction]
    """Of the whole job so far, shared by its parts."""


def launch(
    jobs: Sequence[Job], pipelines: Mapping[str, Pipeline], prompts: PromptCache, *, share_cores: bool = False
) -> Callable[[], None]:
    """Encode the images of jobs, or let a device start to. Whoever calls the result gives them answers or errors."""
    heads: dict[Job, TextHead] = {}
    launched: list[_Launched] = []

    def prepare(batch: Sequence[Job]) -> None:
        for job in batch:
            if job.pending.episode is None:
                job.report("text")
            heads[job] = _checked_head(job.task, prompts)

    for job in jobs:
        _attempt([job], prepare, lambda job: job)
    for batch in _grouped(heads, lambda job: job.task.prompts.model):
        pipeline = pipelines[batch[0].task.prompts.model]
        _attempt(batch, lambda batch, own=pipeline: launched.append(_encode(batch, own, share_cores)), lambda job: job)  # type: ignore[misc]
    return partial(_answer, heads, launched)


def _answer(heads: Mapping[Job, TextHead], launched: Sequence["_Launched"]) -> None:
    for batch in launched:
        _attempt(batch.jobs, batch.finish, lambda job: job)
    batching = {job for batch in launched for job in batch.jobs if batch.pipeline.batches_images}
    parts: list[_Part] = []
    for job, head in heads.items():
        episode = job.pending.episode
        if job.result.done():  # it failed
            continue
        if not job.pending.is_done or episode is None:
            job.result.set_result(None)
            continue
        job.report("methods")
        predictions: dict[Recipe, Prediction] = {}
        parts += [_Part(job, head, episode, recipe, predictions) for recipe in job.task.recipes]

    def company(part: _Part) -> Hashable:
        """Equal for images that a method takes together: on a CPU none, so that no answer depends on the others."""
        return id(part.head), part.recipe, None if part.job in batching else id(part.job)

    for group in _grouped(parts, company):
        _attempt(group, _predict, lambda part: part.job)


def _checked_head(task: ClassifyTask, prompts: PromptCache) -> TextHead:
    try:
        head = prompts.head(task.prompts)
        for recipe in task.recipes:
            head.check(recipe, task.views)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    return head


@dataclass(frozen=True, eq=False)
class _Launched:
    """Jobs of one model whose images are encoded, or on a device will be."""

    jobs: Sequence[Job]
    pipeline: Pipeline
    launch: EncodeLaunch

    def finish(self, jobs: Sequence[Job]) -> None:
        """Wait for what decides whether the images of some of the jobs need more views."""
        self.pipeline.finish(replace(self.launch, images=[job.pending for job in jobs]))


def _encode(jobs: Sequence[Job], pipeline: Pipeline, share_cores: bool) -> _Launched:
    # When a batch fails in the middle, some of it is encoded, and to encode that again would encode its next stage.
    waiting = [job for job in jobs if not job.is_encoded]
    for job in waiting:
        job.report("views")
        job.pending.on_views = job.count_views
    launch = pipeline.launch([job.pending for job in waiting], share_cores=share_cores)
    return _Launched(jobs, pipeline, launch)


def _predict(parts: Sequence[_Part]) -> None:
    """Images with the same classes through the same recipe."""
    head, recipe = parts[0].head, parts[0].recipe
    try:
        predictions = head.predict(recipe, [part.episode for part in parts], [part.job.name for part in parts])
    except ValueError as error:
        raise RefusedError(str(error)) from error
    for part, prediction in zip(parts, predictions, strict=True):
        part.predictions[recipe] = prediction
        wanted = part.job.task.recipes
        if len(part.predictions) == len(wanted):
            part.job.result.set_result([part.predictions[recipe] for recipe in wanted])


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _attempt(items: Sequence[T], work: Callable[[Sequence[T]], None], job_of: Callable[[T], Job]) -> None:
    """Do `work` on all `items`, or if that fails on each alone; a job whose item fails alone gets the error."""
    try:
        work(items)
    except Exception as error:  # noqa: BLE001 - it belongs to a request, and the thread must go on
        if len(items) > 1:
            for item in items:
                _attempt([item], work, job_of)
        elif not job_of(items[0]).result.done():  # another of its methods may have failed before
            job_of(items[0]).result.set_exception(error)
