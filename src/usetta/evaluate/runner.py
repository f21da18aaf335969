"""A run: methods on datasets under seeds, into a directory that can be continued.

The plan of a run is what its store lacks. It is cut into tasks by the place of the images in their dataset, and a
task is written whole or not at all, so a run that was killed goes on with the very same tasks and ends with the very
same rows. An engine says where tasks are done; the store is written here alone, whoever did them and in any order.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from usetta import methods as known
from usetta.coop import load_context, template_of
from usetta.data import DataError, Dataset
from usetta.distributed import Engine, Failed, LocalEngine, VerifiedLoader
from usetta.episode import check
from usetta.evaluate.features import FeatureCache
from usetta.evaluate.orders import Asked, Order, OrderHand
from usetta.evaluate.run_log import RunLog, RunningAccuracy
from usetta.evaluate.store import FailedImage, Store
from usetta.evaluate.worker import EvalWorker, Outcome, Subject
from usetta.methods.recipe import Recipe
from usetta.models import Model
from usetta.progress import bar
from usetta.prompts import DEFAULT_TEMPLATE, TEMPLATES, ClassPrompts
from usetta.views import ViewRecipe

_SHOWN = 4
"""Methods whose accuracy is shown beside the progress bar."""


@dataclass(frozen=True)
class EvalSettings:
    """What the answers of a run depend on beside the model, the datasets and the methods."""

    views: int = 64
    templates: tuple[str, ...] = ()
    """As `ClassPrompts` takes them; by default CLIP's own, or the one that `context` was learned with."""
    context: Path | None = None
    """File of a learned context."""
    augmix: bool | None = None
    """Whether strong views go through AugMix; by default as the paper does for the family of the dataset."""


@dataclass(frozen=True)
class EvalSummary:
    """What a call of `evaluate` did."""

    images: int
    """Images under a seed that were worked on."""
    encoded: int
    """Those that went through the image tower."""
    rows: int
    bad: int
    """Images that could not be read."""
    seconds: float


def evaluate(
    model: Model,
    datasets: Iterable[Dataset],
    methods: Sequence[str],
    out: Path,
    setting: EvalSettings | None = None,
    *,
    seeds: Sequence[int] = (0,),
    images: int | None = None,
    reward: Model | None = None,
    cache: Path | None = None,
    batch_size: int = 8,
    threads: int = 2,
    engine: Engine | None = None,
    load: Callable[[], Model] | None = None,
    load_reward: Callable[[], Model] | None = None,
    say: Callable[[str], object] = lambda text: None,
    progress: bool | None = None,
) -> EvalSummary:
    """Compute what is missing in the run directory `out`: every method on every image under every seed.

    `images`: only so many of each dataset, evenly spread over its list. `reward`: the judge for methods that learn
    from rewards, otherwise the model itself. `cache`: a folder for features of views. `batch_size` images go through
    a method together, `threads` make views. `engine`: where this is done, by default here; workers elsewhere get the
    models by `load` and `load_reward`, which are pickled. What is done is told by `say`.
    """
    setting = setting or EvalSettings()
    if not methods or not seeds:
        raise ValueError(f"there must be at least one {'seed' if methods else 'method'}")
    if batch_size < 1 or threads < 1 or (images is not None and images < 1):
        raise ValueError("batch_size, threads and the number of images must be at least 1")
    started = time.perf_counter()
    context = load_context(setting.context, model) if setting.context else None
    questions = [_question(dataset, methods, model, setting, context) for dataset in _by_name(datasets)]
    subjects = {each.dataset.name: each.subject(model, reward) for each in questions}
    for each in questions:
        for recipe in each.recipes.values():
            check(recipe, model, subjects[each.dataset.name].prompts, setting.views)
    make_worker: Callable[[], OrderHand]
    if engine is not None:
        make_worker = _make_worker(questions, model, reward, load, load_reward, cache, threads)
        subjects.clear()  # workers make their own
    with FeatureCache(cache) if cache and engine is None else nullcontext() as features, Store(out) as store:
        store.fix_all(_facts(questions, model, setting, reward))
        for each in questions:
            store.note("classes", each.dataset.name, each.dataset.classes)
            store.note("root", each.dataset.name, str(each.dataset.root))
        plan = [
            order
            for each in questions
            for seed in dict.fromkeys(seeds)
            for order in _orders(store, each, seed, images, batch_size)
        ]
        left: Counter[tuple[str, int]] = Counter()
        for order in plan:
            left[order.dataset, order.seed] += len(order.images)
        if engine is None:
            worker = EvalWorker(model, judge=reward, cache=features, threads=threads)
            engine, make_worker = (
                LocalEngine(),
                lambda: OrderHand(worker, subjects.pop),
            )  # which lets go of them one by one
        diary, scores = (
            RunLog(store),
            RunningAccuracy(store, {each.dataset.name: tuple(each.recipes) for each in questions}),
        )
        with (
            bar(sum(left.values()), "Evaluating", progress, speed=True) as tick,
            closing(engine.run(make_worker, plan)) as results,
        ):
            for order, found in results:
                outcome = Outcome(bad=_lost(order, found)) if isinstance(found, Failed) else found
                scores.add(order, outcome)
                store.add(outcome.rows, outcome.seen, outcome.bad)
                diary.add(order, outcome)
                for bad in outcome.bad:
                    say(f"{bad.dataset}: {bad.image}: {bad.reason}")
                left[order.dataset, order.seed] -= len(order.images)
                if not left[order.dataset, order.seed]:
                    say(f"{order.dataset}, seed {order.seed}: {scores.text()}")
                tick(len(order.images), scores.text(_SHOWN))
        bad_images = sum(each.dataset in scores.methods for each in store.bad())
    return EvalSummary(diary.images, diary.encoded, diary.rows, bad_images, time.perf_counter() - started)


