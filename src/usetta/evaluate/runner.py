"""A run: methods on datasets under seeds, into a directory that can be continued.

The plan of a run is what its store lacks. It is cut into work items by the place of the images in their dataset, so
that processes which share a run share no image, and, where images are slow, into smaller ones on the way, so that what
is known is saved every few seconds. An item is written whole or not at all. Where images are answered by themselves, a
run that was killed ends with the very same rows as one that was not. An engine decides where items are done; the store
is written here alone, whoever did them and in any order.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from usetta import methods as known_methods
from usetta.adaptive import ADAPTIVE, Views, accepted_changes, most_views
from usetta.coop import load_context, template_of
from usetta.data import DataError, Dataset
from usetta.distributed import Engine, Failed, LocalEngine, Pace, Shard, VerifiedLoader, has_gpus
from usetta.evaluate.merge import shard_folder
from usetta.evaluate.orders import SHUFFLED, StreamOrder
from usetta.evaluate.run_log import RunLog, RunningAccuracy
from usetta.evaluate.store import FILE, NO_LABEL, FailedImage, Store
from usetta.evaluate.worker import DatasetJob, EvalWorker, Outcome, WorkImage, WorkItem
from usetta.evaluate.writing import ResultWriter, forget_changed, only_writer
from usetta.feature_cache import FeatureCache
from usetta.models import Model
from usetta.models.base import view_recipe
from usetta.pipeline import Pipeline
from usetta.progress import bar
from usetta.prompts import DEFAULT_TEMPLATE, TEMPLATES
from usetta.views import ViewRecipe

_SHOWN = 4
"""Methods whose accuracy is shown beside the progress bar."""
_ITEM_IMAGES = 8
"""Images of a work item at most, unless the batch size says otherwise."""


@dataclass(frozen=True)
class EvalSettings:
    """What the answers of a run depend on beside the model, the datasets and the methods."""

    views: Views = 64
    templates: tuple[str, ...] = ()
    """As `ClassPrompts` takes them; by default CLIP's own, or the one that `context` was learned with."""
    context: Path | None = None
    """File of a learned context."""
    augmix: bool | None = None
    """Whether strong views go through AugMix; by default as the paper does for the family of the dataset."""
    half_features: bool = False
    """Round features to half precision, so that a cache of them takes half the space."""
    adaptive_limit: int = most_views(ADAPTIVE)
    """Views of an image at most, where `views` is adaptive."""


@dataclass(frozen=True)
class EvalSummary:
    """What a call of `evaluate` did."""

    images: int
    """Images under a seed that were worked on."""
    encoded: int
    """Those that went through the image tower."""
    rows: int
    failed: int
    """Images that could not be read."""
    seconds: float


