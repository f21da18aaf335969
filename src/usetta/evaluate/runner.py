"""A run: methods on data sets under seeds, into a directory that can be continued.

The plan of a run is what its store lacks. It is cut into tasks by the place of the pictures in their data set, and a
task is written whole or not at all, so a run that was killed goes on with the very same tasks and ends with the very
same rows.
"""

import hashlib
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from usetta import methods as known
from usetta.coop import load_context, template_of
from usetta.data import DataError, Dataset
from usetta.episode import check
from usetta.evaluate.features import FeatureCache
from usetta.evaluate.provenance import peak_memory, provenance
from usetta.evaluate.store import Store
from usetta.evaluate.work import Outcome, Subject, Task, Worker
from usetta.models import Model
from usetta.progress import bar
from usetta.prompts import DEFAULT_TEMPLATE, TEMPLATES, ClassPrompts
from usetta.views import ViewRecipe

_SHOWN = 4
"""Methods whose accuracy is shown beside the progress bar."""


@dataclass(frozen=True)
class Setting:
    """What the answers of a run depend on beside the model, the data sets and the methods."""

    views: int = 64
    templates: tuple[str, ...] = ()
    """As `ClassPrompts` takes them; by default CLIP's own, or the one that `context` was learned with."""
    context: Path | None = None
    """File of a learned context."""
    augmix: bool | None = None
    """Whether strong views go through AugMix; by default as the paper does for the family of the data set."""


@dataclass(frozen=True)
class Summary:
    """What a call of `evaluate` did."""

    pictures: int
    """Pictures under a seed that were worked on."""
    encoded: int
    """Those that went through the image tower."""
    rows: int
    bad: int
    """Pictures that could not be read."""
    seconds: float


def evaluate(
    model: Model,
    datasets: Iterable[Dataset],
    methods: Sequence[str],
    out: Path,
    setting: Setting | None = None,
    *,
    seeds: Sequence[int] = (0,),
    pictures: int | None = None,
    reward: Model | None = None,
    cache: Path | None = None,
    batch_size: int = 8,
    threads: int = 2,
    say: Callable[[str], object] = lambda text: None,
    progress: bool | None = None,
) -> Summary:
    """Compute what is missing in the run directory `out`: every method on every picture under every seed.

    `pictures`: only so many of each data set, evenly spread over its list. `reward`: the judge for methods that learn
    from rewards, otherwise the model itself. `cache`: a folder for features of views. `batch_size` pictures go through
    a method together, `threads` make views. What is done is told by `say`.
    """
    setting = setting or Setting()
    if not methods or not seeds:
        raise ValueError(f"there must be at least one {'seed' if methods else 'method'}")
    if batch_size < 1 or threads < 1 or (pictures is not None and pictures < 1):
        raise ValueError("batch_size, threads and the number of pictures must be at least 1")
    started = time.perf_counter()
    context = load_context(setting.context, model) if setting.context else None
    subjects = [_subject(dataset, methods, model, setting, context, reward) for dataset in _by_name(datasets)]
    with FeatureCache(cache) if cache else nullcontext() as features, Store(out) as store:
        store.fix_all(_facts(subjects, model, setting, reward))
        for subject in subjects:
            store.note("classes", subject.dataset.name, subject.dataset.classes)
            store.note("root", subject.dataset.name, str(subject.dataset.root))
        plan = deque(
            task
            for subject in subjects
            for seed in dict.fromkeys(seeds)
            for task in _tasks(store, subject, seed, pictures, batch_size)
        )
        names = {subject.dataset.name for subject in subjects}
        total, ends = sum(len(task.missing) for task in plan), _ends(plan)
        del subjects, subject  # the plan alone holds them, and lets them go one after the other
        worker = Worker(model, judge=reward, cache=features, threads=threads)
        diary, scores = _Diary(store), _Scores(store)
        with bar(total, "Evaluating", progress, speed=True) as tick, closing(worker.run(_taken(plan))) as outcomes:
            for outcome, finishes in zip(outcomes, ends, strict=True):
                scores.add(outcome)
                store.add(outcome.rows, outcome.seen, outcome.bad)
                diary.add(outcome)
                for bad in outcome.bad:
                    say(f"{bad.dataset}: {bad.picture}: {bad.reason}")
                if finishes:
                    say(f"{outcome.task.subject.dataset.name}, seed {outcome.task.seed}: {scores.text()}")
                tick(len(outcome.task.missing), scores.text(_SHOWN))
        bad_pictures = sum(each.dataset in names for each in store.bad())
    return Summary(diary.pictures, diary.encoded, diary.rows, bad_pictures, time.perf_counter() - started)


def _by_name(datasets: Iterable[Dataset]) -> list[Dataset]:
    found: dict[str, Dataset] = {}
    for dataset in datasets:
        if dataset.labels is None:
            raise DataError(f"the pictures of {dataset.name} have no labels, so nothing can be measured")
        if found.setdefault(dataset.name, dataset).fingerprint != dataset.fingerprint:
            raise DataError(f"two different data sets are called {dataset.name}", "evaluate them in two runs")
    if not found:
        raise ValueError("there must be at least one data set")
    return list(found.values())


