"""Names, their grammar, and what joins them."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from models.tiny import TINY_VIT, disturbed
from usetta import methods
from usetta.methods.losses import LOSSES
from usetta.methods.named import published_settings
from usetta.methods.readout import READOUTS
from usetta.methods.recipe import Recipe, Result, run
from usetta.methods.select import SELECTIONS, tuned_views
from usetta.methods.stats import ViewStats
from usetta.methods.tune.lora import Hidden
from usetta.prompts import ClassPrompts
from usetta.registry import Registry

MODEL = disturbed(TINY_VIT)
NAMES = ["cat", "dog", "red fox", "old stone bridge"]
PLUG_INS = [f"{name}+se" for name in ("tpt", "c-tpt", "r-tpt", "rlcf", "sts")]
PLUG_INS += [f"{name}+{readout}" for name in ("tps", "ttl") for readout in READOUTS]


Temporarily = Callable[[Registry[Any], str, Any], None]


@pytest.fixture
def temporarily() -> Iterator[Temporarily]:
    """Register something for the length of a test."""
    added: list[tuple[Registry[Any], str]] = []

    def register(registry: Registry[Any], name: str, value: Any) -> None:
        registry.register(name, value)
        added.append((registry, name))

    yield register
    for registry, name in added:
        registry.unregister(name)


def answers(method: str, states: list[Tensor]) -> Result:
    """What a method says about images whose views have these hidden states, by a tiny model."""
    blocks = MODEL.last_blocks()
    features = torch.stack([blocks.encode(hidden) for hidden in states])
    return run(methods.get(method), features, ClassPrompts(MODEL.text, NAMES), 20.0, hidden=Hidden(blocks, states))


@pytest.fixture(scope="module")
def images() -> list[Tensor]:
    """Hidden states of twelve views of three images."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(3, 12, 3, 4, 4, generator=generator)
    return [MODEL.hidden_states(torch.nn.functional.interpolate(views, size=(32, 32))) for views in coarse]


@pytest.mark.parametrize("method", [*methods.names(), *PLUG_INS])
def test_every_row_of_the_tables_runs_and_a_batch_is_its_images_one_by_one(method: str, images: list[Tensor]) -> None:
    together = answers(method, images)
    torch.testing.assert_close(together.probs.sum(dim=1), torch.ones(3))
    torch.testing.assert_close(together.weights.sum(dim=1), torch.ones(3))
    assert (together.probs >= 0).all()
    for i in range(3):
        alone = answers(method, images[i : i + 1])
        torch.testing.assert_close(together.probs[i], alone.probs[0], atol=1e-5, rtol=0)
        assert together.skipped[i] == alone.skipped[0]


def test_a_name_and_settings_make_a_recipe() -> None:
    assert methods.get("SE ") == methods.get("se")
    assert methods.get("se", gamma=0.2).gamma == 0.2
    assert methods.get("clip").weak_only
    assert not methods.get("se").weak_only
    mine = Recipe("mine", beta=0.25)
    assert methods.get(mine) is mine
    assert methods.get(mine, rho=0.5) == Recipe("mine:rho=0.5", beta=0.25, rho=0.5)


def test_every_method_says_what_it_is() -> None:
    assert {"clip", "se"} <= set(methods.names())
    assert all(methods.get(name).description for name in methods.names())


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("clip+weak", "clip"),
        ("clip+uniform", "uniform"),
        ("clip+se", "se"),
        ("mem", "tpt"),
        ("tpt+weak", "tpt"),
        ("mem+se", "tpt+se"),
        ("use+weak", "rce"),
        ("rce+se", "use"),
        ("R-TPT+SE", "r-tpt+se"),
        ("r-tpt+reliability", "r-tpt"),
        ("use:steps=1", "use"),
        ("use:skip=False:beta=0.5", "use:skip=false:beta=0.5"),
        ("use:beta=uniform:steps=4", "use:steps=4:beta=uniform"),
        ("mem+se:se_stats=pre", "tpt+se:se_stats=pre"),
        ("clip+mode", "mta"),
        ("clip+vote", "zero"),
        ("zero:voters=0.5", "zero:voters=0.5"),
        ("zero:voters=1", "zero:voters=1.0"),
        ("zero:voters=0.3", "zero"),
        ("mta:lambda_q=2:bandwidth=0.2", "mta:bandwidth=0.2:lambda_q=2.0"),
        ("r-tpt:neighbours=10:steps=2", "r-tpt:steps=2:neighbours=10"),
        ("ttl:margin=0.2:rank=4", "ttl:rank=4:margin=0.2"),
        ("use:readout=vote:voters=0.5", "use:readout=vote:voters=0.5"),
        ("r-tpt:readout=se", "r-tpt:readout=se"),
    ],
)
def test_the_grammar_has_one_name_for_each_recipe(written: str, canonical: str) -> None:
    recipe = methods.get(written)
    assert recipe.name == canonical
    assert methods.get(canonical) == recipe


