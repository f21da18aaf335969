"""The pipeline: episodes in the order of their requests, few images ahead, and features that depend on nothing else."""

import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from conftest import make_image
from evaluate.runs import CLASSES, Counting, four_blocks
from models.tiny import TINY_RESNET, disturbed
from usetta import methods
from usetta import pipeline as pipeline_module
from usetta.adaptive import stages
from usetta.episode import Episode
from usetta.feature_cache import FeatureCache
from usetta.images import ImageError, image_id
from usetta.models.clip import CLIP
from usetta.pipeline import ImageRequest, PendingImage, Pipeline
from usetta.text_head import TextHead
from usetta.views import ViewRecipe, make_views

VIEWS = 20
RECIPE = ViewRecipe(views=VIEWS, size=32)


@pytest.fixture(scope="module")
def model() -> CLIP:
    return four_blocks()


class SharedBatches(Pipeline):
    """As on a device that is not a CPU."""

    @property
    def batches_images(self) -> bool:
        return True


class Recording(Counting):
    """A model that notes how many views were encoded at a time."""

    def __init__(self, model: CLIP) -> None:
        super().__init__(model)
        self.batches: list[int] = []

    def encode_images(self, pixels: Tensor) -> Tensor:
        self.batches.append(len(pixels))
        return super().encode_images(pixels)


def request(seed: int, **options: Any) -> ImageRequest:
    return ImageRequest(make_image(seed), options.pop("views", RECIPE), **options)


def episodes(pipeline: Pipeline, *requests: ImageRequest) -> list[Episode]:
    outcomes = list(pipeline.stream(requests))
    assert len(outcomes) == len(requests)
    return [outcome for outcome in outcomes if isinstance(outcome, Episode)]


def features(model: CLIP, seed: int, views: int = VIEWS) -> Tensor:
    """The features of an image, step by step: the weak view by itself."""
    image = make_image(seed)
    pixels = make_views(image, image_id(image), RECIPE)[:views]
    return torch.cat([model.encode_images(pixels[:1]), model.encode_images(pixels[1:])])


def view_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("usetta-views")]


def slow(seed: int, seconds: float) -> Callable[[], Image.Image]:
    """A source that takes its time."""

    def fetch() -> Image.Image:
        time.sleep(seconds)
        return make_image(seed)

    return fetch


@pytest.mark.parametrize("kind", [Pipeline, SharedBatches])
def test_outcomes_keep_the_order_of_slow_fast_and_unreadable_images(model: CLIP, kind: type[Pipeline]) -> None:
    sources = [b"" if i % 5 == 2 else slow(i, 0.004 * (i % 3)) for i in range(14)]
    outcomes = list(kind(model, threads=3).stream(ImageRequest(source, RECIPE) for source in sources))
    assert len(outcomes) == 14
    for i, outcome in enumerate(outcomes):
        if i % 5 == 2:
            assert isinstance(outcome, ImageError)
            assert "file is empty" in outcome.reason
        else:
            assert isinstance(outcome, Episode)
            assert outcome.encoded
            assert outcome.seconds > 0.004 * (i % 3)
            torch.testing.assert_close(outcome.features, features(model, i), atol=1e-6, rtol=0)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("adaptive", [False, True])
def test_few_images_are_read_ahead(model: CLIP, threads: int, adaptive: bool) -> None:
    read = 0

    def requests() -> Iterator[ImageRequest]:
        nonlocal read
        for i in range(30):
            read += 1
            yield request(i, settled=(lambda _: False) if adaptive else None)

    for done, _ in enumerate(Pipeline(model, threads=threads).stream(requests())):
        assert read <= done + 2 * threads + 1
    assert read == 30


def test_a_stream_that_is_closed_leaves_no_thread_behind(model: CLIP) -> None:
    stream = Pipeline(model, threads=3).stream(ImageRequest(slow(i, 0.002), RECIPE) for i in range(1000))
    assert isinstance(next(stream), Episode)
    assert view_threads()
    stream.close()
    assert not view_threads()


