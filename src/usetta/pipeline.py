"""Images in, episodes out: the only caller of the image tower.

    requests ─► open, make views (threads) ─► image tower (the thread that asks) ─► Episode or ImageError, in order

Threads open the next images and make their views while the tower encodes; how far they run ahead is bounded, so memory
does not grow with the number of images. A device other than a CPU makes the views itself, from plans that the threads
draw up (`views.device`): they are the same views, and 64 of them need not be uploaded. It gets the next batch before
anybody asks about the last one, so that it computes while the host works on answers. With an adaptive request the views
come in stages, and an image whose first views leave no doubt is done early.

On a CPU the views of an image go through the tower by themselves, so its features do not depend on its neighbours, to
the last bit; images that wait together may each have a core of their own, where that gives the same bits. On other
devices the views of several images fill a batch; which images share one depends on their order alone, never on timing.
The weak view is always encoded apart from the strong ones, so that its features are the same whether or not there are
others.

`make_stage` and `encode` are the two halves of `stream`, for a server that has threads and a queue of its own; `launch`
and `finish` are those of `encode`.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from PIL import Image
from torch import Tensor

from usetta.adaptive import stages
from usetta.episode import Episode
from usetta.feature_cache import FeatureCache, feature_key
from usetta.images import ImageError, ImageSource, file_digest, image_id, open_image
from usetta.models import Model
from usetta.models.base import encode_views, encode_views_together, require_last_blocks
from usetta.models.devices import SideStream, device_of, to_host
from usetta.models.parallel import agrees_on_one_core, map_on_cores, observe_chunks
from usetta.views import ViewRecipe, make_views
from usetta.views.device import ViewPlan

_CPU_VIEWS, _DEVICE_VIEWS = 64, 512
"""Views that fill a batch, on a CPU and elsewhere."""
_DEVICE_IMAGES = 8
"""Images that go through a method together there."""


@dataclass(frozen=True, eq=False)
class ImageRequest:
    """An image, and what is to be known about it."""

    source: ImageSource | Callable[[], ImageSource]
    """What `images.open_image` takes, or a function that fetches it, which a thread calls."""
    views: ViewRecipe
    id: str | None = None
    """Keys the random draws; by default the hash of the pixels, so that equal images have equal views."""
    settled: Callable[[Tensor], bool] | None = None
    """Makes the request adaptive: whether features (n, D) of the first n views, on the CPU, are enough."""
    hidden: bool = False
    """Whether the hidden states are needed that TTL tunes from."""
    reward: bool = False
    """Whether features by the reward model are needed."""
    keep_pixels: bool = False
    """Whether the episode carries the views themselves."""
    for_benchmark: bool = False
    """Open the image as published loaders do, see `images.open_image`."""
    max_pixels: int | None = None
    """Another limit than that of `images.open_image`."""
    part_of: ViewRecipe | None = None
    """A recipe of more views that begins with these: its features in the cache serve as well."""

    def open(self) -> Image.Image:
        """The image in RGB."""
        source = self.source() if callable(self.source) else self.source
        limits = {} if self.max_pixels is None else {"max_pixels": self.max_pixels}
        return open_image(source, for_benchmark=self.for_benchmark, **limits)


@dataclass(eq=False)
class PendingImage:
    """An image on its way through the pipeline."""

    request: ImageRequest
    stages: deque[range] = field(init=False)
    """Numbers of the views that are still to be encoded, the current stage first."""
    image: Image.Image | None = None
    """Open as long as views may still be made of it."""
    id: str = ""
    digest: str = ""
    plan: ViewPlan | None = None
    """How a device will make the views of the current stage; None on a CPU, and where the cache has everything."""
    pixels: Tensor | None = None
    """The views of the current stage, once they are made."""
    keys: list[bytes] = field(default_factory=list)
    """Of the current stage in the cache, one for each tower."""
    cached: list[Tensor | None] = field(default_factory=list)
    """Features of the current stage out of the cache, likewise."""
    episode: Episode | None = None
    """What has been encoded so far."""
    on_views: Callable[[int], None] = lambda _views: None
    """Called by any thread with the number of views that a tower has encoded since the last call."""
    seconds: float = 0.0
    is_done: bool = False
    """Whether the episode is complete."""

    def __post_init__(self) -> None:
        views = self.request.views.views
        self.stages = deque(stages(views) if self.request.settled else [range(views)])

    def add(self, stage: Episode, seconds: float) -> None:
        """Take the current stage. `finish` decides whether there is another."""
        self.episode = stage if self.episode is None else self.episode + stage
        self.seconds += seconds
        self.stages.popleft()
        self.pixels = None

    @property
    def is_in_doubt(self) -> bool:
        """Whether `finish` has to see the features."""
        return bool(self.stages and self.request.settled)

    def finish(self, features: Tensor | None) -> None:
        """End the stage. `features` (n, D) of all views so far, on the CPU, where they are needed."""
        assert self.episode is not None
        if self.request.settled and features is not None and self.request.settled(features):
            self.stages.clear()
        self.is_done = not self.stages
        if self.is_done:
            self.image = None  # where it is settled, stages that were still to come are not made
            self.episode.seconds = self.seconds


class Pipeline:
    """Encodes images with a model, and with a reward model for requests that need one.

    `threads` open images and make views. `cache` keeps features from one run to the next.
    """

    def __init__(
        self,
        model: Model,
        *,
        reward_model: Model | None = None,
        cache: FeatureCache | None = None,
        threads: int = 2,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.model = model
        self.reward_model = reward_model
        self._cache = cache
        self._threads = threads
        self._device = device_of(model)
        self._side = SideStream(self._device)

    @property
    def batches_images(self) -> bool:
        """Whether the views of several images share a batch."""
        return self._device.type != "cpu"

    @property
    def views_at_once(self) -> int:
        """Views that fill a batch."""
        return _DEVICE_VIEWS if self.batches_images else _CPU_VIEWS

    @property
    def images_at_once(self) -> int:
        """Images that should go through a method together: one on a CPU, so that no last bit depends on neighbours."""
        return _DEVICE_IMAGES if self.batches_images else 1

    def stream(self, requests: Iterable[ImageRequest]) -> Generator[Episode | ImageError, None, None]:
        """An episode for each request, or the reason why there is none, in order."""
        source = iter(requests)
        window: deque[_Slot] = deque()  # images under way, in the order of their requests
        waiting: deque[_Slot] = deque()  # those that need the tower, first come first served
        launched: deque[tuple[list[_Slot], EncodeLaunch]] = deque()  # those that a device may be working on
        limit = 2 * self._threads + 1
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="usetta-views")
        try:
            while True:
                while len(window) < limit and (request := next(source, None)):
                    if self.batches_images:  # two batches that were launched, and one that is being made
                        limit = max(limit, 3 * _DEVICE_VIEWS // request.views.views)
                    pending = PendingImage(request)
                    # Nothing can be encoded before the first image has views.
                    threads = 1 if window else self._threads
                    slot = _Slot(pending, pool.submit(self.make_stage, pending, threads=threads))
                    window.append(slot)
                    waiting.append(slot)
                if not window:
                    return
                if waiting:
                    batch = [slot for slot in self._next_batch(waiting) if slot.is_made()]
                    launched.append((batch, self.launch([slot.pending for slot in batch])))
                    if self.batches_images and len(launched) == 1:
                        continue  # the device gets another batch before this one is asked for
                batch, launch = launched.popleft()
                self.finish(launch)
                for slot in batch:
                    if not slot.pending.is_done:
                        threads = self._threads if len(window) == 1 else 1
                        slot.made = pool.submit(self.make_stage, slot.pending, threads=threads)
                        waiting.append(slot)  # behind the others: its next views are made while theirs are encoded
                while window and (outcome := window[0].outcome):
                    window.popleft()
                    yield outcome
        finally:
            pool.shutdown(cancel_futures=True)

    def make_stage(self, pending: PendingImage, *, threads: int = 1) -> None:
        """Make the views of the current stage, or find their features in the cache. Any thread may call this.

        An image that cannot be read raises `ImageError`. More `threads` help where the tower has nothing to do until
        these views are there.
        """
        started = time.perf_counter()
        request, stage = pending.request, pending.stages[0]
        towers = self._towers(request)
        pending.keys, pending.cached = [], [None] * len(towers)
        if self._cache:
            self._identify(pending)
            keys = [self._keys(pending, tower) for tower in towers]
            pending.keys = [tower_keys[0] for tower_keys in keys]
            pending.cached = [self._find(tower_keys, len(stage)) for tower_keys in keys]
        if any(features is None for features in pending.cached) or request.hidden or request.keep_pixels:
            if pending.image is None:
                pending.image = request.open()
            pending.id = pending.id or request.id or ""
            if not pending.id and request.views.views > 1:  # the weak view draws nothing, and hashing is not for free
                pending.id = image_id(pending.image)
            if self.batches_images:
                pin = self._device.type == "cuda"
                pending.plan = ViewPlan(pending.image, pending.id, request.views, part=stage, pin=pin)
            else:
                pending.pixels = make_views(pending.image, pending.id, request.views, part=stage, threads=threads)
        if len(pending.stages) == 1:  # no more views will be made of it
            pending.image = None
        pending.seconds += time.perf_counter() - started

    def encode(self, images: Sequence[PendingImage]) -> None:
        """Encode the current stage of images, which has been made. Only one thread may call this at a time."""
        self.finish(self.launch(images))

    def launch(self, images: Sequence[PendingImage], *, share_cores: bool = False) -> "EncodeLaunch":
        """The first half of `encode`, which a device may not have done yet when this returns.

        With `share_cores` each image has one core of a CPU, if that makes no difference to its features: several get
        done sooner, a single one later.
        """
        new: dict[bytes, Tensor] = {}
        groups = self._groups(images)
        with self._side.launch():
            for pending in images:
                if pending.plan is not None:
                    pending.pixels, pending.plan = pending.plan.make(self._device), None
            if share_cores and self.can_share_cores:
                map_on_cores(partial(self._launch_group, new), groups)
            else:
                for group in groups:
                    self._launch_group(new, group)
        return EncodeLaunch(images, new, self._side.mark())

    @cached_property
    def can_share_cores(self) -> bool:
        """Whether an image has the same features, to the last bit, by one core as by all; found out once."""
        if self.batches_images or torch.get_num_threads() < 2:
            return False
        towers = [self.model, *([self.reward_model] if self.reward_model else [])]
        return all(agrees_on_one_core(partial(encode_views, tower), tower.image_size) for tower in towers)

    def _launch_group(self, new: dict[bytes, Tensor], group: Sequence[PendingImage]) -> None:
        started = time.perf_counter()
        with observe_chunks(group[0].on_views):
            episodes = self._encode_group(group, new)
        seconds = (time.perf_counter() - started) / len(group)
        for pending, episode in zip(group, episodes, strict=True):
            pending.add(episode, seconds)

    def finish(self, launch: "EncodeLaunch") -> None:
        """The second half: what has to wait for the device."""
        episodes = [pending.episode for pending in launch.images if pending.episode]
        results = [tensor for e in episodes for tensor in (e.features, e.reward_features, e.hidden)]
        self._side.use(launch.mark, [*results, *launch.new.values()])
        if self._cache and launch.new:
            self._cache.put(dict(zip(launch.new, to_host(list(launch.new.values())), strict=True)))
        in_doubt = [pending for pending in launch.images if pending.is_in_doubt]
        features = to_host([pending.episode.features for pending in in_doubt if pending.episode])
        known = dict(zip(map(id, in_doubt), features, strict=True))
        for pending in launch.images:
            pending.finish(known.get(id(pending)))

    def _next_batch(self, waiting: "deque[_Slot]") -> "list[_Slot]":
        """The images whose turn it is: one on a CPU, elsewhere as many as fill a batch."""
        batch, views = [waiting.popleft()], 0
        while self.batches_images and waiting:
            views += batch[-1].views
            if views + waiting[0].views > _DEVICE_VIEWS:
                break
            batch.append(waiting.popleft())
        return batch

    def _groups(self, images: Sequence[PendingImage]) -> list[list[PendingImage]]:
        """Images whose views may share a batch."""
        if not self.batches_images:
            return [[pending] for pending in images]
        groups: dict[Hashable, list[PendingImage]] = {}
        for pending in images:
            dtype = None if pending.pixels is None else pending.pixels.dtype
            kind = dtype, pending.stages[0].start == 0, pending.request.hidden, pending.request.reward
            groups.setdefault(kind, []).append(pending)
        return list(groups.values())

    def _encode_group(self, group: Sequence[PendingImage], new: dict[bytes, Tensor]) -> list[Episode]:
        """What the towers see in the current stage of images; what the cache lacks is added to `new`."""
        request, weak = group[0].request, int(group[0].stages[0].start == 0)
        hidden: list[Tensor | None] = [None] * len(group)
        if request.hidden:
            hidden = [self._hidden_states(pending, weak) for pending in group]
        by_tower: list[list[Tensor]] = []
        for place, tower in enumerate(self._towers(request)):
            features = [pending.cached[place] for pending in group]
            missing = [i for i, cached in enumerate(features) if cached is None]
            states = hidden if place == 0 else [None] * len(group)
            fresh = self._features(tower, [group[i] for i in missing], [states[i] for i in missing], weak)
            for i, tensor in zip(missing, fresh, strict=True):
                features[i] = tensor.half().float() if self._cache and self._cache.half else tensor
                if self._cache:
                    new[group[i].keys[place]] = self._moved(tensor)
            by_tower.append([self._moved(tensor) for tensor in features if tensor is not None])
        rewards = by_tower[1] if len(by_tower) > 1 else [None] * len(group)
        return [
            Episode(
                features=features,
                reward_features=reward,
                hidden=states,
                pixels=pending.pixels.cpu() if pending.pixels is not None and pending.request.keep_pixels else None,
                encoded=any(cached is None for cached in pending.cached) or request.hidden,
            )
            for pending, features, reward, states in zip(group, by_tower[0], rewards, hidden, strict=True)
        ]

    def _features(
        self, tower: Model, group: Sequence[PendingImage], hidden: Sequence[Tensor | None], weak: int
    ) -> list[Tensor]:
        """Features (n, D) of the current stage of images; those with hidden states go on from them."""
        # The reward model may be elsewhere. Pixels of the host stay there until a tower takes them part by part.
        elsewhere = device_of(tower) != self._device and self.batches_images
        pixels = [pending.pixels for pending in group if pending.pixels is not None]
        pixels = [views.to(device_of(tower)) for views in pixels] if elsewhere else pixels
        states = [tensor for tensor in hidden if tensor is not None]
        if states:
            blocks = require_last_blocks(tower).last_blocks()
            return [torch.cat([blocks.encode(own[:weak]), blocks.encode(own[weak:])]) for own in states]
        if len(pixels) == 1:
            return [encode_views(tower, pixels[0], weak=weak)]
        return encode_views_together(tower, pixels, weak=weak) if pixels else []

    def _hidden_states(self, pending: PendingImage, weak: int) -> Tensor:
        assert pending.pixels is not None
        tower = require_last_blocks(self.model)
        return torch.cat([tower.hidden_states(part) for part in (pending.pixels[:weak], pending.pixels[weak:])])

    def _moved(self, features: Tensor) -> Tensor:
        """Features where methods expect them."""
        return features.to(self._device, non_blocking=features.device.type == "cpu")

    def _towers(self, request: ImageRequest) -> list[Model]:
        return [self.model, self.reward_model] if self.reward_model and request.reward else [self.model]

    def _identify(self, pending: PendingImage) -> None:
        """What the cache knows an image by: its file where that is enough, else its pixels."""
        request = pending.request
        if pending.digest:
            return
        source = request.source
        if request.id is not None and request.for_benchmark and callable(source):
            source = source()  # what a dataset reads is a file or its bytes, and both have the same digest
        if request.id is not None and isinstance(source, str | bytes) and request.for_benchmark:
            pending.id, pending.digest = request.id, file_digest(source)
        else:
            pending.image = request.open()
            pending.digest = image_id(pending.image)
            pending.id = request.id or pending.digest

    def _keys(self, pending: PendingImage, tower: Model) -> list[bytes]:
        """Under which the cache may have the features of the current stage, the first for new ones."""
        request, stage = pending.request, pending.stages[0]
        kinds = [request.views.key, *([request.part_of.key] if request.part_of else [])]
        if request.settled:  # a stage is a batch of its own, which has other last bits than the same views of a larger
            kinds = [f"{request.views.key}_{stage.start}-{stage.stop}"]
        fingerprint = getattr(tower, "image_fingerprint", None) or tower.fingerprint
        return [feature_key(fingerprint, kind, pending.id, pending.digest) for kind in kinds]

    def _find(self, keys: Iterable[bytes], views: int) -> Tensor | None:
        assert self._cache is not None
        cached = (self._cache.get(key) for key in keys)
        return next((features[:views] for features in cached if features is not None), None)


@dataclass(frozen=True, eq=False)
class EncodeLaunch:
    """Images whose current stage was launched on a device."""

    images: Sequence[PendingImage]
    new: dict[bytes, Tensor]
    """Features for the cache."""
    mark: "torch.cuda.Event | None"
    """When they are encoded."""


@dataclass(eq=False)
class _Slot:
    """A place in the stream."""

    pending: PendingImage
    made: Future[None]
    """Of the views of the current stage."""
    error: ImageError | None = None

    @property
    def views(self) -> int:
        """Of the current stage."""
        return len(self.pending.stages[0])

    @property
    def outcome(self) -> Episode | ImageError | None:
        """What the request gets; None as long as it is under way."""
        return self.error or (self.pending.episode if self.pending.is_done else None)

    def is_made(self) -> bool:
        """Wait for the views; False if the image cannot be read."""
        try:
            self.made.result()
        except ImageError as error:
            self.error = error
        return self.error is None