def test_settings_have_the_types_they_need() -> None:
    recipe = methods.get("use:steps=4:gamma=0.2:beta=0.5:skip=false:rescaling=root:active=64")
    assert (recipe.steps, recipe.gamma, recipe.beta, recipe.skip) == (4, 0.2, 0.5, False)
    assert (recipe.rescaling, recipe.active) == ("root", 64)
    assert recipe == methods.get("use", steps=4, gamma=0.2, beta=0.5, skip=False, rescaling="root", active=64)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("zzz", "unknown method 'zzz'; known: clip, strong, average"),
        ("ues", r"unknown method 'ues'; did you mean 'use'\?"),
        ("tpt+se2", r"unknown readout 'se2'; did you mean 'se'\?"),
        ("use:gama=1", r"no setting 'gama'; did you mean 'gamma'\?"),
        ("use:gamma=wide", "invalid value 'wide' for the setting gamma"),
        ("use:gamma", "a setting is written name=value, not 'gamma'"),
        ("use:skip=maybe", "invalid value 'maybe' for the setting skip"),
        ("use:name=other", "no setting 'name'"),
        ("zero+se", "'zero' tunes nothing, so it cannot be combined with another readout; use 'clip\\+se'"),
        ("se+weak", "'se' tunes nothing"),
        ("zero:voters=0", "voters must be above 0 and at most 1"),
        ("tps:penalty=1", "the setting 'penalty' belongs to tune=spectrum, and 'tps' has tune=shift"),
        ("tps:active=5", "active saves work in the text encoder, which tune=shift does not use"),
        ("tpt:lr=inf", "must be finite"),
        ("zero:voters=many", "invalid value 'many' for the setting voters"),
        ("zero:voter=0.5", r"no setting 'voter'; did you mean 'voters'\?"),
        ("use:voters=0.5", "the setting 'voters' belongs to readout=vote, and 'use' has readout=se"),
        ("r-tpt+se:neighbours=10", r"belongs to readout=reliability, and 'r-tpt\+se' has readout=se"),
        ("se:margin=0.2", "the setting 'margin' belongs to loss=weighted, and 'se' has tune=nothing"),
        ("r-tpt:neighbours=0", "neighbours must be at least 1, not 0"),
        ("r-tpt:neighbours=1.5", "invalid value '1.5' for the setting neighbours"),
        ("r-tpt:temperature=0", "temperature must be above 0, not 0.0"),
        ("mta:lambda_q=nan", "lambda_q must be at least 0, not nan"),
        ("ttl:seed=-1", "seed must be at least 0 and at most"),
    ],
)
def test_an_error_names_what_is_wrong_with_a_method(written: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get(written)


def test_a_family_of_datasets_has_its_own_settings() -> None:
    assert methods.get("c-tpt").dispersion == 50
    assert methods.get("c-tpt+se", family="imagenet").dispersion == 20
    assert methods.get("c-tpt", family="imagenet").name == "c-tpt"
    assert methods.get("c-tpt:dispersion=5", family="imagenet").dispersion == 5
    assert methods.get("tps").lr == methods.get("tps+se").lr == 1e-3
    assert methods.get("tps", family="imagenet").lr == 5e-3
    assert {name: family.augmix for name, family in methods.FAMILIES.items()} == {
        "imagenet": False,
        "fine-grained": True,
        "other": False,
    }
    with pytest.raises(ValueError, match="unknown family of datasets 'birds'; known: imagenet, fine-grained, other"):
        methods.get("c-tpt", family="birds")


def test_published_settings() -> None:
    rlcf, ttl, sts = (methods.get(name) for name in ("rlcf", "ttl", "sts"))
    assert (rlcf.steps, rlcf.lr, rlcf.weight_decay, rlcf.select, rlcf.readout) == (3, 7e-3, 5e-4, "confident", "weak")
    assert (ttl.steps, ttl.lr, ttl.weight_decay, ttl.select, ttl.loss) == (1, 5e-3, 0.01, "all", "weighted")
    assert (sts.steps, sts.lr, sts.select, sts.loss, sts.readout) == (1, 5e-3, "confident", "mem", "selected")
    assert methods.get("zero").options == {"voters": 0.3}
    assert methods.get("mta").options == {"bandwidth": 0.3, "lambda_y": 0.2, "lambda_q": 4.0}
    assert methods.get("r-tpt").options == {"neighbours": 20, "temperature": 0.01}
    assert rlcf.options == {"top_k": 3}
    assert ttl.options == {"rank": 16, "alpha": 32.0, "seed": 0, "margin": 0.4}
    assert sts.options == {"penalty": 0.0}
    assert [name for name in methods.names() if methods.get(name).needs_prompts] == [
        "tpt", "tpt-rce", "c-tpt", "o-tpt", "r-tpt", "rlcf", "rce", "use",
    ]  # fmt: skip


def test_values_that_were_published_for_a_dataset() -> None:
    published = methods.get("boostadapter:values=published", dataset="imagenet-a")
    assert published.name == "boostadapter:values=published"
    assert {name: published.options[name] for name in ("alpha", "sharpness", "boosted")} == {
        "alpha": 2, "sharpness": 5, "boosted": 3,
    }  # fmt: skip
    assert methods.get("tda:values=published:alpha=9", dataset="eurosat").options["alpha"] == 9
    assert methods.get("tda:values=published", dataset="eurosat").options["sharpness"] == 8
    assert published_settings("dpe", "cars") == {
        "alpha": 3, "sharpness": 7, "learning_rate": 1e-4, "align": 1.5,
    }  # fmt: skip
    assert published_settings("dota", "food101") == {"weight": 0.1, "rate": 0.01, "ridge": 4e-5}
    assert published_settings("dota", "pets")["ridge"] == 1e-4
    mixes = {dataset: published_settings("onzeta", dataset) for dataset in ("imagenet-r", "caltech101", "dtd")}
    assert [tuple(settings.values()) for settings in mixes.values()] == [(0.8, 1.0), (0.4, 0.0), (0.4, 1.0)]
    assert published_settings("use", "pets") == {}, "it has none, and is asked all the same"
    with pytest.raises(ValueError, match="values=published are known for imagenet, .*, not for images of your own"):
        methods.get("tda:values=published")
    with pytest.raises(ValueError, match="not for 'zoo'"):
        methods.get("tda:values=published", dataset="zoo")
    with pytest.raises(ValueError, match="values can be 'published', not 'best'"):
        methods.get("tda:values=best", dataset="pets")


def test_a_recipe_of_one_s_own_joins_the_others(temporarily: Temporarily, images: list[Tensor]) -> None:
    def loudest(logits: Tensor, _pseudo_label: Tensor) -> Tensor:
        return -logits.log_softmax(dim=-1).amax(dim=(1, 2))

    def one_view(
        _recipe: Recipe, _before: ViewStats, after: ViewStats, _features: Tensor, *, number: int = 1
    ) -> tuple[Tensor, Tensor]:
        weights = torch.zeros_like(after.entropies)
        weights[:, number] = 1
        return after.logits[:, number].softmax(dim=-1), weights

    def last_views(_recipe: Recipe, before: Tensor, _present: Tensor, *, last: int = 2) -> Tensor:
        return torch.arange(before.shape[1] - last, before.shape[1]).expand(len(before), -1)

    with pytest.raises(ValueError, match="unknown loss 'loudest'; known: mem, rce, pointwise, weighted, reward"):
        Recipe("mine", loss="loudest")
    temporarily(LOSSES, "loudest", loudest)
    temporarily(READOUTS, "first", one_view)
    temporarily(SELECTIONS, "last", last_views)
    recipe = Recipe("mine-2", "an idea", select="last", tune="shift", loss="loudest", readout="first")
    temporarily(methods.METHODS, "mine-2", recipe)
    assert methods.names()[-1] == "mine-2"
    assert methods.get("mine-2+se:steps=2").name == "mine-2+se:steps=2"
    assert methods.get("tpt+first").readout == "first"
    result = answers("mine-2", images)
    assert result.weights[:, 1].tolist() == [1, 1, 1]
    assert (result.probs.amax(dim=1) != result.before.amax(dim=1)).all()
    assert tuned_views(recipe, result.entropies).tolist() == [[10, 11]] * 3
    assert answers("mine-2:number=4:last=1", images).weights[:, 4].tolist() == [1, 1, 1]
    temporarily(SELECTIONS, "clash", lambda recipe, before, present, *, steps=2: before)
    with pytest.raises(ValueError, match="select 'clash' has an option 'steps', but a setting has that name already"):
        methods.get("tpt:select=clash")


@pytest.mark.parametrize("name", ["use", "mem", "zero-shot"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is already a method called '{name}'"):
        methods.register(Recipe(name))


@pytest.mark.parametrize("name", ["", "Mine", "a+b", "a:b", "a=b", "a b", "a,b", "-a", "a-"])
def test_a_name_that_could_not_be_written_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a method has lower-case letters and digits"):
        methods.register(Recipe(name))
    assert name not in methods.names()


def test_a_recipe_is_a_key_and_its_record_is_plain_json() -> None:
    assert {methods.get("zero:voters=0.5"): 1}[methods.get("zero", voters=0.5)] == 1
    assert methods.get("zero") != methods.get(methods.get("zero"), voters=0.5)
    recipe = methods.get("mta:bandwidth=0.2")
    assert Recipe("mine", readout="vote") == Recipe("mine", readout="vote", options={"voters": 0.3})
    stored = json.loads(json.dumps(asdict(recipe)))
    assert stored == asdict(recipe)
    assert Recipe(**stored) == recipe
    assert stored["options"] == {"bandwidth": 0.2, "lambda_y": 0.2, "lambda_q": 4.0}
    assert recipe.settings["bandwidth"] == 0.2
    assert recipe.settings["gamma"] == 0.4


@pytest.mark.parametrize("value", ["0.5", True, None])
def test_an_option_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=f"voters must be of type float, not {value!r}"):
        methods.get("zero", voters=value)
