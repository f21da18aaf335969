"""What the pages on methods say is compared with the code, and the method that a reader is told to add is added."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import usetta.classifier
import usetta.text_head
from conftest import make_image
from usetta import Classifier, Prediction, methods
from usetta.cli import app
from usetta.images import image_id, open_image
from usetta.methods.options import options_of
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

DOCS = Path(__file__).parents[1] / "docs"
METHODS = (DOCS / "methods.md").read_text(encoding="utf-8")
FOOTGUNS = (DOCS / "footguns.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text under a heading, up to the next."""
    return re.split(rf"^#+ {re.escape(title)}$", METHODS, flags=re.MULTILINE)[1].partition("\n#")[0]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


# The blocks of "Adding a method" have a `#` of their own, so the section is what follows its heading.
MINE, USED, COMMAND = blocks(METHODS.partition("## Adding a method")[2])


@pytest.fixture
def mine() -> Iterator[None]:
    """The reader's own method, for the length of a test."""
    exec(compile(MINE, "mine.py", "exec"), {"__name__": "mine"})
    yield
    for name in ("gini", "confident"):
        methods.METHODS.unregister(name)
    methods.READOUTS.unregister("confident")
    methods.LOSSES.unregister("gini")


def test_the_tables_name_every_method_and_tell_what_it_tunes_and_how_it_is_read_out() -> None:
    rows = re.findall(r"^\| \[?`([a-z-]+)`(?:\]\(#[a-z-]+\))? \| `(\w+)` \| `(\w+)` \|", METHODS, flags=re.MULTILINE)
    recipes = [methods.get(name) for name in methods.names()]
    assert sorted(rows) == sorted((recipe.name, recipe.tune, recipe.readout) for recipe in recipes)


def test_the_defaults_of_a_section_are_those_of_the_recipe() -> None:
    checked = 0
    for name in methods.names():
        heading = re.search(rf"^## {name}$", METHODS, flags=re.MULTILINE | re.IGNORECASE)
        for line in re.findall(r"\*\*Defaults\.\*\*([^*]*)", section(heading[0][3:])) if heading else []:
            for setting, value in re.findall(r"`(\w+)=([^`]+)`", line):
                assert value == str(methods.get(name).settings[setting]).lower(), (name, setting)
                checked += 1
    assert checked >= 30


def test_the_defaults_of_memories_are_complete() -> None:
    for name in methods.stream_names():
        page = re.split(rf"^### {name.removesuffix('-weak')}$", METHODS, flags=re.MULTILINE | re.IGNORECASE)[1]
        line = re.findall(r"\*\*Defaults\.\*\*([^*]*)", page)[0]
        written = {setting: float(value) for setting, value in re.findall(r"`(\w+)=([^`]+)`", line)}
        assert written == methods.get(name).options, name


def test_the_table_of_families_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (yes|no) \| (.*) \|$", section("Defaults by family"), flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == list(methods.FAMILIES)
    for name, augmix, settings in rows:
        family = methods.FAMILIES[name]
        assert augmix == ("yes" if family.augmix else "no")
        assert re.findall(r"`([^`]+)`", settings) == [
            f"{method}:{setting}={value}"
            for method, changed in family.settings.items()
            for setting, value in changed.items()
        ]


def test_the_table_of_read_outs_is_complete() -> None:
    table = section("Names for the rest of the grid").partition("| readout |")[2]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(methods.READOUTS)


