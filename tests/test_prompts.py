import pytest
import torch

from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts


def test_features_are_the_tower_s_own(tiny_model: CLIP) -> None:
    ids = tiny_model.text.tokenize(["a photo of a cat.", "a photo of a red fox."])
    expected = tiny_model.text.encode(tiny_model.text.embed(ids), ids)
    torch.testing.assert_close(ClassPrompts(tiny_model.text, ["cat", "red_fox"]).features(), expected)


def test_they_are_computed_once(tiny_model: CLIP) -> None:
    prompts = ClassPrompts(tiny_model.text, ["cat"])
    assert prompts.features() is prompts.features()


def test_several_templates_are_averaged_at_unit_length(tiny_model: CLIP) -> None:
    templates = ["a photo of a {}.", "itap of a {}."]
    each = [ClassPrompts(tiny_model.text, ["cat", "dog"], t).features() for t in templates]
    mean = sum(each) / 2
    expected = mean / mean.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(ClassPrompts(tiny_model.text, ["cat", "dog"], templates).features(), expected)


def test_many_classes_equal_few_at_a_time(tiny_model: CLIP) -> None:
    names = [f"thing number {i}" for i in range(150)]
    together = ClassPrompts(tiny_model.text, names).features()
    assert together.shape == (150, 32)
    torch.testing.assert_close(together[140:], ClassPrompts(tiny_model.text, names[140:]).features())


def test_equal_names_get_equal_features(tiny_model: CLIP) -> None:
    features = ClassPrompts(tiny_model.text, ["missile", "cat", "missile"]).features()
    assert torch.equal(features[0], features[2])


@pytest.mark.parametrize(
    ("classes", "templates", "message"),
    [
        ([], "{}", "at least one class"),
        ("cat,dog", "{}", "a list of names, not one string"),
        (["cat", "_ "], "{}", "class 2 has an empty name"),
        (["cat", 3], "{}", "class 2 is not a name but 3"),
        (["cat"], [], "at least one template"),
        (["cat"], "a photo", "holds '{}' once"),
        (["cat"], "{} and {}", "holds '{}' once"),
        (["cat " * 90], "a photo of a {}.", "cat cat"),
    ],
)
def test_bad_names_and_templates_are_named(tiny_model: CLIP, classes: list[str], templates: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassPrompts(tiny_model.text, classes, templates)
