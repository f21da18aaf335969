"""What the one thread that owns the models does: it takes jobs from a queue and answers them.

A job is an image whose views have been made (one stage of them, if the request is adaptive). Jobs that wait together
are taken together: `Pipeline` encodes them, once for all methods that are asked about, and unless the model is on a
CPU, images with the same classes and method go through the method together. What fails in a batch is tried again alone,
so that one request cannot spoil another.

Callers take turns, so that many images of one do not keep the others waiting. A job that nobody waits for any more ends
between two chunks of views or two steps of a method, and between steps the images of other callers come first.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition
from typing import Literal, TypeVar

from usetta.cancellation import WorkCancelledError, checked_by
from usetta.episode import Episode
from usetta.methods.recipe import Recipe
from usetta.pipeline import EncodeLaunch, PendingImage, Pipeline
from usetta.prediction import Prediction
from usetta.serve.prompt_cache import PromptCache, PromptKey
from usetta.serve.sessions import SessionKey
from usetta.stream_memory import StreamMemory
from usetta.text_head import TextHead

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
    caller: str = ""
    """Who asks; callers take turns."""
    session: SessionKey | None = None
    """Whose memory the only method learns into; None for methods without one."""

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
    memory: StreamMemory | None = None
    """That of the task's session, which no other job has at the same time."""
    is_abandoned: bool = False
    """Whether nobody waits for the result any more."""
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
    def caller(self) -> str:
        """Who asked."""
        return self.task.caller

    @property
    def is_encoded(self) -> bool:
        """Whether the stage has been through the image tower."""
        return len(self.pending.stages) < self._stages

    def check(self) -> None:
        """Stop the work if it is for nobody. Called by any thread."""
        if self.is_abandoned:
            raise WorkCancelledError

    def count_views(self, views: int) -> None:
        """So many more views of the stage have been encoded. Called by any thread."""
        self.check()
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


class FairBudget:
    """Bounds how much is in use at one time, such as views in memory, in all and by one caller.

    Callers get their shares in turn. For one event loop.
    """

    def __init__(self, size: int, per_caller: int) -> None:
        self._size = size
        self._per_caller = per_caller
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """By caller, the one whose turn it is first."""

    @asynccontextmanager
    async def reserve(self, caller: str, amount: int) -> AsyncIterator[None]:
        """Wait until so much is free; who wants more than there is waits until nobody has anything."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((amount, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._used[caller] -= amount
            else:
                granted.cancel()
            self._used += Counter()  # without callers who have nothing
            self._grant()

    def _grant(self) -> None:
        while (caller := self._next()) is not None:
            waiting = self._waiting.pop(caller)
            amount, granted = waiting.popleft()
            self._used[caller] += amount
            granted.set_result(None)
            if waiting:  # at the end of the line
                self._waiting[caller] = waiting

    def _next(self) -> str | None:
        """Whose turn it is, if there is enough for that. Small wishes do not overtake a large one for ever."""
        for caller, waiting in list(self._waiting.items()):
            while waiting and waiting[0][1].cancelled():
                waiting.popleft()
            if not waiting:
                del self._waiting[caller]
                continue
            amount, own, used = waiting[0][0], self._used[caller], self._used.total()
            if own and own + amount > self._per_caller:
                continue
            return caller if not used or used + amount <= self._size else None
        return None


class JobQueue:
    """Jobs that are ready for the model, those of different callers in turn. Any thread may put, one takes."""

    def __init__(self) -> None:
        self._jobs: dict[str, deque[Job]] = {}
        """By caller, the one whose turn it is first."""
        self._changed = Condition()
        self._closed = False

    def __len__(self) -> int:
        return sum(map(len, list(self._jobs.values())))

    def put(self, job: Job) -> None:
        """Add a job behind the others of its caller."""
        with self._changed:
            self._jobs.setdefault(job.caller, deque()).append(job)
            self._changed.notify()

    def close(self) -> None:
        """Let `take` return nothing once all jobs are taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self, views: int, images: int, *, wait: bool = True, but: str | None = None) -> list[Job]:
        """Wait for a job and return it with others, up to so many `views` and `images`, none of the caller `but`.

        Cancelled jobs are dropped. Nothing is returned when the queue is closed and empty, or empty and nobody should
        `wait`.
        """
        batch: list[Job] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._jobs or self._closed or not wait)
                left = views
                while (job := self._next(but)) and (not batch or (job.views <= left and len(batch) < images)):
                    self._remove(job)
                    if job.result.set_running_or_notify_cancel():  # false if the caller has hung up
                        batch.append(job)
                        left -= job.views
                if not wait or (self._closed and not self._jobs):
                    break
        return batch

    def _next(self, but: str | None) -> Job | None:
        return next((jobs[0] for caller, jobs in self._jobs.items() if caller != but), None)

    def _remove(self, job: Job) -> None:
        jobs = self._jobs.pop(job.caller)
        jobs.popleft()
        if jobs:  # at the end of the line
            self._jobs[job.caller] = jobs


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
    jobs: Sequence[Job],
    pipelines: Mapping[str, Pipeline],
    prompts: PromptCache,
    *,
    share_cores: bool = False,
    between: Callable[[Job], None] = lambda _job: None,
) -> Callable[[], None]:
    """Encode the images of jobs, or let a device start to. Whoever calls the result gives them answers or errors.

    `between` is called between the steps of a method, by any thread, with a job that it works on.
    """
    heads: dict[Job, TextHead] = {}
    launched: list[_Launched] = []

    def prepare(batch: Sequence[Job]) -> None:
        for job in batch:
            if job.pending.episode is None:
                job.report("text")
            job.check()
            heads[job] = _checked_head(job.task, prompts)

    for job in jobs:
        _attempt([job], prepare, lambda job: job)
    for batch in _grouped(heads, lambda job: job.task.prompts.model):
        pipeline = pipelines[batch[0].task.prompts.model]
        _attempt(batch, lambda batch, own=pipeline: launched.append(_encode(batch, own, share_cores)), lambda job: job)  # type: ignore[misc]
    return partial(_answer, heads, launched, between)


def _answer(heads: Mapping[Job, TextHead], launched: Sequence["_Launched"], between: Callable[[Job], None]) -> None:
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
        together = part.job in batching and part.job.memory is None
        return id(part.head), part.recipe, None if together else id(part.job)

    with ExitStack() as together:
        for head in {id(part.head): part.head for part in parts}.values():
            together.enter_context(head.prompts.steps.kept())
        for group in _grouped(parts, company):
            _attempt(group, partial(_predict, between), lambda part: part.job)


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


def _predict(between: Callable[[Job], None], parts: Sequence[_Part]) -> None:
    """Images with the same classes through the same recipe."""
    head, recipe, memory = parts[0].head, parts[0].recipe, parts[0].job.memory

    def check() -> None:
        if all(part.job.is_abandoned for part in parts):
            raise WorkCancelledError
        between(parts[0].job)

    check()
    try:
        with checked_by(check):
            names = [part.job.name for part in parts]
            predictions = head.predict(recipe, [part.episode for part in parts], names, memory=memory)
    except WorkCancelledError:  # before the memory has changed, which takes no steps
        raise
    except Exception as error:
        if memory is not None:  # what has half learned from an image is worth nothing
            memory.reset()
        if isinstance(error, ValueError):
            raise RefusedError(str(error)) from error
        raise
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