def evaluate(
    model: Model,
    datasets: Iterable[Dataset],
    methods: Sequence[str],
    out: Path,
    settings: EvalSettings | None = None,
    *,
    seeds: Sequence[int] = (0,),
    order: str = SHUFFLED,
    order_seeds: Sequence[int] = (0,),
    ood: Iterable[Dataset] = (),
    limit: int | None = None,
    reward_model: Model | None = None,
    cache: Path | None = None,
    batch_size: int | None = None,
    threads: int = 2,
    engine: Engine | None = None,
    shard: Shard | None = None,
    load: Callable[[], Model] | None = None,
    load_reward_model: Callable[[], Model] | None = None,
    log: Callable[[str], object] = lambda text: None,
    progress: bool | None = None,
) -> EvalSummary:
    """Compute what is missing in the run directory `out`: every method on every image under every seed.

    Methods with a memory see each dataset as a stream, once in each order: `order` (see `evaluate.orders`) with each of
    `order_seeds`. A stream that was interrupted starts again, from features in the cache; without `cache` the run keeps
    one. `ood`: datasets whose images are classified among the classes of each of the others, none of which is right.

    `limit`: at most so many images of each dataset, evenly spread over its list. `reward_model`: for methods that learn
    from rewards, otherwise the model itself. `cache`: a folder for features of views. `batch_size` images at most go
    through a method together, by default one on a CPU and eight elsewhere; `threads` make views. `engine`: where the
    work is done, by default in this process; workers elsewhere get the models by `load` and `load_reward_model`, which
    are pickled. `shard`: the share of this process, if several share the work; `merge_shards` puts them together.
    Failed images and finished datasets are reported by `log`.
    """
    settings = settings or EvalSettings()
    shard = shard or Shard()
    kind = StreamOrder.parse(order)
    if not order_seeds:
        raise ValueError("no order seeds given")
    if not methods or not seeds:
        raise ValueError(f"no {'seeds' if methods else 'methods'} given")
    if threads < 1 or any(number is not None and number < 1 for number in (batch_size, limit)):
        raise ValueError("batch_size, threads and limit must be at least 1")
    if engine is not None and (load is None or (reward_model is not None and load_reward_model is None)):
        raise ValueError("workers of an engine load their models themselves: pass load and load_reward_model")
    started = time.perf_counter()
    context = load_context(settings.context, model) if settings.context else None
    jobs = {dataset.name: _job(dataset, methods, model, settings, context) for dataset in _by_name(datasets)}
    jobs |= _ood_jobs(jobs.values(), ood)
    for job in jobs.values():
        job.check(model, reward_model)
    streams = [
        (job, seed, order_seed, _stream_places(job, limit, kind, order_seed))
        for job in jobs.values()
        if any(recipe.remembers for recipe in job.recipes.values())
        for seed in dict.fromkeys(seeds)
        for order_seed in dict.fromkeys(order_seeds)
    ]
    if streams and cache is None and engine is None:
        cache = shard_folder(out, shard) / "features"
        log(f"features are kept in {cache}, so that every order and a run that is continued can use them")
    with ExitStack() as stack:
        features = None
        if cache and engine is None:  # before the store, so that a cache that cannot be used leaves no run behind
            features = stack.enter_context(FeatureCache(cache, half=settings.half_features))
        stack.enter_context(only_writer(shard_folder(out, shard)))
        stores = [stack.enter_context(Store(shard_folder(out, shard)))]
        if not shard.is_whole and (out / FILE).is_file():  # what has been merged already is not computed again
            stores.append(stack.enter_context(Store(out, create=False)))
        store = stores[0]
        store.fix_all([*_facts(jobs.values(), model, settings, reward_model), *_stream_facts(streams, kind)])
        for name, job in jobs.items():
            store.note("classes", name, job.dataset.classes)
            store.note("root", name, str(job.dataset.root))
        store.note("device", "model", str(getattr(model, "device", "cpu")))
        for job in jobs.values():
            forget_changed(job.dataset, stores, log)
        together = (batch_size or 1) > 1 or Pipeline(model).batches_images or has_gpus(engine)
        # Where images are answered by themselves, each is an item, so that it is saved as soon as it is known.
        alone = engine is None and not together
        pace = Pace(batch_size or (1 if alone else _ITEM_IMAGES), fixed=together)
        plan = _plan(jobs.values(), seeds, limit, pace.most, shard, stores)
        plan += _stream_plan(shard.take(streams), stores)
        make_worker: Callable[[], EvalWorker]
        if engine is None:
            pipeline = Pipeline(model, reward_model=reward_model, cache=features, threads=threads)
            engine, make_worker = LocalEngine(), lambda: EvalWorker(pipeline, jobs, batch_size)
        else:
            assert load is not None  # which was checked above
            make_worker = _worker_factory(
                jobs, model, reward_model, load, load_reward_model, cache, settings, batch_size, threads
            )
        run_log, accuracy = RunLog(store), RunningAccuracy(store, {name: (*job.recipes,) for name, job in jobs.items()})
        left: Counter[tuple[str, int, int]] = Counter()
        for item in plan:
            left[item.dataset, item.seed, item.order_seed] += len(item.images)
        writer = stack.enter_context(closing(ResultWriter(store, jobs, run_log, accuracy)))
        tick = stack.enter_context(bar(sum(left.values()), "Evaluating", progress, speed=True))
        results = stack.enter_context(closing(engine.run(make_worker, _paced(plan, pace))))
        for item, result in results:
            pace.returned(item.key)
            outcome = Outcome(failed=_failed_images(item, result)) if isinstance(result, Failed) else result
            writer.add(item, outcome)
            for image in outcome.failed:
                log(f"{image.dataset}: {image.image}: {image.reason}")
            place = item.dataset, item.seed, item.order_seed
            left[place] -= len(item.images)
            if not left[place]:
                order_text = f", order {item.order_seed}" if item.is_stream else ""
                found = "done" if jobs[item.dataset].ood_of else accuracy.text()
                log(f"{item.dataset}, seed {item.seed}{order_text}: {found}")
            tick(len(item.images), accuracy.text(_SHOWN))
        writer.close()
        failed = sum(image.dataset in jobs for image in store.failed_images())
    return EvalSummary(run_log.images, run_log.encoded, run_log.rows, failed, time.perf_counter() - started)