def _by_name(datasets: Iterable[Dataset]) -> list[Dataset]:
    found: dict[str, Dataset] = {}
    for dataset in datasets:
        if dataset.labels is None:
            raise DataError(f"the images of {dataset.name} have no labels, so nothing can be measured")
        if found.setdefault(dataset.name, dataset).fingerprint != dataset.fingerprint:
            raise DataError(f"two different datasets are called {dataset.name}", "evaluate them in two runs")
    if not found:
        raise ValueError("there must be at least one dataset")
    return list(found.values())


@dataclass(frozen=True, eq=False)
class _Question:
    """A dataset and what is asked about it; with a model it becomes a subject, here or elsewhere."""

    dataset: Dataset
    recipes: Mapping[str, Recipe]
    views: ViewRecipe
    templates: list[str]
    context: Tensor | None

    @property
    def judged(self) -> bool:
        return any(recipe.loss == "reward" for recipe in self.recipes.values())

    def subject(self, model: Model, reward: Model | None) -> Subject:
        classes = self.dataset.classes
        prompts = ClassPrompts(model.text, classes, self.templates, self.context)
        words = ClassPrompts((reward or model).text, classes, self.templates) if self.judged else None
        return Subject(self.dataset, self.views, self.recipes, prompts, words)

    def without_images(self) -> "_Question":
        """As it travels: orders bring their images, of which a dataset must have one."""
        assert self.dataset.labels is not None
        ids, labels = self.dataset.ids[:1], self.dataset.labels[:1]
        return replace(self, dataset=replace(self.dataset, ids=ids, labels=labels, root=self.dataset.root.absolute()))


@dataclass(frozen=True, eq=False)
class _EvalWorkerFactory:
    """How a worker elsewhere comes by its hand; it travels."""

    questions: Mapping[str, _Question]
    load: VerifiedLoader
    load_reward: VerifiedLoader | None
    cache: Path | None
    threads: int

    def __call__(self) -> OrderHand:
        model, reward = self.load(), self.load_reward() if self.load_reward else None
        cache = FeatureCache(self.cache) if self.cache else None  # open as long as the worker lives
        worker = EvalWorker(model, judge=reward, cache=cache, threads=self.threads)
        return OrderHand(worker, lambda name: self.questions[name].subject(model, reward))


