"""Warnings about answers that should not be trusted: when they come, when they do not, and how people see them."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import make_image
from usetta import AnswerWarning, Classifier
from usetta.answer_warnings import class_warnings, is_near_chance
from usetta.models.clip import CLIP


def about(model: CLIP, classes: list[str], features: torch.Tensor | None = None) -> list[str]:
    """Warnings about names whose features are at right angles, or as given."""
    return list(class_warnings(classes, model, torch.eye(len(classes)) if features is None else features))


def test_foreign_names_are_found_and_no_others(tiny_model: CLIP) -> None:
    known = ["tabby cat", "façade", "crème brûlée", "jalapeño", "Eichhörnchen", "F/A-18", "707-320", "xqzvk", "BMW X6"]
    assert about(tiny_model, known) == []
    foreign = ["猫", "ねこ", "кошка", "γάτα", "قطة", "고양이", "חתול"]
    for name in foreign:
        assert about(tiny_model, ["tabby cat", name]) == [
            f"1 class name in letters that the model hardly knows: {name}; English names work best"
        ]
    assert about(tiny_model, foreign) == [
        "7 class names in letters that the model hardly knows: 猫, ねこ, кошка and 4 more; English names work best"
    ]


def test_names_with_nearly_the_same_features_are_found(tiny_model: CLIP) -> None:
    def turned(cosine: float) -> torch.Tensor:
        return torch.tensor([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5], [0.0, -1.0]])

    names = ["crane", "crane (bird)", "maillot"]
    assert about(tiny_model, names, turned(0.994)) == []
    (text,) = about(tiny_model, names, turned(0.996))
    assert text == "1 pair of class names that the model hardly distinguishes: 'crane' and 'crane (bird)'"
    (text,) = about(tiny_model, [f"n{i}" for i in range(1500)], torch.ones(1500, 1))
    assert text.startswith("1124250 pairs of class names that the model hardly distinguishes: 'n0' and 'n1', ")
    assert text.endswith(" and 1124247 more")


def test_of_very_many_names_the_spelling_is_compared(tiny_model: CLIP) -> None:
    names = [*(f"n{i}" for i in range(3000)), "Red fox", "hen", "red_fox"]
    assert about(tiny_model, names, torch.ones(len(names), 1)) == [
        "1 pair of class names that the model hardly distinguishes: 'Red fox' and 'red_fox'"
    ]


def test_names_that_a_tower_does_not_know(tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyHen:
        def unfamiliar(self, names: list[str], _features: torch.Tensor) -> list[str]:
            return [name for name in names if name != "hen"]

    monkeypatch.setattr(tiny_model.text, "familiarity", OnlyHen())
    tail = "for such names use CLIP's weights"
    assert about(tiny_model, ["hen", "hen house"]) == [f"the {tiny_model.name} model may not know: hen house; {tail}"]
    assert about(tiny_model, ["hen", "猫", *"abcd"])[1:] == [  # a foreign name gets one warning
        f"the {tiny_model.name} model may not know: a, b, c and 1 more; {tail}"
    ]
    classifier = Classifier(["hen", "zorkmid"], tiny_model, "clip")
    with pytest.warns(AnswerWarning, match="may not know: zorkmid"):
        prediction = classifier(make_image())
    assert any("zorkmid" in text for text in prediction.warnings)
    with warnings.catch_warnings():  # said once
        warnings.filterwarnings("error", message=".*zorkmid.*")
        classifier(make_image())


def test_chance_is_a_fifth_more_than_one_of_so_many(tiny_model: CLIP) -> None:
    assert is_near_chance(0.59, 2)
    assert not is_near_chance(0.61, 2)
    assert is_near_chance(0.0011, 1000)
    assert not is_near_chance(0.0013, 1000)
    assert not is_near_chance(1.0, 1)
    assert about(tiny_model, ["cat"]) == ["there is only one class, so every image gets it with a probability of 100 %"]


def test_a_classifier_warns_once_about_names_and_once_a_call_about_chance(tiny_model: CLIP) -> None:
    classifier, pairs = Classifier(["猫", "猫"], tiny_model, "clip"), "hardly distinguishes: '猫' and '猫'"
    with pytest.warns(AnswerWarning) as caught:
        first = classifier(make_image())
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)] * 3
    *of_names, chance = (str(warning.message) for warning in caught)
    assert of_names[1].endswith(pairs)
    assert chance == "the best of 2 classes is hardly better than chance"
    assert first.warnings == (*of_names, chance) == tuple(first.to_dict()["warnings"])
    np.testing.assert_allclose(first.probs, 0.5)
    with pytest.warns(AnswerWarning) as caught:
        classifier([make_image(i) for i in range(3)])
    assert [str(warning.message) for warning in caught] == [f"3 of 3 images: {chance}, such as <Image>"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(classifier.stream([make_image()]))) == 1, "a stream says it in each prediction"
        classifier([])


def test_the_command_line_prints_warnings_in_one_line_each(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for i in range(2):
        make_image(i).save(tmp_path / f"{i}.png")
    command = [sys.executable, "-m", "usetta", "classify", str(tmp_path), "-c", "hen,hen", "-m", "clip"]
    command += ["--model", str(tiny_checkpoint)]
    printed = [
        "usetta: warning: 1 pair of class names that the model hardly distinguishes: 'hen' and 'hen'",
        "usetta: warning: 2 of 2 images: the best of 2 classes is hardly better than chance",
    ]
    for more in (["--json"], ["--out", str(tmp_path / "answers")]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        assert [line for line in done.stderr.splitlines() if "arning" in line] == printed
        if more == ["--json"]:
            assert len(json.loads(done.stdout.splitlines()[0])["warnings"]) == 2