def _by_name(datasets: Iterable[Dataset]) -> list[Dataset]:
    by_name: dict[str, Dataset] = {}
    for dataset in datasets:
        if dataset.labels is None:
            raise DataError(f"the images of {dataset.name} have no labels, so nothing can be measured")
        if by_name.setdefault(dataset.name, dataset).fingerprint != dataset.fingerprint:
            raise DataError(f"two different datasets are called {dataset.name}", "evaluate them in separate runs")
    if not by_name:
        raise ValueError("no datasets given")
    return list(by_name.values())


def _job(
    dataset: Dataset, methods: Sequence[str], model: Model, settings: EvalSettings, context: Tensor | None
) -> DatasetJob:
    augmix = dataset.augmix if settings.augmix is None else settings.augmix
    recipes = [known_methods.get(method, family=dataset.family, dataset=dataset.name) for method in methods]
    return DatasetJob(
        dataset,
        {recipe.name: recipe for recipe in recipes},
        _views(settings, model, augmix),
        _templates(settings),
        context,
        adaptive=accepted_changes(settings.views),
    )


def _ood_jobs(jobs: Iterable[DatasetJob], ood: Iterable[Dataset]) -> dict[str, DatasetJob]:
    """Images of other datasets, to be classified as if they were of these."""
    others = list(ood)
    made = {}
    for job in list(jobs):
        for other in others:
            if other.fingerprint == job.dataset.fingerprint:
                raise DataError(f"{other.name} cannot be out of distribution for itself")
            name, title = f"{job.dataset.name} ood {other.name}", f"{other.title}, not {job.dataset.title}"
            # Those images as they are, with the family and the classes of this dataset.
            dataset = replace(other, name=name, title=title, labels=None)
            dataset = replace(dataset, family=job.dataset.family, classes=job.dataset.classes)
            made[name] = replace(job, dataset=dataset, ood_of=job.dataset.name)
    return made


@dataclass(frozen=True, eq=False)
class _EvalWorkerFactory:
    """Makes a worker where it works; it is pickled, so it holds names and settings, not models."""

    jobs: Mapping[str, DatasetJob]
    load: VerifiedLoader
    load_reward_model: VerifiedLoader | None
    cache: Path | None
    half: bool
    batch_size: int | None
    threads: int

    def __call__(self) -> EvalWorker:
        model, reward_model = self.load(), self.load_reward_model() if self.load_reward_model else None
        cache = FeatureCache(self.cache, half=self.half) if self.cache else None  # open as long as the worker lives
        pipeline = Pipeline(model, reward_model=reward_model, cache=cache, threads=self.threads)
        return EvalWorker(pipeline, self.jobs, self.batch_size)


