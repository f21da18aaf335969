"""Lookups by name, alias and spelling; what an unknown name is answered; entry points of other packages."""

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from usetta import methods, registry
from usetta.methods.recipe import Recipe
from usetta.registry import Registry, suggest


@pytest.fixture
def colours() -> Registry[str]:
    colours: Registry[str] = Registry("colour", normalize=str.lower)
    colours.register("Red", "#f00", "crimson", "rouge")
    colours.register("Green", "#0f0")
    return colours


class FakePoint:
    """An entry point of a distribution that is not installed."""

    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name, self.value, self.load = name, f"plugin:{name}", load


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, FakePoint | EntryPoint]]:
    """Groups and entry points that packages are said to have."""
    points: list[tuple[str, FakePoint | EntryPoint]] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for its, point in points if its == group])
    return points


def test_names_aliases_and_spellings_find_the_same_value(colours: Registry[str]) -> None:
    assert colours["Red"] == colours.get("rED") == colours.find("CRIMSON") == "#f00"
    assert colours.canonical("rouge") == "Red"
    assert colours.canonical("blue") is colours.find("blue") is None
    assert "red" in colours
    assert "blue" not in colours
    assert 3 not in colours


def test_names_are_listed_in_order_and_without_aliases(colours: Registry[str]) -> None:
    assert colours.names() == list(colours) == ["Red", "Green"]
    assert colours.items() == [("Red", "#f00"), ("Green", "#0f0")]
    assert len(colours) == 2


def test_an_unknown_name_is_answered_with_the_nearest_name_or_alias_or_with_all_names(colours: Registry[str]) -> None:
    with pytest.raises(ValueError, match=r"^unknown colour 'gren'; did you mean 'Green'\?$"):
        colours.get("gren")
    with pytest.raises(ValueError, match=r"did you mean 'crimson'\?$"):
        colours.get("Crimsn")
    with pytest.raises(ValueError, match=r"^unknown colour 'xyz'; known: Red, Green$"):
        colours["xyz"]


def test_the_error_for_an_unknown_name_is_the_registry_s_own() -> None:
    with pytest.raises(LookupError, match="unknown size"):
        Registry("size", error=LookupError).get("big")


@pytest.mark.parametrize("taken", ["Red", "RED", "crimson"])
def test_a_name_that_is_taken_is_refused_also_as_an_alias(colours: Registry[str], taken: str) -> None:
    with pytest.raises(ValueError, match=f"there is already a colour called '{taken}'"):
        colours.register(taken, "#a00")
    with pytest.raises(ValueError, match="there is already a colour"):
        colours.register("blue", "#00f", taken)
    assert "blue" not in colours


def test_an_unregistered_name_can_be_taken_again(colours: Registry[str]) -> None:
    colours.unregister("Red")
    assert colours.names() == ["Green"]
    assert "crimson" not in colours
    assert colours.register("crimson", "#d14") == "#d14"


def test_a_value_that_does_not_pass_the_check_is_not_registered() -> None:
    def positive(name: str, value: int) -> None:
        if value <= 0:
            raise ValueError(f"{name} is not positive")

    numbers = Registry("number", check=positive)
    with pytest.raises(ValueError, match="minus is not positive"):
        numbers.register("minus", -1)
    assert numbers.register("one", 1) == 1
    assert numbers.names() == ["one"]


def test_entry_points_are_loaded_when_a_name_is_missing_and_not_before(
    installed: list[tuple[str, FakePoint | EntryPoint]],
) -> None:
    loaded = []
    installed += [
        ("usetta.colours", FakePoint("blue", lambda: loaded.append("blue") or "#00f")),
        ("usetta.other", FakePoint("pink", lambda: loaded.append("pink"))),
    ]
    colours: Registry[str] = Registry("colour", group="usetta.colours")
    colours.register("red", "#f00")
    assert colours["red"] == "#f00"
    assert not loaded
    assert colours["blue"] == "#00f"
    assert colours.names() == ["red", "blue"]
    assert loaded == ["blue"], "once, and of this group alone"


def test_a_plug_in_that_fails_is_logged_and_the_others_are_there(
    installed: list[tuple[str, FakePoint | EntryPoint]], caplog: pytest.LogCaptureFixture
) -> None:
    installed += [
        ("usetta.colours", EntryPoint("ghost", "no_such_module:COLOUR", "usetta.colours")),
        ("usetta.colours", FakePoint("red", lambda: "#e00")),
        ("usetta.colours", FakePoint("blue", lambda: "#00f")),
    ]
    colours: Registry[str] = Registry("colour", group="usetta.colours")
    colours.register("red", "#f00")
    with caplog.at_level(logging.WARNING, logger="usetta"):
        assert colours.names() == ["red", "blue"]
    assert colours["red"] == "#f00"
    assert "the plug-in ghost (no_such_module:COLOUR) cannot be loaded: No module named" in caplog.text
    assert "the plug-in red (plugin:red) cannot be loaded: there is already a colour called 'red'" in caplog.text


def test_a_plug_in_may_register_its_value_itself_and_ask_for_names_while_it_loads(
    installed: list[tuple[str, FakePoint | EntryPoint]], caplog: pytest.LogCaptureFixture
) -> None:
    colours: Registry[str] = Registry("colour", group="usetta.colours")
    colours.register("red", "#f00")
    installed.append(("usetta.colours", FakePoint("blue", lambda: colours.register("blue", "#00f" * len(colours)))))
    assert colours["blue"] == "#00f"
    assert not caplog.text


def test_a_method_of_another_package_is_a_method(
    installed: list[tuple[str, FakePoint | EntryPoint]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = Recipe("theirs", "of another package", gamma=0.2)
    installed += [
        ("usetta.methods", FakePoint("theirs", lambda: recipe)),
        ("usetta.methods", FakePoint("misnamed", lambda: recipe)),
        ("usetta.methods", FakePoint("text", lambda: "no recipe")),
    ]
    own: Registry[Recipe] = Registry("method", group="usetta.methods", check=methods.check_recipe)
    own.register("clip", methods.get("clip"))
    monkeypatch.setattr(methods, "METHODS", own)
    assert methods.get("theirs:steps=2").name == "theirs:steps=2"
    assert methods.names() == ["clip", "theirs"]
    assert "the plug-in misnamed (plugin:misnamed) cannot be loaded: a recipe called 'theirs'" in caplog.text
    assert "the plug-in text (plugin:text) cannot be loaded: a method is a Recipe, not 'no recipe'" in caplog.text


def test_the_hint_is_spelled_as_the_name_is_known() -> None:
    assert suggest("vit-b-16", ["ViT-B/16"], lambda name: name.lower().replace("/", "-")) == "did you mean 'ViT-B/16'?"
    assert suggest("qq", ["one", "two"], aliases=["three"]) == "known: one, two"
