"""Runs: their rows are what the recipes say about the views, and nothing but the question decides them."""

import gc
import os
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from usetta.evaluate import runner, work
from usetta.evaluate.runner import EvalSettings, EvalSummary, evaluate
from usetta.evaluate.store import FILE, ResultRow, Store, StoreError
from usetta.images import open_image
from usetta.methods.recipe import Hidden, Recipe, Result, Reward, run
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

FEW = ("clip", "se", "use", "ttl", "rlcf")
"""Methods that differ in what they ask for: the weak view, all views, the prompt, hidden states, a judge."""
SETTING = EvalSettings(views=VIEWS)


def answers_of(model: CLIP, dataset: Dataset, image: int, seed: int, reward: CLIP | None = None) -> dict[str, Result]:
    """What the twelve methods say about an image, step by step and one by one."""
    each = dataset[image]
    recipe = ViewRecipe(views=VIEWS, size=32, augmix=dataset.family == "fine-grained", seed=seed)
    pixels = make_views(open_image(each.path, for_benchmark=True), each.id, recipe)

    def features(tower: CLIP) -> Tensor:
        fitting, size = pixels, tower.image_size
        if size != 32:
            fitting = interpolate(pixels / 255, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
        encoded = torch.cat([tower.encode_images(fitting[:1]), tower.encode_images(fitting[1:])])
        return encoded[None]

    prompts, judge = ClassPrompts(model.text, dataset.classes), reward or model
    judged = Reward(features(judge), ClassPrompts(judge.text, dataset.classes).features())
    hidden = Hidden(model.last_blocks(), [model.hidden_states(pixels)])
    return {
        name: run(
            methods.get(name, family=dataset.family),
            features(model),
            prompts,
            model.logit_scale,
            reward=judged if name == "rlcf" else None,
            hidden=hidden if name == "ttl" else None,
        )
        for name in TWELVE
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
    assert 0 < row.seconds < 60


@pytest.mark.parametrize("family", ["fine-grained", "imagenet"])
def test_rows_are_what_the_recipes_say_about_the_views(model: CLIP, tmp_path: Path, family: Any) -> None:
    dataset = make_dataset(tmp_path / "images", 4, family=family)
    done = evaluate(model, [dataset], TWELVE, tmp_path / "run", SETTING, seeds=(0, 1), batch_size=3)
    assert replace(done, seconds=0) == EvalSummary(images=8, encoded=8, rows=96, bad=0, seconds=0)
    with Store(tmp_path / "run", create=False) as store:
        rows = {(row.image, row.seed, row.method): row for row in store.rows()}
        assert len(rows) == 4 * 2 * 12
        for number, image in enumerate(dataset):
            for seed in (0, 1):
                answers = answers_of(model, dataset, number, seed)
                assert image.label is not None
                for name, answer in answers.items():
                    check_row(rows[image.id, seed, name], answer, image.label)
                seen = store.shown_views(dataset.name, image.id, seed)
                assert seen is not None
                entropies, labels = answers["se"].entropies[0], answers["se"].view_labels[0]
                expected = [0, *(1 + entropies[1:].argsort()[:3]).tolist()]
                assert [(view.number, view.label) for view in seen.views] == [(i, labels[i]) for i in expected]
                assert [view.entropy for view in seen.views] == pytest.approx(entropies[expected].tolist(), abs=1e-5)
        answered = {name: {row.prediction for row in rows.values() if row.method == name} for name in TWELVE}
    assert all(len(each) > 1 for each in answered.values()), "answers must differ, else little was tested"


def test_another_model_judges_where_one_is_given(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    judge = disturbed(TINY_RESNET)  # of another size of images, and another dimension
    evaluate(model, [things], ["rlcf", "se"], tmp_path / "run", SETTING, reward=judge, batch_size=2)
    evaluate(model, [things], ["rlcf", "se"], tmp_path / "self", SETTING, batch_size=2)
    own, other = content(tmp_path / "self"), content(tmp_path / "run")
    same = {method: [a == b for a, b in zip(own.rows, other.rows, strict=True) if a.method == method] for method in FEW}
    assert all(same["se"])
    assert not all(same["rlcf"])
    rows = [row for row in other.rows if row.method == "rlcf"]
    for row in rows:
        number = things.ids.index(row.image)
        check_row(replace(row, seconds=1), answers_of(model, things, number, 0, judge)["rlcf"], number)
    assert own.facts["run"]["reward"] is None
    assert other.facts["run"]["reward"]["fingerprint"] == judge.fingerprint


def test_facts_tell_what_the_rows_depend_on(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    evaluate(model, [things], ["mem", "se", "tpt"], tmp_path / "run", SETTING, images=2)
    with Store(tmp_path / "run", create=False) as store:
        assert store.facts("run") == {
            "model": {
                "name": "four-blocks",
                "fingerprint": model.fingerprint,
                "precision": "fp32",
                "logit_scale": 60.0,
            },
            "views": {"views": VIEWS, "size": 32, "scale": [0.08, 1.0], "ratio": [3 / 4, 4 / 3], "severity": 1.0},
            "prompt": {"templates": ["a photo of a {}."], "context": None},
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
        del tpt["description"]
        assert store.facts("recipe")["tpt on other"] == tpt
        assert list(store.facts("recipe")) == ["tpt on other", "se on other"]
        assert store.facts("classes") == {"things": list(CLASSES)}
        assert store.facts("root") == {"things": str(tmp_path / "things")}
        (told,) = store.facts("invocation").values()
        assert (told["images"], told["encoded"]) == (2, 2)
        assert {"command", "started", "seconds", "peak_memory", "usetta", "commit", "torch"} < set(told)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("images"), 5, family="fine-grained")


@pytest.fixture(scope="module")
def expected(model: CLIP, images: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run says that does all at once, in batches of 2."""
    out = tmp_path_factory.mktemp("run")
    evaluate(model, [images], FEW, out, SETTING, seeds=(0, 1), batch_size=2)
    return content(out)


Step = dict[str, Any]
EXACT: dict[str, list[Step]] = {
    "other order of methods": [{"methods": FEW[::-1]}],
    "methods added later": [{"methods": FEW[3:]}, {"methods": FEW[2:]}, {"methods": FEW}],
    "seeds added later": [{"seeds": [1]}, {"seeds": [1, 0, 1]}],
    "one thread": [{"threads": 1}],
    "many threads": [{"threads": 7}],
    "cache": [{"cache": "cache"}],
    "cache filled by other methods": [{"cache": "cache", "methods": ["se"], "out": "another"}, {"cache": "cache"}],
    "cache filled by all": [{"cache": "cache", "out": "another"}, {"cache": "cache"}],
    "cache filled by ttl": [{"cache": "cache", "methods": ["ttl"]}, {"cache": "cache"}],
    "done already": [{}, {}],
}
CLOSE: dict[str, list[Step]] = {
    "one by one": [{"batch_size": 1}],
    "all at once": [{"batch_size": 64}],
    "another batch size to go on": [{"batch_size": 1, "seeds": [0], "images": 2}, {"batch_size": 3}],
    "a part of the images first": [{"images": 2}, {"images": 3}, {"images": None}],
    "list in another order": [{"order": (4, 2, 0, 1, 3)}],
    "list in another order to go on": [{"images": 3}, {"order": (4, 2, 0, 1, 3)}],
    "the weak view alone at first": [{"methods": ["clip"]}, {"methods": FEW}],
    "the weak view alone at last, from the cache": [{"methods": FEW[1:], "cache": "cache"}, {"cache": "cache"}],
}
"""A matrix product of another shape rounds otherwise."""


def take(steps: Sequence[Step], model: CLIP, images: Dataset, folder: Path) -> None:
    for step in steps:
        options = {"methods": FEW, "seeds": (0, 1), "batch_size": 2, "out": "run", "order": range(5), **step}
        dataset, out = listed(images, options.pop("order")), folder / options.pop("out")
        if "cache" in options:
            options["cache"] = folder / options["cache"]
        evaluate(model, [dataset], options.pop("methods"), out, SETTING, **options)


@pytest.mark.parametrize("steps", EXACT.values(), ids=EXACT)
def test_the_same_batches_give_the_very_same_store(
    model: CLIP, images: Dataset, expected: Any, tmp_path: Path, steps: list[Step]
) -> None:
    take(steps, model, images, tmp_path)
    found = content(tmp_path / "run")
    assert found == expected


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
        evaluate(model, [dataset], TWELVE, tmp_path / str(batch_size), SETTING, batch_size=batch_size)
    assert_close(content(tmp_path / "1"), content(tmp_path / "4"))
    assert_close(content(tmp_path / "3"), content(tmp_path / "4"))


def test_data_sets_can_be_added_later_and_share_a_run_whatever_their_order(model: CLIP, tmp_path: Path) -> None:
    """Three datasets, two of them with images of the same names, in one call and in three."""
    sets = [
        make_dataset(tmp_path / "a", 3, "a", "imagenet"),
        make_dataset(tmp_path / "b", 4, "b", "fine-grained"),
        make_dataset(tmp_path / "c", 2, "c"),
    ]
    evaluate(model, sets, ["clip", "tps"], tmp_path / "whole", SETTING, batch_size=2)
    for some in ([sets[2]], sets[1:], sets[::-1]):
        evaluate(model, some, ["clip", "tps"], tmp_path / "parts", SETTING, batch_size=2)
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
        done = evaluate(counting, [things], names, tmp_path / "run", SETTING, batch_size=2, **options)
        assert done.encoded == done.images
        return counting.encoded, counting.hidden, done.rows

    assert encoded(["clip"]) == (5, 0, 5)
    assert encoded(["clip"]) == (0, 0, 0)
    assert encoded(["clip", "se", "use"], images=2) == (2 * VIEWS, 0, 2 * 2)
    assert encoded(["clip", "se", "use"]) == (3 * VIEWS, 0, 3 * 2)
    assert encoded(["ttl"], images=1) == (0, VIEWS, 1)
    assert encoded(["clip", "se"], seeds=(0, 1)) == (5 * VIEWS, 0, 10)
    assert encoded(["use", "clip", "se"], seeds=(1, 0)) == (5 * VIEWS, 0, 5)
    with Store(tmp_path / "run", create=False) as store:
        assert len(store.facts("invocation")) == 6  # one call had nothing to do


def test_with_the_cache_other_methods_encode_nothing(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    def encoded(names: Sequence[str], out: str, **options: Any) -> tuple[int, int, int]:
        counting = Counting(model)
        cache = tmp_path / "cache"
        done = evaluate(counting, [things], names, tmp_path / out, SETTING, cache=cache, batch_size=2, **options)
        return counting.encoded, counting.hidden, done.encoded

    assert encoded(["se"], "a") == (5 * VIEWS, 0, 5)
    assert encoded([name for name in TWELVE if name != "ttl"], "b") == (0, 0, 0)
    assert encoded(["clip"], "c") == (0, 0, 0)  # the weak view is among the others
    assert encoded(["tps"], "a") == (0, 0, 0)
    assert encoded(["ttl", "se"], "d") == (0, 5 * VIEWS, 5)
    assert encoded(["clip"], "e", seeds=[1]) == (5, 0, 5)
    assert encoded(["clip"], "f", seeds=[1]) == (0, 0, 0)
    assert encoded(["se"], "g", seeds=[1], images=3) == (3 * VIEWS, 0, 3)
    assert encoded(["se"], "j", seeds=[2], images=2) == (2 * VIEWS, 0, 2)
    assert encoded(["clip"], "k", seeds=[2]) == (3, 0, 3)  # of some images there is more than the weak view
    judge = Counting(four_blocks(seed=1))
    assert encoded(["rlcf"], "h", reward=judge) == (0, 0, 5)
    assert judge.encoded == 5 * VIEWS
    assert encoded(["rlcf"], "i", reward=judge) == (0, 0, 0)
    assert judge.encoded == 5 * VIEWS
    assert content(tmp_path / "h") == content(tmp_path / "i")


def test_the_cache_knows_images_models_and_views_apart(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    def encoded(used: CLIP, out: str, setting: EvalSettings = SETTING) -> int:
        return evaluate(used, [things], ["se"], tmp_path / out, setting, cache=tmp_path / "cache").encoded

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
    assert encoded(model, "f", replace(SETTING, views=4)) == 5
    assert encoded(model, "g", replace(SETTING, augmix=True)) == 5
    evaluate(model, [things], ["se"], tmp_path / "without", replace(SETTING, augmix=True))
    assert content(tmp_path / "g") == content(tmp_path / "without")


@pytest.fixture
def registered() -> Iterator[Recipe]:
    recipe = Recipe("own", "a recipe of our own", gamma=0.2)
    methods.register(recipe)
    yield recipe
    methods.METHODS.unregister("own")


Change = Callable[[Path], dict[str, Any]]


def _context(folder: Path) -> dict[str, Any]:
    save_context(folder / "context.safetensors", torch.full((4, 64), 0.01))
    return {"setting": replace(SETTING, context=folder / "context.safetensors")}


def _registered(folder: Path) -> dict[str, Any]:
    methods.METHODS.unregister("own")
    methods.register(Recipe("own", "a recipe of our own", gamma=0.3))
    return {}


def _other_weights(folder: Path) -> dict[str, Any]:
    return {"model": four_blocks(seed=1)}


CHANGES: dict[str, tuple[Change, str]] = {
    "weights": (_other_weights, "another model: fingerprint was"),
    "precision": (lambda folder: {"model": four_blocks().to(torch.bfloat16)}, "precision was 'fp32' and is 'bf16"),
    "views": (lambda folder: {"setting": replace(SETTING, views=9)}, "another views: views was 12 and is 9"),
    "template": (
        lambda folder: {"setting": replace(SETTING, templates=("an image of the {}.",))},
        r"another prompt: templates was \['a photo of a {}.'\] and is \['an image of the {}.'\]",
    ),
    "context": (_context, "another prompt: context was None and is '[0-9a-f]{64}'"),
    "reward": (lambda folder: {"reward": four_blocks(seed=2)}, "another reward: it was None and is {.*four-blocks"),
    "augmix": (
        lambda folder: {"setting": replace(SETTING, augmix=True)},
        "another dataset 'things': augmix was False and is True",
    ),
    "labels": (lambda folder: {"labels": (1, 1, 2, 3, 4)}, "another dataset 'things': fingerprint was"),
    "class names": (lambda folder: {"classes": ("dog", *CLASSES[1:])}, "another dataset 'things': fingerprint was"),
    "classes": (lambda folder: {"classes": (*CLASSES, "dog")}, "classes was 5 and is 6"),
    "images": (lambda folder: {"order": range(4)}, "images was 5 and is 4"),
    "family": (lambda folder: {"family": "imagenet"}, "family was 'other' and is 'imagenet'"),
    "recipe": (_registered, "another recipe 'own on other': gamma was 0.2 and is 0.3"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_run_that_was_begun_with_something_else_is_refused_and_left_as_it_is(
    model: CLIP, things: Dataset, tmp_path: Path, registered: Recipe, change: Change, message: str
) -> None:
    out, names = tmp_path / "run", ["own", "rlcf"]
    evaluate(model, [things], names, out, SETTING, images=2)
    before = _bytes(out)
    changed = change(tmp_path)
    described = {name: changed.pop(name) for name in ("labels", "classes", "family") if name in changed}
    other = replace(listed(things, changed.pop("order", range(5))), **described)
    used, setting = changed.pop("model", model), changed.pop("setting", SETTING)
    new = make_dataset(tmp_path / "new", 2, "new")
    with pytest.raises(StoreError, match=message):
        evaluate(used, [new, other], [*names, "se"], out, setting, **changed)
    assert _bytes(out) == before
    methods.METHODS.unregister("own")
    methods.register(registered)
    assert evaluate(model, [things], names, out, SETTING).rows == 6


def _bytes(out: Path) -> list[str]:
    """All that the database holds, as text."""
    with Store(out, create=False) as store:
        return list(store._db.iterdump())


def test_a_judge_can_join_with_the_first_method_that_asks_it(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    judge = four_blocks(seed=2)
    evaluate(model, [things], ["se"], tmp_path, SETTING, images=1)
    evaluate(model, [things], ["rlcf"], tmp_path, SETTING, images=1, reward=judge)
    evaluate(model, [things], ["se"], tmp_path, SETTING, images=2)
    with pytest.raises(StoreError, match="another reward: it was {.*} and is None"):
        evaluate(model, [things], ["rlcf"], tmp_path, SETTING, images=2)


def test_a_learned_context_is_tuned_with_its_own_template(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "context.safetensors"
    save_context(file, model.text.embed(model.text.tokenize(["my cat"]))[0, 1:2], {"template": "my {}."})
    evaluate(model, [things], ["tpt", "clip"], tmp_path / "learned", replace(SETTING, context=file))
    evaluate(model, [things], ["tpt", "clip"], tmp_path / "words", replace(SETTING, templates=("my {}.",)))
    learned, words = content(tmp_path / "learned"), content(tmp_path / "words")
    assert learned.facts["run"]["prompt"]["templates"] == ["my {}."]
    assert [row.confidence for row in learned.rows] == pytest.approx([row.confidence for row in words.rows], abs=1e-5)
    evaluate(model, [things], ["clip"], tmp_path / "ensemble", replace(SETTING, templates=("ensemble", "a {}.")))
    assert len(content(tmp_path / "ensemble").facts["run"]["prompt"]["templates"]) == 8


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"labels": None}, "the images of things have no labels, so nothing can be measured"),
    "no methods": ({"methods": []}, "at least one method"),
    "no seeds": ({"seeds": []}, "at least one seed"),
    "no datasets": ({"datasets": []}, "at least one dataset"),
    "no images": ({"images": 0}, "number of images must be at least 1"),
    "no threads": ({"threads": 0}, "threads"),
    "no batch": ({"batch_size": 0}, "batch_size"),
    "no views": ({"setting": EvalSettings(views=0), "methods": ["clip"]}, "views must be at least 1"),
    "two of a name": ({"twins": True}, "two different datasets are called things; evaluate them in two runs"),
    "unknown method": ({"methods": ["se", "ues"]}, "unknown method 'ues'; did you mean"),
    "one view": ({"setting": EvalSettings(views=1)}, "method 'se' compares views, so it needs at least 2, not 1"),
    "ttl on a resnet": ({"model": disturbed(TINY_RESNET), "methods": ["se", "ttl"]}, "which TTL needs"),
    "ensemble": (
        {"setting": EvalSettings(templates=("ensemble",)), "methods": ["se", "tpt"]},
        "method 'tpt' tunes the prompt, but .* an ensemble of templates has no single context; give one template",
    ),
    "template without a name": ({"setting": EvalSettings(templates=("a photo.",))}, "{}"),
    "absent context": ({"setting": EvalSettings(context=Path("nowhere.pth"))}, "nowhere.pth does not exist"),
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

    monkeypatch.setattr(work, "open_image", never)
    monkeypatch.setattr(work, "file_digest", never)
    out = tmp_path / "run"
    options = {"model": model, "datasets": [things], "methods": ["se"], "setting": SETTING, "out": out, **options}
    if "labels" in options:
        options["datasets"] = [replace(things, labels=options.pop("labels"))]
    if options.pop("twins", False):
        options["datasets"] = [things, listed(things, range(3))]
    with pytest.raises(Exception, match=message) as caught:
        evaluate(**options, cache=tmp_path / "cache")
    assert not isinstance(caught.value, AssertionError)
    assert not out.exists()


def test_the_same_data_set_method_and_seed_count_once(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    done = evaluate(model, [things, things], ["mem", "tpt", "tpt:steps=1"], tmp_path, SETTING, seeds=(3, 3), images=2)
    assert (done.images, done.rows) == (2, 2)
    assert content(tmp_path).rows[0].method == "tpt"


def test_another_data_set_of_the_same_name_and_content_is_the_same(model: CLIP, tmp_path: Path) -> None:
    """A dataset may be moved, and its list be written in another order."""
    here, there = make_dataset(tmp_path / "here"), make_dataset(tmp_path / "there")
    evaluate(model, [here], ["se"], tmp_path / "run", SETTING, images=2)
    done = evaluate(model, [listed(there, (4, 3, 2, 1, 0))], ["se"], tmp_path / "run", SETTING)
    assert done.rows == 3
    with Store(tmp_path / "run", create=False) as store:
        assert store.facts("root") == {"things": str(tmp_path / "there")}
    with pytest.raises(DataError, match="two different datasets are called things"):
        evaluate(model, [here, listed(here, (0, 1))], ["se"], tmp_path / "run", SETTING)


def test_settings_that_diverge_stop_with_a_clear_error_and_leave_what_there_was(
    model: CLIP, things: Dataset, tmp_path: Path
) -> None:
    evaluate(model, [things], ["se", "use"], tmp_path, SETTING, batch_size=2)
    before = content(tmp_path)
    with pytest.raises(ValueError, match="'tpt:lr=1e\\+30' tuned until nothing but NaN was left"):
        evaluate(model, [things], ["se", "clip", "tpt:lr=1e30"], tmp_path, SETTING, batch_size=2)
    after = content(tmp_path)
    assert after.rows == before.rows
    assert evaluate(model, [things], ["clip"], tmp_path, SETTING).rows == 5


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
        evaluate(Failing(model, 8 * VIEWS), [dataset], ["se"], tmp_path / "run", SETTING, batch_size=3)
    assert [row.image for row in content(tmp_path / "run").rows] == sorted(dataset.ids[:6])
    assert not [each for each in threading.enumerate() if each.name.startswith("usetta-views")], caught.traceback
    done = evaluate(model, [dataset], ["se"], tmp_path / "run", SETTING, batch_size=3)
    assert done.rows == 24
    evaluate(model, [dataset], ["se"], tmp_path / "whole", SETTING, batch_size=3)
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_an_interruption_leaves_no_thread_behind_and_what_was_written(model: CLIP, tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "images", 30)
    dataset[4].path.write_bytes(b"")

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        evaluate(model, [dataset], ["se"], tmp_path / "run", SETTING, batch_size=3, say=interrupt)
    assert not [each for each in threading.enumerate() if each.name.startswith("usetta-views")], caught.traceback
    assert [row.image for row in content(tmp_path / "run").rows] == sorted(dataset.ids[i] for i in (0, 1, 2, 3, 5))


def test_what_is_done_is_told(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    (tmp_path / "things" / things.ids[2]).write_bytes(b"")
    other = make_dataset(tmp_path / "other", 2, "other")
    said: list[str] = []
    done = evaluate(
        model, [things, other], ["clip", "se"], tmp_path / "run", SETTING, seeds=(0, 4), batch_size=2, say=said.append
    )
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
    assert said == [empty, ends["things", 0], empty, ends["things", 4], ends["other", 0], ends["other", 4]]
    assert done.bad == 1
    said.clear()
    evaluate(model, [things], ["clip", "se"], tmp_path / "run", SETTING, say=said.append)
    assert said == [empty, f"things, seed 0: {accuracy('things', 0, 'clip')}, {accuracy('things', 0, 'se')}"]


def test_where_no_image_can_be_read_there_are_no_answers(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    for each in things:
        each.path.write_bytes(b"")
    said: list[str] = []
    done = evaluate(model, [things], ["se"], tmp_path / "run", SETTING, say=said.append)
    assert (done.images, done.encoded, done.rows, done.bad) == (5, 0, 0, 5)
    assert said[-1] == "things, seed 0: no answers"


def test_the_chosen_images_are_spread_and_those_of_half_as_many_are_among_them() -> None:
    assert list(runner._spread(10, None)) == list(range(10))
    assert list(runner._spread(10, 12)) == list(range(10))
    assert list(runner._spread(10, 3)) == [0, 3, 6]
    for n in (8, 97, 1000):
        for chosen in (1, 2, 3, 4):
            some, more = set(runner._spread(n, chosen)), set(runner._spread(n, 2 * chosen))
            assert (len(some), len(more)) == (chosen, 2 * chosen)
            assert some < more
            assert max(more) < n


def test_prompts_go_with_the_last_task_of_their_data_set(model: CLIP, tmp_path: Path) -> None:
    """Else the graphs of fifteen datasets would be held at once."""
    alive: weakref.WeakSet[ClassPrompts] = weakref.WeakSet()
    counts: list[int] = []

    def watched(*arguments: Any) -> ClassPrompts:
        prompts = ClassPrompts(*arguments)
        alive.add(prompts)
        return prompts

    def count(_: str) -> None:
        gc.collect()
        counts.append(len(alive))

    sets = [make_dataset(tmp_path / name, 8, name) for name in "abc"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "ClassPrompts", watched)
        evaluate(model, sets, ["tpt"], tmp_path / "run", SETTING, batch_size=2, threads=1, say=count)
    assert counts == [3, 2, 1]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(model: CLIP, tmp_path: Path) -> None:
    """One image under two thousand names, and a tower that is not looked at here."""
    make_image(0, (64, 64)).save(tmp_path / "image.png")
    root = tmp_path / "images"
    root.mkdir()
    for i in range(2000):
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
    few, many = peak(200), peak(2000)
    assert many < few + 2_000_000


def test_a_store_that_is_something_else_is_named(model: CLIP, things: Dataset, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(StoreError, match="is not a database of results"):
        evaluate(model, [things], ["se"], tmp_path, SETTING)