def _make_worker(
    questions: Iterable[_Question],
    model: Model,
    reward: Model | None,
    load: Callable[[], Model] | None,
    load_reward: Callable[[], Model] | None,
    cache: Path | None,
    threads: int,
) -> _EvalWorkerFactory:
    if load is None or (reward is not None and load_reward is None):
        raise ValueError("workers of an engine load their models themselves: say how by load and load_reward")
    judge = VerifiedLoader(load_reward, reward.fingerprint) if reward is not None and load_reward else None
    travelling = {each.dataset.name: each.without_images() for each in questions}
    return _EvalWorkerFactory(
        travelling, VerifiedLoader(load, model.fingerprint), judge, cache and cache.absolute(), threads
    )


def _lost(order: Order, found: Failed) -> list[FailedImage]:
    return [FailedImage(order.dataset, each.id, found.reason) for each in order.images]


def _facts(
    questions: Sequence[_Question], model: Model, setting: EvalSettings, reward: Model | None
) -> Iterator[tuple[str, str, Any]]:
    """What the rows depend on, by kind and name: a run directory never mixes two of a kind."""
    varying = ("seed", "augmix")  # of the rows, and of the datasets
    views = {name: value for name, value in asdict(_views(setting, model)).items() if name not in varying}
    context = hashlib.sha256(setting.context.read_bytes()).hexdigest() if setting.context else None
    yield "run", "model", _identity(model)
    yield "run", "views", views
    yield "run", "prompt", {"templates": _templates(setting), "context": context}
    if any(each.judged for each in questions):
        yield "run", "reward", _identity(reward) if reward else None
    for each in questions:
        dataset = each.dataset
        facts = {
            "title": dataset.title,
            "family": dataset.family,
            "augmix": each.views.augmix,
            "fingerprint": dataset.fingerprint,
            "images": len(dataset),
            "classes": len(dataset.classes),
        }
        yield "dataset", dataset.name, facts
        for recipe in each.recipes.values():
            settings = {name: value for name, value in asdict(recipe).items() if name != "description"}
            yield "recipe", f"{recipe.name} on {dataset.family}", settings


def _identity(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "precision": getattr(model, "precision", "fp32"),
        "logit_scale": model.logit_scale,
    }


def _views(setting: EvalSettings, model: Model, augmix: bool = False) -> ViewRecipe:
    return ViewRecipe(views=setting.views, size=model.image_size, augmix=augmix)


def _templates(setting: EvalSettings) -> list[str]:
    given = setting.templates or (template_of(setting.context) if setting.context else DEFAULT_TEMPLATE,)
    return [template for name in given for template in TEMPLATES.get(name, (name,))]


def _question(
    dataset: Dataset, methods: Sequence[str], model: Model, setting: EvalSettings, context: Tensor | None
) -> _Question:
    augmix = dataset.augmix if setting.augmix is None else setting.augmix
    found = [known.get(method, family=dataset.family) for method in methods]
    recipes = {recipe.name: recipe for recipe in found}
    return _Question(dataset, recipes, _views(setting, model, augmix), _templates(setting), context)


def _orders(store: Store, asked: _Question, seed: int, images: int | None, batch_size: int) -> Iterator[Order]:
    """What is missing of a dataset under a seed, cut by the place of the images whatever is done already."""
    dataset = asked.dataset
    assert dataset.labels is not None
    wanted = _spread(len(dataset), images)
    done = {name: store.done(dataset.name, seed, name) for name in asked.recipes}
    for first in range(0, len(wanted), batch_size):
        missing = tuple(
            Asked(dataset.ids[i], dataset.labels[i], names)
            for i in wanted[first : first + batch_size]
            if (names := tuple(name for name in asked.recipes if dataset.ids[i] not in done[name]))
        )
        if missing:
            yield Order(dataset.name, seed, missing)


def _spread(n: int, chosen: int | None) -> Sequence[int]:
    """Numbers of `chosen` of n images, evenly spread; the images of half as many are among them."""
    return range(n) if chosen is None or chosen >= n else [i * n // chosen for i in range(chosen)]
