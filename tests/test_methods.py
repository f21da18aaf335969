import pytest

from usetta import methods
from usetta.recipe import Recipe


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


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'clipp'; did you mean 'clip'\?"):
        methods.get("clipp")
    with pytest.raises(ValueError, match="unknown method 'zzz'; known are average, c-tpt, clip"):
        methods.get("zzz")
    with pytest.raises(ValueError, match=r"no setting 'gama'; did you mean 'gamma'\?"):
        methods.get("se", gama=0.1)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("clip+weak", "clip"),
        ("clip+uniform", "uniform"),
        ("clip+se", "se"),
        ("mem", "tpt"),
        ("tpt+weak", "tpt"),
        ("mem+uniform", "tpt+uniform"),
        ("mem+se", "tpt+se"),
        ("use+weak", "rce"),
        ("rce+uniform", "rce+uniform"),
        ("rce+se", "use"),
        ("R-TPT+SE", "r-tpt+se"),
        ("r-tpt+reliability", "r-tpt"),
        ("use:steps=1", "use"),
        ("use:skip=False:beta=0.5", "use:skip=false:beta=0.5"),
        ("use:beta=uniform:steps=4", "use:steps=4:beta=uniform"),
        ("mem+se:se_stats=pre", "tpt+se:se_stats=pre"),
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
        ("ues", r"unknown method 'ues'; did you mean 'use'\?"),
        ("tpt+se2", r"unknown read-out 'se2'; did you mean 'se'\?"),
        ("use:gama=1", r"no setting 'gama'; did you mean 'gamma'\?"),
        ("use:gamma=wide", "'wide' is no value for the setting gamma"),
        ("use:gamma", "a setting is written name=value, not 'gamma'"),
        ("use:skip=maybe", "'maybe' is no value for the setting skip"),
        ("use:steps=0", "steps must be at least 1"),
        ("use:beta=half", "beta must be 'adaptive', 'uniform' or a number"),
        ("use:name=other", "no setting 'name'"),
        ("c-tpt:active=10", "dispersion moves all classes"),
    ],
)
def test_what_is_wrong_with_a_name_is_told(written: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.get(written)


def test_a_family_of_data_sets_has_its_own_settings() -> None:
    assert methods.get("c-tpt").dispersion == 50
    assert methods.get("c-tpt+se", family="imagenet").dispersion == 20
    assert methods.get("c-tpt", family="imagenet").name == "c-tpt"
    assert methods.get("c-tpt:dispersion=5", family="imagenet").dispersion == 5
    with pytest.raises(ValueError, match="unknown family of data sets 'birds'; known are imagenet, fine-grained"):
        methods.get("c-tpt", family="birds")