def _facts(
    subjects: Sequence[Subject], model: Model, setting: Setting, reward: Model | None
) -> Iterator[tuple[str, str, Any]]:
    """What the rows depend on, by kind and name: a run directory never mixes two of a kind."""
    varying = ("seed", "augmix")  # of the rows, and of the data sets
    views = {name: value for name, value in asdict(_views(setting, model)).items() if name not in varying}
    context = hashlib.sha256(setting.context.read_bytes()).hexdigest() if setting.context else None
    yield "run", "model", _identity(model)
    yield "run", "views", views
    yield "run", "prompt", {"templates": _templates(setting), "context": context}
    if any(subject.words is not None for subject in subjects):
        yield "run", "reward", _identity(reward) if reward else None
    for subject in subjects:
        dataset = subject.dataset
        facts = {
            "title": dataset.title,
            "family": dataset.family,
            "augmix": subject.views.augmix,
            "fingerprint": dataset.fingerprint,
            "pictures": len(dataset),
            "classes": len(dataset.classes),
        }
        yield "data set", dataset.name, facts
        for recipe in subject.recipes.values():
            settings = {name: value for name, value in asdict(recipe).items() if name != "description"}
            yield "recipe", f"{recipe.name} on {dataset.family}", settings


def _identity(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "precision": str(getattr(model, "dtype", "float32")).removeprefix("torch."),
        "logit_scale": model.logit_scale,
    }


def _views(setting: Setting, model: Model, augmix: bool = False) -> ViewRecipe:
    return ViewRecipe(views=setting.views, size=model.image_size, augmix=augmix)


def _templates(setting: Setting) -> list[str]:
    given = setting.templates or (template_of(setting.context) if setting.context else DEFAULT_TEMPLATE,)
    return [template for name in given for template in TEMPLATES.get(name, (name,))]


def _subject(
    dataset: Dataset,
    methods: Sequence[str],
    model: Model,
    setting: Setting,
    context: Tensor | None,
    reward: Model | None,
) -> Subject:
    """A data set with its prompts and recipes, which are checked."""
    augmix = dataset.augmix if setting.augmix is None else setting.augmix
    found = [known.get(method, family=dataset.family) for method in methods]
    recipes = {recipe.name: recipe for recipe in found}
    templates = _templates(setting)
    prompts = ClassPrompts(model.text, dataset.classes, templates, context)
    for recipe in recipes.values():
        check(recipe, model, prompts, setting.views)
    judged = any(recipe.loss == "reward" for recipe in recipes.values())
    words = ClassPrompts((reward or model).text, dataset.classes, templates) if judged else None
    return Subject(dataset, _views(setting, model, augmix), recipes, prompts, words)


def _tasks(store: Store, subject: Subject, seed: int, pictures: int | None, batch_size: int) -> Iterator[Task]:
    """What is missing of a data set under a seed, cut by the place of the pictures whatever is done already."""
    ids = subject.dataset.ids
    wanted = _spread(len(ids), pictures)
    done = {name: store.done(subject.dataset.name, seed, name) for name in subject.recipes}
    for first in range(0, len(wanted), batch_size):
        missing = {
            picture: names
            for picture in wanted[first : first + batch_size]
            if (names := tuple(name for name in subject.recipes if ids[picture] not in done[name]))
        }
        if missing:
            yield Task(subject, seed, missing)


def _spread(n: int, chosen: int | None) -> Sequence[int]:
    """Numbers of `chosen` of n pictures, evenly spread; the pictures of half as many are among them."""
    return range(n) if chosen is None or chosen >= n else [i * n // chosen for i in range(chosen)]


def _ends(plan: Iterable[Task]) -> list[bool]:
    """For each task whether it is the last of its data set and seed."""
    places = [(task.subject.dataset.name, task.seed) for task in plan]
    return [here != following for here, following in zip(places, [*places, None][1:], strict=True)]


def _taken(plan: deque[Task]) -> Iterator[Task]:
    """The tasks of a plan, which forgets them: a thousand prompts take most of a gigabyte once they were tuned, and
    must go with the last task of their data set.
    """
    while plan:
        yield plan.popleft()


class _Scores:
    """Right answers and answers of each method so far, on the data set and under the seed that is worked on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._place: tuple[str, int] | None = None
        self._counts: dict[str, tuple[int, int]] = {}

    def add(self, outcome: Outcome) -> None:
        """Count the rows of an outcome that is not in the store yet."""
        place = outcome.task.subject.dataset.name, outcome.task.seed
        if place != self._place:
            self._place = place
            stored = self._store.right(*place)
            self._counts = {name: stored.get(name, (0, 0)) for name in outcome.task.subject.recipes}
        for row in outcome.rows:
            right, answers = self._counts[row.method]
            self._counts[row.method] = right + (row.label == row.prediction), answers + 1

    def text(self, shown: int | None = None) -> str:
        """The accuracy of each method, or of the first `shown`."""
        known = [f"{name} {100 * right / n:.1f} %" for name, (right, n) in self._counts.items() if n]
        return ", ".join(known[:shown]) or "no answers"


class _Diary:
    """What this call of `evaluate` was, kept up to date in the store while it goes on."""

    def __init__(self, store: Store) -> None:
        self.pictures = self.encoded = self.rows = 0
        self._store = store
        self._name: str | None = None
        self._started = time.perf_counter()
        command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self._facts = {"command": command, **provenance()}

    def add(self, outcome: Outcome) -> None:
        """Write down that a task is done."""
        self.pictures += len(outcome.task.missing)
        self.encoded += outcome.encoded
        self.rows += len(outcome.rows)
        numbers = {
            "pictures": self.pictures,
            "encoded": self.encoded,
            "seconds": round(time.perf_counter() - self._started, 1),
            "peak_memory": peak_memory(),
        }
        if self._name is None:
            self._name = self._store.note_next("invocation", self._facts | numbers)
        else:
            self._store.note("invocation", self._name, self._facts | numbers)