def _worker_factory(
    jobs: Mapping[str, DatasetJob],
    model: Model,
    reward_model: Model | None,
    load: Callable[[], Model],
    load_reward_model: Callable[[], Model] | None,
    cache: Path | None,
    settings: EvalSettings,
    batch_size: int | None,
    threads: int,
) -> _EvalWorkerFactory:
    reward = None
    if reward_model is not None and load_reward_model:
        reward = VerifiedLoader(load_reward_model, reward_model.fingerprint)
    travelling = {name: job.without_images() for name, job in jobs.items()}
    folder = cache and cache.absolute()
    same = VerifiedLoader(load, model.fingerprint)
    return _EvalWorkerFactory(travelling, same, reward, folder, settings.half_features, batch_size, threads)


def _failed_images(item: WorkItem, failure: Failed) -> list[FailedImage]:
    return [FailedImage(item.dataset, image.id, failure.reason) for image in item.images]


def _facts(
    jobs: Iterable[DatasetJob], model: Model, settings: EvalSettings, reward_model: Model | None
) -> Iterator[tuple[str, str, Any]]:
    """What the rows depend on, by kind and name: a run directory never mixes two of a kind."""
    varying = ("seed", "augmix")  # of the rows, and of the datasets
    views = {name: value for name, value in asdict(_views(settings, model)).items() if name not in varying}
    for name, usual in (("resize_mode", "shortest"), ("interpolation", "bicubic")):
        if views[name] == usual:  # run directories from before there was a choice do not record it
            del views[name]
    context = hashlib.sha256(settings.context.read_bytes()).hexdigest() if settings.context else None
    yield "run", "model", _identity(model)
    yield "run", "views", views | {"adaptive": accepted_changes(settings.views)}
    yield "run", "prompt", {"templates": _templates(settings), "context": context}
    yield "run", "features", {"precision": "fp16" if settings.half_features else "fp32"}
    jobs = list(jobs)
    if any(job.needs_reward for job in jobs):
        yield "run", "reward", _identity(reward_model) if reward_model else None
    for job in jobs:
        dataset = job.dataset
        facts = {
            "title": dataset.title,
            "family": dataset.family,
            "augmix": job.views.augmix,
            "fingerprint": dataset.fingerprint,
            "images": len(dataset),
            "classes": len(dataset.classes),
        }
        if job.ood_of:
            facts["ood_of"] = job.ood_of
        yield "dataset", dataset.name, facts
        for recipe in job.recipes.values():
            place = dataset.name if recipe.name.endswith("values=published") else dataset.family
            yield "recipe", f"{recipe.name} on {place}", recipe.record()


def _identity(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "precision": getattr(model, "precision", "fp32"),
        "logit_scale": model.logit_scale,
    }


def _views(settings: EvalSettings, model: Model, augmix: bool = False) -> ViewRecipe:
    views = settings.adaptive_limit if isinstance(settings.views, str) else most_views(settings.views)
    return view_recipe(model, views, augmix=augmix)


def _templates(settings: EvalSettings) -> list[str]:
    given = settings.templates or (template_of(settings.context) if settings.context else DEFAULT_TEMPLATE,)
    return [template for name in given for template in TEMPLATES.get(name, (name,))]


def _plan(
    jobs: Iterable[DatasetJob],
    seeds: Iterable[int],
    limit: int | None,
    size: int,
    shard: Shard,
    stores: Sequence[Store],
) -> list[WorkItem]:
    """What is missing in all of `stores`, of the share of this process.

    Items are cut, and dealt to processes, by the place of their images, whatever is done already: so a run that is
    continued has the same items, and no two processes ever share one.
    """
    places = [
        (job, seed, chosen[first : first + size])
        for job in jobs
        for seed in dict.fromkeys(seeds)
        for chosen in [_spread(len(job.dataset), limit)]
        for first in range(0, len(chosen), size)
    ]
    done: dict[tuple[str, int, str], set[str]] = {}
    for job, seed, _ in places:
        for method in _episodic(job):
            key = job.dataset.name, seed, method
            if key not in done:
                done[key] = set().union(*(store.done(*key) for store in stores))
    items = (_work_item(job, seed, numbers, done) for job, seed, numbers in shard.take(places))
    return [item for item in items if item.images]


