import pytest

from usetta import methods
from usetta.recipe import Recipe


def test_a_name_and_settings_make_a_recipe() -> None:
    assert methods.get("SE ") == methods.get("se")
    assert methods.get("se", gamma=0.2).gamma == 0.2
    assert methods.get("clip").weak_only
    assert not methods.get("se").weak_only
    mine = Recipe("mine", beta=0.25)
    assert methods.get(mine) is not None
    assert methods.get(mine, rho=0.5) == Recipe("mine", beta=0.25, rho=0.5)


def test_every_method_says_what_it_is() -> None:
    assert {"clip", "se"} <= set(methods.names())
    assert all(methods.get(name).description for name in methods.names())


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'clipp'; did you mean 'clip'\?"):
        methods.get("clipp")
    with pytest.raises(ValueError, match="unknown method 'zzz'; known are average, clip"):
        methods.get("zzz")
    with pytest.raises(ValueError, match=r"method 'se' has no setting 'gama'; did you mean 'gamma'\?"):
        methods.get("se", gama=0.1)