def test_the_table_of_settings_has_the_options_of_every_choice_and_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)=(\w+)` \| `([\w.]+)` \|", section("Settings"), flags=re.MULTILINE)
    registries = {
        "readout": methods.READOUTS,
        "loss": methods.LOSSES,
        "select": methods.SELECTIONS,
        "tune": methods.TUNERS,
    }
    assert [tuple(row) for row in rows] == [
        (name, axis, choice, str(option.default))
        for axis, registry in registries.items()
        for choice, part in registry.items()
        for name, option in options_of(part).items()
    ]


@pytest.mark.usefixtures("mine")
def test_every_name_on_the_pages_is_a_method() -> None:
    names = [span for span in code_spans(METHODS + FOOTGUNS) if re.fullmatch(r"[a-z-]+(\+\w+)?(:\w+=[\w.]+)+", span)]
    names += [span for span in code_spans(METHODS + FOOTGUNS) if re.fullmatch(r"[a-z-]+\+\w+", span)]
    names += code_spans(section("Rows of the paper's tables"))
    assert len(names) > 50
    for name in {*names} - {"zero+se", "weak+strong"}:  # the page says that the one is an error, the other no method
        assert methods.get(name)
    with pytest.raises(ValueError, match=re.escape("use 'clip+se'")):
        methods.get("zero+se")


def test_the_names_that_the_pages_call_the_same_are_the_same() -> None:
    for one, other in [("rce+se", "use"), ("clip+vote", "zero"), ("mem", "tpt"), ("mem+se", "tpt+se")]:
        assert methods.get(one) == methods.get(other)


def test_the_templates_are_seven_and_the_methods_that_refuse_them_are_those_that_tune_the_prompt(
    tiny_model: CLIP,
) -> None:
    text = section("Several text templates")
    templates = ast.literal_eval(blocks(text)[0].partition("=")[2].strip())
    assert len({*templates}) == 7
    assert "a photo of a {}." not in templates
    takes, refuses = (
        re.findall(r"`([^`]+)`", line) for line in re.findall(r"^\| (?:take|refuse).*", text, flags=re.MULTILINE)
    )
    assert sorted(takes + refuses) == sorted(methods.names())
    for name in takes:
        Classifier(["cat", "dog"], tiny_model, name, templates=templates)
    for name in refuses:
        with pytest.raises(ValueError, match="an ensemble of templates has no single context"):
            Classifier(["cat", "dog"], tiny_model, name, templates=templates)


def test_the_worked_example_is_short() -> None:
    assert len(MINE.splitlines()) <= 30


@pytest.mark.usefixtures("mine")
def test_a_registered_method_is_listed_and_goes_with_the_grammar() -> None:
    assert methods.names()[-2:] == ["confident", "gini"]
    shown = CliRunner().invoke(app, ["ls", "methods"]).stdout
    assert "confident" in shown
    assert "the mean of all views, by their confidence" in shown
    assert methods.get("clip+confident") == methods.get("confident")
    assert methods.get("tpt+confident").loss == "mem"
    assert methods.get("gini:steps=2").steps == 2
    assert methods.get("confident:sharpness=2").options == {"sharpness": 2.0}


def answer_of(block: str) -> Prediction:
    """What `answer` is after a block of the page has run."""
    space: dict[str, object] = {}
    exec(compile(block, "methods.md", "exec"), space)
    answer = space["answer"]
    assert isinstance(answer, Prediction)
    return answer


@pytest.mark.usefixtures("mine")
def test_the_worked_example_answers_as_its_formulas_say(
    tiny_model: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_image(3).save(tmp_path / "cat.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mine", ModuleType("mine"))  # `import mine` finds it done
    monkeypatch.setattr(usetta.classifier, "load_model", lambda _name, **_options: tiny_model)
    monkeypatch.setattr(usetta.text_head, "is_settled", lambda *_, **__: False)  # so that it gets all views
    tuned = answer_of(USED)
    plain = answer_of(USED.replace('"gini"', '"confident"'))

    image = open_image("cat.png")
    pixels = make_views(image, image_id(image), ViewRecipe(views=64, size=tiny_model.image_size))
    features = tiny_model.encode_images(pixels).double()
    prompts = ClassPrompts(tiny_model.text, ["tabby cat", "red fox", "golden retriever"])

    def predict(text: torch.Tensor) -> torch.Tensor:
        return (tiny_model.logit_scale * features @ text.double().T).softmax(dim=-1)

    def confident(probs: torch.Tensor) -> np.ndarray:
        p = probs.detach().numpy()
        weights = np.exp((p * np.log(p)).sum(axis=1))
        return (weights / weights.sum()) @ p

    before = predict(prompts.features())
    np.testing.assert_allclose(plain.probs, confident(before), atol=1e-5)
    assert np.abs(plain.probs - before[0].numpy()).max() > 1e-3  # and that is not the weak view's answer
    assert np.abs(plain.probs - before.mean(dim=0).numpy()).max() > 1e-4  # nor the plain mean

    entropies = -(before * before.log()).sum(dim=1)
    most_certain = entropies.argsort()[:6]
    context = prompts.context.clone().requires_grad_()
    mean = predict(prompts.encode(context[None])[0])[most_certain].mean(dim=0)
    (1 - (mean**2).sum()).backward()
    assert context.grad is not None
    with torch.no_grad():  # AdamW's first step
        moved = context * (1 - 0.005 * 0.01) - 0.005 * context.grad / (context.grad.abs() + 1e-8)
    expected = confident(predict(prompts.encode(moved[None])[0]))
    np.testing.assert_allclose(tuned.probs, expected, atol=1e-4)
    assert np.abs(expected - plain.probs).max() > 1e-2


def test_a_script_of_ones_own_is_the_command_line_with_the_method(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    (tmp_path / "myusetta.py").write_text(COMMAND, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "myusetta.py", "ls", "methods"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "confident" in done.stdout
    assert "gini" in done.stdout