def _paced(plan: Iterable[WorkItem], pace: Pace) -> Iterator[WorkItem]:
    """The items of a plan in pieces that do not take long, as an engine takes them; a stream stays whole."""
    for item in plan:
        for images in [item.images] if item.is_stream else pace.pieces(item.images):
            piece = replace(item, images=tuple(images))
            pace.sent(piece.key)
            yield piece


def _work_item(
    job: DatasetJob, seed: int, numbers: Sequence[int], done: Mapping[tuple[str, int, str], set[str]]
) -> WorkItem:
    """The images of these numbers that lack an answer of a method."""
    dataset = job.dataset
    images = (
        WorkImage(name, label, tuple(m for m in _episodic(job) if name not in done[dataset.name, seed, m]))
        for name, label in ((dataset.ids[i], _label(dataset, i)) for i in numbers)
    )
    return WorkItem(dataset.name, seed, tuple(image for image in images if image.methods))


def _episodic(job: DatasetJob) -> list[str]:
    """The methods that answer every image by itself."""
    return [name for name, recipe in job.recipes.items() if not recipe.remembers]


def _label(dataset: Dataset, number: int) -> int:
    return NO_LABEL if dataset.labels is None else dataset.labels[number]


_StreamPlace = tuple[DatasetJob, int, int, list[int]]
"""Dataset, seed of the views, seed of the order, and the numbers of the images in that order."""


def _stream_places(job: DatasetJob, limit: int | None, kind: StreamOrder, order_seed: int) -> list[int]:
    numbers = _spread(len(job.dataset), limit)
    ids, labels = [job.dataset.ids[i] for i in numbers], [_label(job.dataset, i) for i in numbers]
    return [numbers[place] for place in kind.places(ids, labels, order_seed)]


def _stream_facts(streams: Iterable[_StreamPlace], kind: StreamOrder) -> Iterator[tuple[str, str, Any]]:
    """An answer in a stream depends on all images before it, so a run has one stream by each name."""
    for job, _, order_seed, numbers in streams:
        digest = hashlib.blake2b("\n".join(job.dataset.ids[i] for i in numbers).encode("utf-8", "surrogateescape"))
        facts = {"order": str(kind), "images": len(numbers), "digest": digest.hexdigest()[:32]}
        yield "stream", f"{job.dataset.name}, order {order_seed}", facts


def _stream_plan(streams: Iterable[_StreamPlace], stores: Sequence[Store]) -> list[WorkItem]:
    """Streams in which a method lacks an answer. They are computed from their start, and end with the same rows."""
    items = []
    for job, seed, order_seed, numbers in streams:
        dataset = job.dataset
        ids = {dataset.ids[i] for i in numbers}
        lacking = tuple(
            name
            for name, recipe in job.recipes.items()
            if recipe.remembers
            and not ids <= set().union(*(store.done(dataset.name, seed, name, order_seed) for store in stores))
        )
        if lacking:
            images = tuple(WorkImage(dataset.ids[i], _label(dataset, i), lacking) for i in numbers)
            items.append(WorkItem(dataset.name, seed, images, order_seed))
    return items


def _spread(n: int, chosen: int | None) -> Sequence[int]:
    """Numbers of `chosen` of n images, evenly spread; the images of any smaller number are among them.

    Images are taken in the order of their numbers with the bits reversed: first 0, then the half, the quarters, the
    eighths.
    """
    if chosen is None or chosen >= n:
        return range(n)
    bits = (n - 1).bit_length()
    return sorted(sorted(range(n), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))[:chosen])