def test_an_error_of_a_source_or_of_the_tower_ends_the_stream_in_its_place(model: CLIP) -> None:
    stream = Pipeline(model).stream(ImageRequest(lambda i=i: make_image(6 // (3 - i)), RECIPE) for i in range(10))
    outcomes: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        outcomes.extend(stream)
    assert not view_threads()


@pytest.mark.parametrize("kind", [Pipeline, SharedBatches])
def test_adaptive_images_end_when_they_are_settled_and_keep_their_order(model: CLIP, kind: type[Pipeline]) -> None:
    asked: list[tuple[int, int]] = []

    def settled(image: int, after: int) -> Callable[[Tensor], bool]:
        def decide(features: Tensor) -> bool:
            asked.append((image, len(features)))
            return len(features) >= after

        return decide

    ends = [8, 99, 16, 8, 99, 8, 16]
    adaptive = [request(i, settled=settled(i, end), keep_pixels=True) for i, end in enumerate(ends)]
    answers = episodes(kind(model), *adaptive)
    assert [len(episode) for episode in answers] == [min(end, VIEWS) for end in ends]
    for i, episode in enumerate(answers):
        torch.testing.assert_close(episode.features, features(model, i, len(episode)), atol=1e-6, rtol=0)
        assert episode.pixels is not None
        assert len(episode.pixels) == len(episode)
    assert sorted(asked) == sorted((i, stage) for i, end in enumerate(ends) for stage in (1, 8, 16) if stage <= end)


REQUESTS: dict[str, dict[str, Any]] = {
    "all views": {},
    "adaptive": {"settled": lambda features: len(features) >= 16},
    "reward": {"reward": True},
    "with an id": {"id": "a/b.png"},
}


@pytest.mark.parametrize("kind", [Pipeline, SharedBatches])
@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS)
def test_a_second_run_encodes_nothing_and_has_the_same_bits(
    model: CLIP, tmp_path: Path, kind: type[Pipeline], options: dict[str, Any]
) -> None:
    requests = [request(i, **options) for i in range(4)]
    reward_model: Any = Counting(four_blocks(seed=1))
    plain = episodes(kind(model, reward_model=reward_model), *requests)
    for encoded in (True, False):
        tower: Any = Counting(model)
        reward_model.encoded = 0
        with FeatureCache(tmp_path) as cache:
            kept = episodes(kind(tower, reward_model=reward_model, cache=cache), *requests)
        assert [episode.encoded for episode in kept] == [encoded] * 4
        assert bool(tower.encoded) == encoded
        assert bool(reward_model.encoded) == (encoded and "reward" in options)
        for one, other in zip(plain, kept, strict=True):
            assert torch.equal(one.features, other.features)
            if "reward" in options:
                assert one.reward_features is not None
                assert other.reward_features is not None
                assert torch.equal(one.reward_features, other.reward_features)


def test_the_weak_view_comes_out_of_the_cache_of_more_views(model: CLIP, tmp_path: Path) -> None:
    tower: Any = Counting(model)
    weak = ViewRecipe(views=1, size=32)
    with FeatureCache(tmp_path) as cache:
        pipeline = Pipeline(tower, cache=cache)
        (whole,) = episodes(pipeline, request(0))
        (part, alone) = episodes(pipeline, request(0, views=weak, part_of=RECIPE), request(1, views=weak))
    assert tower.encoded == VIEWS + 1
    assert (part.encoded, alone.encoded) == (False, True)
    assert torch.equal(part.features, whole.features[:1])
    assert torch.equal(alone.features, features(model, 1)[:1]), "the same bits, whether or not there are others"


def test_a_file_of_a_dataset_is_not_opened_if_the_cache_knows_it(
    model: CLIP, images: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [ImageRequest(str(path), RECIPE, id=path.name, for_benchmark=True) for path in images]
    with FeatureCache(tmp_path / "cache") as cache:
        first = episodes(Pipeline(model, cache=cache), *wanted)
        monkeypatch.setattr("usetta.pipeline.open_image", pytest.fail)
        again = episodes(Pipeline(model, cache=cache), *wanted)
    assert all(torch.equal(one.features, other.features) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", [Pipeline, SharedBatches])
@pytest.mark.parametrize("settled", [None, lambda features: False])
def test_hidden_states_lead_to_the_same_features(model: CLIP, kind: type[Pipeline], settled: Any) -> None:
    for i, episode in enumerate(episodes(kind(model), *(request(i, hidden=True, settled=settled) for i in range(3)))):
        assert episode.hidden is not None
        assert episode.hidden.shape == (VIEWS, 17, 64)
        torch.testing.assert_close(episode.features, features(model, i), atol=1e-6, rtol=0)
        torch.testing.assert_close(model.last_blocks().encode(episode.hidden), episode.features, atol=1e-6, rtol=0)


def test_the_reward_model_sees_the_same_views_in_its_own_size(model: CLIP) -> None:
    reward_model = disturbed(TINY_RESNET)
    assert reward_model.image_size != model.image_size
    with_reward, without = episodes(Pipeline(model, reward_model=reward_model), request(0, reward=True), request(0))
    image = make_image(0)
    pixels = make_views(image, image_id(image), RECIPE)
    size = (reward_model.image_size,) * 2
    larger = torch.nn.functional.interpolate(pixels / 255, size=size, mode="bicubic", antialias=True).clamp(0, 1)
    assert with_reward.reward_features is not None
    torch.testing.assert_close(with_reward.reward_features, reward_model.encode_images(larger), atol=1e-5, rtol=0)
    assert without.reward_features is None
    assert torch.equal(with_reward.features, without.features)


def test_pixels_are_kept_on_request_and_images_opened_as_asked(model: CLIP) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image = make_image(3)
    image.save(file, "PNG", exif=exif)
    upright, plain = (
        ImageRequest(file.getvalue(), RECIPE, id="same", keep_pixels=True, for_benchmark=benchmark)
        for benchmark in (False, True)
    )
    turned, as_stored, dropped = episodes(Pipeline(model), upright, plain, request(0))
    assert turned.pixels is not None
    assert as_stored.pixels is not None
    assert torch.equal(as_stored.pixels, make_views(image, "same", RECIPE))
    assert torch.equal(turned.pixels, make_views(image.rotate(-90, expand=True), "same", RECIPE))
    assert dropped.pixels is None
    (refused,) = Pipeline(model).stream([request(0, max_pixels=99)])
    assert isinstance(refused, ImageError)
    assert "more than the limit of 99" in refused.reason


@pytest.mark.parametrize("options", [{}, {"settled": lambda features: len(features) >= 16}], ids=["all", "adaptive"])
def test_the_two_halves_give_what_the_stream_gives(model: CLIP, options: dict[str, Any]) -> None:
    pipeline = Pipeline(model)
    pending = [PendingImage(request(i, **options)) for i in range(3)]
    while under_way := [image for image in pending if not image.is_done]:
        for image in under_way:
            pipeline.make_stage(image)
        pipeline.encode(under_way)
    for image, expected in zip(pending, episodes(pipeline, *(request(i, **options) for i in range(3))), strict=True):
        assert image.episode is not None
        assert torch.equal(image.episode.features, expected.features)


@pytest.mark.parametrize("options", [{}, {"settled": lambda features: len(features) >= 16}], ids=["all", "adaptive"])
def test_images_that_share_a_batch_get_their_own_features_whoever_is_first(
    model: CLIP, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Which images share one depends on their order, not on how long their views took."""
    monkeypatch.setattr("usetta.pipeline._DEVICE_VIEWS", 50)
    head = TextHead(CLASSES, model)
    batches: list[list[int]] = []
    for delay in (0.0, 0.003):
        tower = Recording(model)
        stream = SharedBatches(tower, threads=3).stream(
            ImageRequest(slow(i, delay * (i % 3)), RECIPE, **options) for i in range(9)
        )
        outcomes = [outcome for outcome in stream if isinstance(outcome, Episode)]
        alone = episodes(Pipeline(model), *(request(i, **options) for i in range(9)))
        for one, other in zip(outcomes, alone, strict=True):
            torch.testing.assert_close(one.features, other.features, atol=1e-6, rtol=0)
        for recipe in (methods.get("se"), methods.get("use")):
            together, expected = (
                torch.stack([result.probs for result in head.answer(recipe, group)]) for group in (outcomes, alone)
            )
            # A logit is a hundred times a cosine, so probabilities differ by more than features.
            torch.testing.assert_close(together, expected, atol=1e-5, rtol=0)
        batches.append(tower.batches)
    assert batches[0] == batches[1]
    assert max(batches[0]) > VIEWS, "several images shared a batch"
    assert max(batches[0]) <= 50


def test_views_that_the_tower_waits_for_are_made_by_all_threads(model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def recording(image: Image.Image, image_id: str, recipe: ViewRecipe, *, part: range, threads: int) -> Tensor:
        made.append((image_id, threads))
        return make_views(image, image_id, recipe, part=part, threads=threads)

    monkeypatch.setattr(pipeline_module, "make_views", recording)
    pipeline = Pipeline(model, threads=3)
    (alone,) = episodes(pipeline, request(0, settled=lambda _: False))
    assert [threads for _, threads in made] == [3] * len(stages(VIEWS))
    torch.testing.assert_close(alone.features, features(model, 0), atol=1e-6, rtol=0)
    made.clear()
    episodes(pipeline, *(request(i, id=str(i)) for i in range(4)))
    assert sorted(made) == [("0", 3), ("1", 1), ("2", 1), ("3", 1)]


def test_no_threads_are_too_few(model: CLIP) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        Pipeline(model, threads=0)
