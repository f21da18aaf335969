"""Who gets a share of the views, who leaves the queue first, and that jobs answered together do not harm each other."""

import asyncio
import copy
from typing import Any

import pytest
import torch
from PIL import Image

from conftest import make_image
from serve.conftest import CLASSES
from usetta import Classifier, methods
from usetta.adaptive import stages
from usetta.models import Model
from usetta.models.clip import CLIP
from usetta.models.precision import prepare
from usetta.pipeline import ImageRequest, PendingImage, Pipeline
from usetta.serve.prompt_cache import PromptCache, PromptKey
from usetta.serve.worker import ClassifyTask, FairBudget, Job, JobQueue, RefusedError, launch
from usetta.views import ViewRecipe

KEY = PromptKey("tiny", tuple(CLASSES), None)


def job(views: int, method: str = "se", image: Image.Image | None = None, caller: str = "", **options: Any) -> Job:
    task = ClassifyTask(KEY, (methods.get(method),), views, caller=caller)
    request = ImageRequest(image or make_image(0), ViewRecipe(views=views, size=32), **options)
    return Job(task, "image", PendingImage(request))


def work(jobs: list[Job], model: Model) -> None:
    """Make the views of jobs and process them, as the server does."""
    pipeline = Pipeline(model)
    for ready in jobs:
        pipeline.make_stage(ready.pending)
    launch(jobs, {"tiny": pipeline}, PromptCache({"tiny": model}, 2**30))()


def test_a_queue_gives_as_many_jobs_as_fit_and_at_least_one() -> None:
    queue, jobs = JobQueue(), [job(5), job(3), job(3), job(9), job(1)]
    for waiting in jobs:
        queue.put(waiting)
    assert queue.take(8, 9) == jobs[:2]
    assert queue.take(8, 9) == jobs[2:3]
    assert queue.take(8, 9) == jobs[3:4]  # more than fits, so alone
    queue.close()
    assert queue.take(8, 9) == jobs[4:]
    assert queue.take(8, 9) == []


def test_a_queue_drops_jobs_that_were_cancelled() -> None:
    queue, jobs = JobQueue(), [job(5), job(5), job(2)]
    for waiting in jobs:
        queue.put(waiting)
    assert jobs[0].result.cancel()
    assert jobs[1].result.cancel()
    assert queue.take(5, 9) == jobs[2:]
    assert not jobs[2].result.cancel()  # it is being worked on


def test_callers_take_turns_whoever_has_more_jobs() -> None:
    queue, many, few = JobQueue(), [job(1, caller="many") for _ in range(4)], [job(1, caller="few") for _ in range(2)]
    for waiting in (*many, *few):
        queue.put(waiting)
    assert queue.take(9, 1, wait=False, but="many") == [few[0]]
    assert queue.take(9, 3) == [many[0], few[1], many[1]]
    assert queue.take(9, 9) == many[2:]
    assert queue.take(9, 1, wait=False) == []


def test_a_budget_is_given_in_turn_and_a_large_image_is_not_overtaken() -> None:
    async def scenario() -> list[str]:
        budget, events = FairBudget(10, 8), []
        release = asyncio.Event()

        async def use(name: str, views: int) -> None:
            async with budget.reserve(name[0], views):
                events.append(name)
                await release.wait()

        wishes = [("a1", 6), ("a2", 3), ("large", 50), ("c", 1), ("a3", 1)]
        users = [asyncio.create_task(use(name, views)) for name, views in wishes]
        await asyncio.sleep(0.01)
        events.append("-")
        users[0].cancel()
        await asyncio.sleep(0.01)
        events.append("-")
        release.set()
        await asyncio.gather(*users, return_exceptions=True)
        return events

    # A second share would be more than one caller gets; the large one waits until it is alone, and others behind it.
    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == ["a1", "-", "a2", "-", "large", "c", "a3"]


def test_a_budget_is_free_again_after_a_request_that_gave_up_waiting() -> None:
    async def scenario() -> bool:
        budget = FairBudget(4, 4)
        async with budget.reserve("a", 4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), budget.reserve("b", 1):
                    pass
        async with asyncio.timeout(1), budget.reserve("c", 4):
            return True

    assert asyncio.run(asyncio.wait_for(scenario(), 20))


def test_int8_answers_as_the_classifier_does(tiny_model: CLIP) -> None:
    model = copy.deepcopy(tiny_model)
    prepare(model, "int8")
    black = torch.zeros(1, 3, 32, 32)
    assert not torch.equal(model.encode_images(black), model.encode_crops(black))  # type: ignore[misc]
    kinds = [(4, "se"), (1, "clip"), (6, "se")]
    jobs = [job(views, method) for views, method in kinds]
    work(jobs, model)
    for (views, method), done in zip(kinds, jobs, strict=True):
        expected = Classifier(CLASSES, model, method, views=views)(make_image(0))
        assert done.result.result()[0].probs == pytest.approx(expected.probs, abs=1e-6)  # type: ignore[index]


BLACK = Image.new("RGB", (40, 30))


@pytest.fixture
def choosy_model(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> CLIP:
    """The tiny model, which fails if one of the views is black."""
    tower = tiny_model.encode_images

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if (pixels == 0).flatten(1).all(dim=1).any():
            raise MemoryError
        return tower(pixels)

    monkeypatch.setattr(tiny_model, "encode_images", encode)
    return tiny_model


@pytest.mark.parametrize("batches", [False, True])
def test_what_fails_in_a_batch_is_tried_alone(
    choosy_model: CLIP, monkeypatch: pytest.MonkeyPatch, batches: bool
) -> None:
    monkeypatch.setattr(Pipeline, "batches_images", batches)
    jobs = [job(4), job(4, image=BLACK), job(4, "tpt:lr=1e38"), job(1), job(4)]
    work(jobs, choosy_model)
    expected = Classifier(CLASSES, choosy_model, "se", views=4)(make_image(0))
    for done in (jobs[0], jobs[4]):
        assert done.result.result()[0].probs == pytest.approx(expected.probs, abs=1e-6)  # type: ignore[index]
    assert isinstance(jobs[1].result.exception(), MemoryError)
    with pytest.raises(RefusedError, match=r"method 'tpt:lr=1e\+38' diverged"):
        jobs[2].result.result()
    with pytest.raises(RefusedError, match="needs at least 2, not 1"):
        jobs[3].result.result()


def test_after_a_failed_batch_nobody_skips_a_stage(choosy_model: CLIP) -> None:
    """On a CPU the first image has been encoded when the second fails."""
    jobs = [job(64, image=image, settled=lambda features: False) for image in (make_image(0), BLACK)]
    work(jobs, choosy_model)
    assert jobs[0].result.result() is None  # there is another stage
    assert jobs[0].pending.episode is not None
    assert len(jobs[0].pending.episode) == stages()[0].stop
    assert isinstance(jobs[1].result.exception(), MemoryError)


def test_on_a_device_other_than_a_cpu_images_go_through_the_tower_together(
    tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, tower = [], tiny_model.encode_images

    def counting(pixels: torch.Tensor) -> torch.Tensor:
        calls.append(len(pixels))
        return tower(pixels)

    monkeypatch.setattr(tiny_model, "encode_images", counting)
    monkeypatch.setattr(Pipeline, "batches_images", True)
    jobs = [job(4), job(6, "use", make_image(1)), job(1, "clip")]
    work(jobs, tiny_model)
    assert calls == [3, 8]  # the weak views, and the strong ones
    assert all(len(done.result.result() or ()) == 1 for done in jobs)
