"""Runs: their rows are what the recipes say about the views, and nothing but the question decides them."""

import gc
import itertools
import os
import sqlite3
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from conftest import make_image
from evaluate.runs import CLASSES, TWELVE, VIEWS, Counting, assert_close, content, four_blocks, listed, make_dataset
from models.tiny import TINY_RESNET, disturbed
from usetta import methods
from usetta.coop import save_context
from usetta.data import DataError, Dataset
from usetta.distributed import LocalEngine
from usetta.evaluate import runner, writing
from usetta.evaluate.runner import EvalSettings, EvalSummary, evaluate
from usetta.evaluate.store import FILE, ResultRow, Store, StoreError
from usetta.images import open_image
from usetta.methods.recipe import Hidden, Result, Reward, run
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

FEW = ("clip", "se", "use", "ttl", "rlcf")
"""Methods that differ in what they ask for: the weak view, all views, the prompt, hidden states, a reward model."""
SETTINGS = EvalSettings(views=VIEWS)


def answers_of(
    model: CLIP, dataset: Dataset, image: int, seed: int, names: Sequence[str] = TWELVE, rewarding: CLIP | None = None
) -> dict[str, Result]:
    """What methods say about an image, step by step and one by one."""
    item = dataset[image]
    recipe = ViewRecipe(views=VIEWS, size=32, augmix=dataset.family == "fine-grained", seed=seed)
    pixels = make_views(open_image(item.path, for_benchmark=True), item.id, recipe)

    def features(tower: CLIP) -> Tensor:
        fitting, size = pixels, tower.image_size
        if size != 32:
            fitting = interpolate(pixels / 255, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
        encoded = torch.cat([tower.encode_images(fitting[:1]), tower.encode_images(fitting[1:])])
        return encoded[None]

    prompts, tower = ClassPrompts(model.text, dataset.classes), rewarding or model
    reward = Reward(features(tower), ClassPrompts(tower.text, dataset.classes).features())
    hidden = Hidden(model.last_blocks(), [model.hidden_states(pixels)])
    return {
        name: run(
            methods.get(name, family=dataset.family),
            features(model),
            prompts,
            model.logit_scale,
            reward=reward if name == "rlcf" else None,
            hidden=hidden if name == "ttl" else None,
        )
        for name in names
    }


def check_row(row: ResultRow, answer: Result, label: int) -> None:
    p = answer.probs[0].double().numpy()
    assert row.label == label
    assert row.prediction == p.argmax()
    assert row.rank == sum(p > p[label]) + sum(p[:label] == p[label])
    numbers = row.confidence, row.true_probability, row.sum_of_squares
    assert numbers == pytest.approx((p.max(), p[label], np.square(p).sum()), abs=1e-5)
    if row.method == "clip":
        assert (row.delta, row.beta) == (None, 1)
    else:
        assert (row.delta, row.beta) == pytest.approx((answer.delta.item(), answer.beta.item()), abs=1e-6)
    if row.method in ("clip", "mta", "zero", "se"):
        assert (row.before, row.skipped) == (None, None)
    else:
        assert (row.before, row.skipped) == (answer.before.argmax().item(), answer.skipped.item())
    assert row.views == (1 if row.method == "clip" else VIEWS)
    assert 0 < row.seconds < 60


@pytest.mark.parametrize("family", ["fine-grained", "imagenet"])
def test_rows_are_what_the_recipes_say_about_the_views(model: CLIP, tmp_path: Path, family: Any) -> None:
    dataset = make_dataset(tmp_path / "images", 4, family=family)
    done = evaluate(model, [dataset], TWELVE, tmp_path / "run", SETTINGS, seeds=[1], batch_size=3)
    assert replace(done, seconds=0) == EvalSummary(images=4, encoded=4, rows=48, failed=0, seconds=0)
    with Store(tmp_path / "run", create=False) as store:
        rows = {(row.image, row.method): row for row in store.rows()}
        assert len(rows) == 4 * 12
        for number, image in enumerate(dataset):
            answers = answers_of(model, dataset, number, 1)
            assert image.label is not None
            for name, answer in answers.items():
                check_row(rows[image.id, name], answer, image.label)
            seen = store.shown_views(dataset.name, image.id, 1)
            assert seen is not None
            entropies, labels = answers["se"].entropies[0], answers["se"].view_labels[0]
            expected = [0, *(1 + entropies[1:].argsort()[:3]).tolist()]
            assert [(view.number, view.label) for view in seen.views] == [(i, labels[i]) for i in expected]
            assert [view.entropy for view in seen.views] == pytest.approx(entropies[expected].tolist(), abs=1e-5)
        answered = {name: {row.prediction for row in rows.values() if row.method == name} for name in TWELVE}
    assert sum(len(labels) > 1 for labels in answered.values()) >= 10, "answers must differ, else little was tested"


def test_another_model_rewards_where_one_is_given(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    reward_model = disturbed(TINY_RESNET)  # of another size of images, and another dimension
    evaluate(model, [things], ["rlcf", "se"], tmp_path / "run", SETTINGS, reward_model=reward_model, batch_size=2)
    evaluate(model, [things], ["rlcf", "se"], tmp_path / "self", SETTINGS, batch_size=2)
    own, other = content(tmp_path / "self"), content(tmp_path / "run")
    same = {method: [a == b for a, b in zip(own.rows, other.rows, strict=True) if a.method == method] for method in FEW}
    assert all(same["se"])
    assert not all(same["rlcf"])
    rows = [row for row in other.rows if row.method == "rlcf"]
    for row in rows:
        number = things.ids.index(row.image)
        answers = answers_of(model, things, number, 0, ["rlcf"], reward_model)
        check_row(replace(row, seconds=1), answers["rlcf"], number)
    models = {"load": lambda: model, "load_reward_model": lambda: reward_model, "reward_model": reward_model}
    evaluate(model, [things], ["rlcf", "se"], tmp_path / "engine", SETTINGS, engine=LocalEngine(), **models)
    assert_close(content(tmp_path / "engine"), other)
    assert own.facts["run"]["reward"] is None
    assert other.facts["run"]["reward"]["fingerprint"] == reward_model.fingerprint


def test_facts_are_what_the_rows_depend_on(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    evaluate(model, [things], ["mem", "se", "tpt"], tmp_path / "run", SETTINGS, limit=2)
    with Store(tmp_path / "run", create=False) as store:
        assert store.facts("run") == {
            "model": {
                "name": "four-blocks",
                "fingerprint": model.fingerprint,
                "precision": "fp32",
                "logit_scale": 60.0,
            },
            "views": {
                "views": VIEWS,
                "size": 32,
                "scale": [0.08, 1.0],
                "ratio": [3 / 4, 4 / 3],
                "severity": 1.0,
                "adaptive": None,
            },
            "prompt": {"templates": ["a photo of a {}."], "context": None},
            "features": {"precision": "fp32"},
        }
        assert store.facts("dataset") == {
            "things": {
                "title": "Things",
                "family": "other",
                "augmix": False,
                "fingerprint": things.fingerprint,
                "images": 5,
                "classes": 5,
            }
        }
        tpt = asdict(methods.get("tpt"))
        for name in ("description", "memory", "orthogonality"):  # the last two where they are used
            del tpt[name]
        assert store.facts("recipe")["tpt on other"] == tpt
        assert list(store.facts("recipe")) == ["tpt on other", "se on other"]
        assert store.facts("classes") == {"things": list(CLASSES)}
        assert store.facts("root") == {"things": str(tmp_path / "things")}
        (invocation,) = store.facts("invocation").values()
        assert (invocation["images"], invocation["encoded"]) == (2, 2)
        assert {"command", "started", "seconds", "peak_memory", "usetta", "commit", "torch"} < set(invocation)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("images"), 5, family="fine-grained")


@pytest.fixture(scope="module")
def expected(model: CLIP, images: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The content of a run that does all at once."""
    out = tmp_path_factory.mktemp("run")
    evaluate(model, [images], FEW, out, SETTINGS, seeds=(0, 1))
    return content(out)


Step = dict[str, Any]
EXACT: dict[str, list[Step]] = {
    "other order of methods": [{"methods": FEW[::-1]}],
    "methods added later": [{"methods": FEW[3:]}, {"methods": FEW[2:]}, {"methods": FEW}],
    "seeds added later": [{"seeds": [1]}, {"seeds": [1, 0, 1]}],
    "many threads": [{"threads": 7}],
    "cache filled by other methods": [{"cache": "cache", "methods": ["se"], "out": "another"}, {"cache": "cache"}],
    "cache filled by all": [{"cache": "cache", "out": "another"}, {"cache": "cache"}],
    "cache filled by ttl": [{"cache": "cache", "methods": ["ttl"]}, {"cache": "cache"}],
    "a part of the images first": [{"limit": 2}, {"limit": 3}, {"limit": None}],
    "list in another order to go on": [{"limit": 3}, {"order": (4, 2, 0, 1, 3)}],
    "done already": [{}, {}],
}
CLOSE: dict[str, list[Step]] = {
    "all at once": [{"batch_size": 64}],
    "another batch size to go on": [{"batch_size": 1, "seeds": [0], "limit": 2}, {"batch_size": 3}],
    "the weak view alone at first": [{"methods": ["clip"]}, {"methods": FEW}],
    "the weak view alone at last, from the cache": [{"methods": FEW[1:], "cache": "cache"}, {"cache": "cache"}],
}
"""A matrix product of another shape rounds otherwise."""


def take(steps: Sequence[Step], model: CLIP, images: Dataset, folder: Path) -> None:
    for step in steps:
        options = {"methods": FEW, "seeds": (0, 1), "out": "run", "order": range(5), **step}
        dataset, out = listed(images, options.pop("order")), folder / options.pop("out")
        if "cache" in options:
            options["cache"] = folder / options["cache"]
        evaluate(model, [dataset], options.pop("methods"), out, SETTINGS, **options)


@pytest.mark.parametrize("steps", EXACT.values(), ids=EXACT)
def test_whatever_the_way_the_store_is_the_very_same(
    model: CLIP, images: Dataset, expected: Any, tmp_path: Path, steps: list[Step]
) -> None:
    take(steps, model, images, tmp_path)
    assert content(tmp_path / "run") == expected


@pytest.mark.parametrize("steps", CLOSE.values(), ids=CLOSE)
def test_other_batches_give_the_same_answers(
    model: CLIP, images: Dataset, expected: Any, tmp_path: Path, steps: list[Step]
) -> None:
    take(steps, model, images, tmp_path)
    assert_close(content(tmp_path / "run"), expected)


@pytest.mark.slow
def test_batch_size_changes_no_answer_of_any_method(model: CLIP, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 4)
    for batch_size in (1, 3, 4):
        evaluate(model, [dataset], TWELVE, tmp_path / str(batch_size), SETTINGS, batch_size=batch_size)
    assert_close(content(tmp_path / "1"), content(tmp_path / "4"))
    assert_close(content(tmp_path / "3"), content(tmp_path / "4"))


def test_datasets_can_be_added_later_and_share_a_run_whatever_their_order(model: CLIP, tmp_path: Path) -> None:
    """Three datasets, two of them with images of the same names, in one call and in three."""
    sets = [
        make_dataset(tmp_path / "a", 3, "a", "imagenet"),
        make_dataset(tmp_path / "b", 4, "b", "fine-grained"),
        make_dataset(tmp_path / "c", 2, "c"),
    ]
    evaluate(model, sets, ["clip", "tps"], tmp_path / "whole", SETTINGS, batch_size=2)
    for part in ([sets[2]], sets[1:], sets[::-1]):
        evaluate(model, part, ["clip", "tps"], tmp_path / "parts", SETTINGS, batch_size=2)
    whole = content(tmp_path / "whole")
    assert len(whole.rows) == 2 * (3 + 4 + 2)
    assert content(tmp_path / "parts") == whole
    rates = {name: facts["lr"] for name, facts in whole.facts["recipe"].items() if name.startswith("tps")}
    assert rates == {"tps on imagenet": 5e-3, "tps on fine-grained": 1e-3, "tps on other": 1e-3}
    assert {name: facts["augmix"] for name, facts in whole.facts["dataset"].items()} == {
        "a": False,
        "b": True,
        "c": False,
    }


def test_only_what_is_missing_is_computed(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    def encoded(names: Sequence[str], **options: Any) -> tuple[int, int, int]:
        counting = Counting(model)
        done = evaluate(counting, [things], names, tmp_path / "run", SETTINGS, batch_size=2, **options)
        assert done.encoded == done.images
        return counting.encoded, counting.hidden, done.rows

    assert encoded(["clip"]) == (5, 0, 5)
    assert encoded(["clip"]) == (0, 0, 0)
    assert encoded(["clip", "se", "use"], limit=2) == (2 * VIEWS, 0, 2 * 2)
    assert encoded(["clip", "se", "use"]) == (3 * VIEWS, 0, 3 * 2)
    assert encoded(["ttl"], limit=1) == (0, VIEWS, 1)
    assert encoded(["clip", "se"], seeds=(0, 1)) == (5 * VIEWS, 0, 10)
    assert encoded(["use", "clip", "se"], seeds=(1, 0)) == (5 * VIEWS, 0, 5)
    with Store(tmp_path / "run", create=False) as store:
        assert len(store.facts("invocation")) == 6  # one call had nothing to do


def test_with_the_cache_other_methods_encode_nothing(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    def encoded(names: Sequence[str], out: str, **options: Any) -> tuple[int, int, int]:
        counting = Counting(model)
        cache = tmp_path / "cache"
        done = evaluate(counting, [things], names, tmp_path / out, SETTINGS, cache=cache, batch_size=2, **options)
        return counting.encoded, counting.hidden, done.encoded

    assert encoded(["se"], "a") == (5 * VIEWS, 0, 5)
    assert encoded([name for name in TWELVE if name != "ttl"], "b") == (0, 0, 0)
    assert encoded(["clip"], "c") == (0, 0, 0)  # the weak view is among the others
    assert encoded(["tps"], "a") == (0, 0, 0)
    assert encoded(["ttl", "se"], "d") == (0, 5 * VIEWS, 5)
    assert encoded(["clip"], "e", seeds=[1]) == (5, 0, 5)
    assert encoded(["clip"], "f", seeds=[1]) == (0, 0, 0)
    assert encoded(["se"], "g", seeds=[1], limit=3) == (3 * VIEWS, 0, 3)
    assert encoded(["se"], "j", seeds=[2], limit=2) == (2 * VIEWS, 0, 2)
    assert encoded(["clip"], "k", seeds=[2]) == (3, 0, 3)  # of some images there is more than the weak view
    reward_model = Counting(four_blocks(seed=1))
    assert encoded(["rlcf"], "h", reward_model=reward_model) == (0, 0, 5)
    assert reward_model.encoded == 5 * VIEWS
    assert encoded(["rlcf"], "i", reward_model=reward_model) == (0, 0, 0)
    assert reward_model.encoded == 5 * VIEWS
    assert content(tmp_path / "h") == content(tmp_path / "i")


def test_the_cache_knows_images_models_and_views_apart(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    def encoded(used: CLIP, out: str, settings: EvalSettings = SETTINGS) -> int:
        return evaluate(used, [things], ["se"], tmp_path / out, settings, cache=tmp_path / "cache").encoded

    assert encoded(model, "a") == 5
    make_image(99).save(things[3].path)
    assert encoded(model, "b") == 1
    different = [
        one.image
        for one, other in zip(content(tmp_path / "a").rows, content(tmp_path / "b").rows, strict=True)
        if one != other
    ]
    assert different == [things.ids[3]]
    things[1].path.write_bytes(things[0].path.read_bytes())  # the same content under another id has other views
    assert encoded(model, "c") == 1
    assert encoded(model, "again") == 0
    assert encoded(four_blocks(seed=1), "d") == 5
    assert encoded(four_blocks().to(torch.bfloat16), "e") == 5
    assert encoded(model, "f", replace(SETTINGS, views=4)) == 5
    assert encoded(model, "g", replace(SETTINGS, augmix=True)) == 5
    evaluate(model, [things], ["se"], tmp_path / "without", replace(SETTINGS, augmix=True))
    assert content(tmp_path / "g") == content(tmp_path / "without")


Change = Callable[[Path], dict[str, Any]]


def _context(folder: Path) -> dict[str, Any]:
    save_context(folder / "context.safetensors", torch.full((4, 64), 0.01))
    return {"settings": replace(SETTINGS, context=folder / "context.safetensors")}


def _other_weights(folder: Path) -> dict[str, Any]:
    return {"model": four_blocks(seed=1)}


CHANGES: dict[str, tuple[Change, str]] = {
    "weights": (_other_weights, "model: fingerprint was"),
    "precision": (lambda folder: {"model": four_blocks().to(torch.bfloat16)}, "precision was 'fp32' and is now 'bf16"),
    "views": (lambda folder: {"settings": replace(SETTINGS, views=9)}, "views: views was 12 and is now 9"),
    "template": (
        lambda folder: {"settings": replace(SETTINGS, templates=("an image of the {}.",))},
        r"prompt: templates was \['a photo of a {}.'\] and is now \['an image of the {}.'\]",
    ),
    "context": (_context, "prompt: context was None and is now '[0-9a-f]{64}'"),
    "reward": (
        lambda folder: {"reward_model": four_blocks(seed=2)},
        "reward: it was None and is now {.*four-blocks",
    ),
    "augmix": (
        lambda folder: {"settings": replace(SETTINGS, augmix=True)},
        "dataset 'things': augmix was False and is now True",
    ),
    "labels": (lambda folder: {"labels": (1, 1, 2, 3, 4)}, "dataset 'things': fingerprint was"),
    "class names": (lambda folder: {"classes": ("dog", *CLASSES[1:])}, "dataset 'things': fingerprint was"),
    "classes": (lambda folder: {"classes": (*CLASSES, "dog")}, "classes was 5 and is now 6"),
    "images": (lambda folder: {"order": range(4)}, "images was 5 and is now 4"),
    "family": (lambda folder: {"family": "imagenet"}, "family was 'other' and is now 'imagenet'"),
    "features": (
        lambda folder: {"settings": replace(SETTINGS, half_features=True)},
        "precision was 'fp32' and is now 'fp16'",
    ),
    "adaptive": (
        lambda folder: {"settings": replace(SETTINGS, views="adaptive")},
        "adaptive was None and is now 0.5",
    ),
    "recipe": (lambda folder: {"gamma": 0.3}, "recipe 'use on other': gamma was 0.4 and is now 0.3"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_run_that_was_begun_with_something_else_is_refused_and_left_as_it_is(
    model: CLIP, things: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, message: str
) -> None:
    out, names, get = tmp_path / "run", ["use", "rlcf"], methods.get
    evaluate(model, [things], names, out, SETTINGS, limit=2)
    before = _dump(out)
    changed = change(tmp_path)
    described = {name: changed.pop(name) for name in ("labels", "classes", "family") if name in changed}
    other = replace(listed(things, changed.pop("order", range(5))), **described)
    used, settings = changed.pop("model", model), changed.pop("settings", SETTINGS)
    new = make_dataset(tmp_path / "new", 2, "new")
    if gamma := changed.pop("gamma", None):  # as a plug-in of another version has it
        monkeypatch.setattr(methods, "get", lambda name, **more: replace(get(name, **more), gamma=gamma))
    with pytest.raises(StoreError, match=message):
        evaluate(used, [new, other], [*names, "se"], out, settings, **changed)
    assert _dump(out) == before
    monkeypatch.undo()
    assert evaluate(model, [things], names, out, SETTINGS).rows == 6


def _dump(out: Path) -> list[str]:
    """All that the database holds, as text."""
    with closing(sqlite3.connect(out / FILE)) as db:
        return list(db.iterdump())


def test_a_reward_model_can_join_with_the_first_method_that_asks_it(
    model: CLIP, things: Dataset, tmp_path: Path
) -> None:
    reward_model = four_blocks(seed=2)
    evaluate(model, [things], ["se"], tmp_path, SETTINGS, limit=1)
    evaluate(model, [things], ["rlcf"], tmp_path, SETTINGS, limit=1, reward_model=reward_model)
    evaluate(model, [things], ["se"], tmp_path, SETTINGS, limit=2)
    with pytest.raises(StoreError, match="reward: it was {.*} and is now None"):
        evaluate(model, [things], ["rlcf"], tmp_path, SETTINGS, limit=2)


def test_a_learned_context_is_tuned_with_its_own_template(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "context.safetensors"
    save_context(file, model.text.embed(model.text.tokenize(["my cat"]))[0, 1:2], {"template": "my {}."})
    evaluate(model, [things], ["tpt", "clip"], tmp_path / "learned", replace(SETTINGS, context=file))
    evaluate(model, [things], ["tpt", "clip"], tmp_path / "words", replace(SETTINGS, templates=("my {}.",)))
    learned, words = content(tmp_path / "learned"), content(tmp_path / "words")
    assert learned.facts["run"]["prompt"]["templates"] == ["my {}."]
    assert [row.confidence for row in learned.rows] == pytest.approx([row.confidence for row in words.rows], abs=1e-5)
    evaluate(model, [things], ["clip"], tmp_path / "ensemble", replace(SETTINGS, templates=("ensemble", "a {}.")))
    assert len(content(tmp_path / "ensemble").facts["run"]["prompt"]["templates"]) == 8


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"labels": None}, "the images of things have no labels, so nothing can be measured"),
    "no methods": ({"methods": []}, "no methods given"),
    "no seeds": ({"seeds": []}, "no seeds given"),
    "no order seeds": ({"order_seeds": []}, "no order seeds given"),
    "nothing to load": ({"engine": LocalEngine()}, "workers of an engine load their models themselves: pass load and"),
    "no datasets": ({"datasets": []}, "no datasets given"),
    "no images": ({"limit": 0}, "limit must be at least 1"),
    "no threads": ({"threads": 0}, "threads"),
    "no batch": ({"batch_size": 0}, "batch_size"),
    "no views": ({"settings": EvalSettings(views=0), "methods": ["clip"]}, "views must be a number from 1 to 1024"),
    "two of a name": ({"twins": True}, "two different datasets are called things; evaluate them in separate runs"),
    "unknown method": ({"methods": ["se", "ues"]}, "unknown method 'ues'; did you mean"),
    "one view": ({"settings": EvalSettings(views=1)}, "method 'se' compares views, so it needs at least 2, not 1"),
    "ttl on a resnet": ({"model": disturbed(TINY_RESNET), "methods": ["se", "ttl"]}, "which TTL needs"),
    "ensemble": (
        {"settings": EvalSettings(templates=("ensemble",)), "methods": ["se", "tpt"]},
        "method 'tpt' tunes the prompt, but .* an ensemble of templates has no single context; give one template",
    ),
    "template without a name": ({"settings": EvalSettings(templates=("a photo.",))}, "{}"),
    "absent context": ({"settings": EvalSettings(context=Path("nowhere.pth"))}, "nowhere.pth does not exist"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_opened_or_written(
    model: CLIP,
    things: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr("usetta.pipeline.open_image", never)
    monkeypatch.setattr("usetta.pipeline.file_digest", never)
    out = tmp_path / "run"
    options = {"model": model, "datasets": [things], "methods": ["se"], "settings": SETTINGS, "out": out, **options}
    if "labels" in options:
        options["datasets"] = [replace(things, labels=options.pop("labels"))]
    if options.pop("twins", False):
        options["datasets"] = [things, listed(things, range(3))]
    with pytest.raises(Exception, match=message) as caught:
        evaluate(**options, cache=tmp_path / "cache")
    assert not isinstance(caught.value, AssertionError)
    assert not out.exists()


def test_the_same_dataset_method_and_seed_count_once(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    done = evaluate(model, [things, things], ["mem", "tpt", "tpt:steps=1"], tmp_path, SETTINGS, seeds=(3, 3), limit=2)
    assert (done.images, done.rows) == (2, 2)
    assert content(tmp_path).rows[0].method == "tpt"


def test_another_dataset_of_the_same_name_and_content_is_the_same(model: CLIP, tmp_path: Path) -> None:
    """A dataset may be moved, and its list be written in another order."""
    old, moved = make_dataset(tmp_path / "old"), make_dataset(tmp_path / "moved")
    evaluate(model, [old], ["se"], tmp_path / "run", SETTINGS, limit=2)
    done = evaluate(model, [listed(moved, (4, 3, 2, 1, 0))], ["se"], tmp_path / "run", SETTINGS)
    assert done.rows == 3
    with Store(tmp_path / "run", create=False) as store:
        assert store.facts("root") == {"things": str(tmp_path / "moved")}
    with pytest.raises(DataError, match="two different datasets are called things"):
        evaluate(model, [old, listed(old, (0, 1))], ["se"], tmp_path / "run", SETTINGS)


def test_settings_that_diverge_stop_with_a_clear_error_and_leave_what_there_was(
    model: CLIP, things: Dataset, tmp_path: Path
) -> None:
    evaluate(model, [things], ["se", "use"], tmp_path, SETTINGS, batch_size=2)
    before = content(tmp_path)
    with pytest.raises(ValueError, match="'tpt:lr=1e\\+30' diverged"):
        evaluate(model, [things], ["se", "clip", "tpt:lr=1e30"], tmp_path, SETTINGS, batch_size=2)
    after = content(tmp_path)
    assert after.rows == before.rows
    assert evaluate(model, [things], ["clip"], tmp_path, SETTINGS).rows == 5


def view_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("usetta-views")]


class Failing(Counting):
    """A model that fails after so many views."""

    def __init__(self, model: CLIP, after: int) -> None:
        super().__init__(model)
        self._after = after

    def encode_images(self, pixels: Tensor) -> Tensor:
        if self.encoded >= self._after:
            raise RuntimeError("the tower fell over")
        return super().encode_images(pixels)


def test_what_was_computed_before_an_error_stays_and_no_thread_is_left_behind(model: CLIP, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 30)
    with pytest.raises(RuntimeError, match="the tower fell over") as caught:
        evaluate(Failing(model, 8 * VIEWS), [dataset], ["se"], tmp_path / "run", SETTINGS, batch_size=3)
    assert [row.image for row in content(tmp_path / "run").rows] == sorted(dataset.ids[:6])
    assert not view_threads(), caught.traceback
    done = evaluate(model, [dataset], ["se"], tmp_path / "run", SETTINGS, batch_size=3)
    assert done.rows == 24
    evaluate(model, [dataset], ["se"], tmp_path / "whole", SETTINGS, batch_size=3)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_an_interruption_leaves_no_thread_behind_and_what_was_written(model: CLIP, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 30)
    dataset[4].path.write_bytes(b"")

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        evaluate(model, [dataset], ["se"], tmp_path / "run", SETTINGS, batch_size=3, log=interrupt)
    assert not view_threads(), caught.traceback
    assert [row.image for row in content(tmp_path / "run").rows] == sorted(dataset.ids[i] for i in (0, 1, 2, 3, 5))


def test_what_is_done_is_reported(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    (tmp_path / "things" / things.ids[2]).write_bytes(b"")
    other = make_dataset(tmp_path / "other", 2, "other")
    lines: list[str] = []
    options = {"seeds": (0, 4), "batch_size": 2, "log": lines.append}
    done = evaluate(model, [things, other], ["clip", "se"], tmp_path / "run", SETTINGS, **options)  # type: ignore[arg-type]
    rows = content(tmp_path / "run").rows

    def accuracy(name: str, seed: int, method: str) -> str:
        right = [
            row.label == row.prediction for row in rows if (row.dataset, row.seed, row.method) == (name, seed, method)
        ]
        return f"{method} {100 * np.mean(right):.1f} %"

    ends = {
        (name, seed): f"{name}, seed {seed}: {accuracy(name, seed, 'clip')}, {accuracy(name, seed, 'se')}"
        for name in ("things", "other")
        for seed in (0, 4)
    }
    empty = f"things: {things.ids[2]}: file is empty"
    assert lines == [empty, ends["things", 0], empty, ends["things", 4], ends["other", 0], ends["other", 4]]
    assert done.failed == 1
    lines.clear()
    evaluate(model, [things], ["clip", "se"], tmp_path / "run", SETTINGS, log=lines.append)
    assert lines == [empty, f"things, seed 0: {accuracy('things', 0, 'clip')}, {accuracy('things', 0, 'se')}"]


def test_where_no_image_can_be_read_there_are_no_answers(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    for image in things:
        image.path.write_bytes(b"")
    lines: list[str] = []
    done = evaluate(model, [things], ["se"], tmp_path / "run", SETTINGS, log=lines.append)
    assert (done.images, done.encoded, done.rows, done.failed) == (5, 0, 0, 5)
    assert lines[-1] == "things, seed 0: no answers"


def test_the_chosen_images_are_spread_and_those_of_any_smaller_number_are_among_them() -> None:
    assert list(runner._spread(10, None)) == list(range(10))
    assert list(runner._spread(10, 12)) == list(range(10))
    assert list(runner._spread(10, 3)) == [0, 4, 8]
    for n in (8, 97):
        samples = [set(runner._spread(n, chosen)) for chosen in range(1, n + 1)]
        assert [len(sample) for sample in samples] == list(range(1, n + 1))
        assert all(some < more for some, more in itertools.pairwise(samples))
    assert list(runner._spread(1000, 500)) == list(range(0, 1000, 2))


def test_prompts_of_one_dataset_are_held_at_a_time(
    model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the graphs of fifteen datasets would be held at once."""
    tuned: weakref.WeakSet[ClassPrompts] = weakref.WeakSet()
    counts: list[int] = []
    text_features = ClassPrompts.features

    def noting(prompts: ClassPrompts, *arguments: Any) -> Tensor:
        tuned.add(prompts)
        return text_features(prompts, *arguments)

    def count(_: str) -> None:
        gc.collect()
        counts.append(len(tuned))

    monkeypatch.setattr(ClassPrompts, "features", noting)
    sets = [make_dataset(tmp_path / name, 4, name) for name in "abc"]
    evaluate(model, sets, ["tpt"], tmp_path / "run", SETTINGS, batch_size=2, log=count)
    assert counts == [1, 1, 1]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(
    model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image under four hundred names, and a tower that is not looked at here."""
    monkeypatch.setattr(writing, "_SECONDS", 0.0)  # how many images wait to be saved depends on the machine
    make_image(0, (64, 64)).save(tmp_path / "image.png")
    root = tmp_path / "images"
    root.mkdir()
    for i in range(400):
        os.link(tmp_path / "image.png", root / f"{i:04}.png")

    class Blind(Counting):
        def encode_images(self, pixels: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.arange(len(pixels)), 32).float()

    def peak(images: int) -> int:
        ids = tuple(f"{i:04}.png" for i in range(images))
        dataset = Dataset("things", "Things", "other", CLASSES, ids, (0,) * images, root, "generated")
        tracemalloc.start()
        evaluate(Blind(model), [dataset], ["se"], tmp_path / str(images), EvalSettings(views=4))
        _, found = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    peak(20)  # what is imported and remembered on the way
    few, many = peak(50), peak(400)
    assert many < few + 700_000
