"""Adaptive views: an image that leaves no doubt gets few, a doubtful one all, whatever its neighbours get."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, one_hot
from typer.testing import CliRunner

from conftest import make_image
from usetta import Classifier, methods
from usetta.adaptive import STAGES, accepted_changes, is_settled, least_views, most_views, stages
from usetta.cli import app
from usetta.images import image_id
from usetta.models.clip import CLIP
from usetta.views import ViewRecipe, make_views

CLASSES = [f"thing {i}" for i in range(6)]
TEXT = torch.eye(4)


def views(*labels: int, confidence: float = 1.0) -> torch.Tensor:
    """Features of views that choose these classes."""
    return normalize(confidence * one_hot(torch.tensor(labels), 4).float() + (1 - confidence) / 4, dim=-1)


def test_stages_add_up_to_all_views_and_no_more() -> None:
    assert stages(20) == [range(1), range(1, 8), range(8, 16), range(16, 20)]
    assert [view for part in stages() for view in part] == list(range(64))
    assert stages(1) == [range(1)]
    assert STAGES[-1] == 64


def test_views_that_agree_with_a_lead_settle_an_image() -> None:
    assert is_settled(views(2), TEXT, 100.0)
    assert not is_settled(views(2), TEXT, 0.5), "the same answer, but no lead"
    assert not is_settled(views(2), TEXT, 100.0, least=8), "this method compares views"
    assert is_settled(views(2, 2, 2, 2), TEXT, 100.0)
    assert not is_settled(views(2, 2, 2, 2), TEXT, 0.5)
    assert not is_settled(views(1, 2, 2, 2), TEXT, 100.0), "the weak view disagrees"
    assert not is_settled(views(2, 2, 1, 2), TEXT, 100.0), "a confident strong view disagrees"
    assert is_settled(views(0), TEXT[:1], 1.0), "there is one class only"
    assert is_settled(views(0, 0), TEXT[:1], 1.0)


def test_doubtful_views_do_not_matter() -> None:
    doubtful = views(1, 1, 3, confidence=0.5)
    assert is_settled(torch.cat([views(2, 2, 2, 2), doubtful]), TEXT, 10.0)


def test_the_more_changes_are_accepted_the_fewer_views_it_takes() -> None:
    """The sharper the predictions, the larger the lead."""
    seen, scales = views(*[2] * 8, confidence=0.6), torch.linspace(0.5, 4, 56).tolist()
    settled = [[is_settled(seen, TEXT, scale, accepted=accepted) for scale in scales] for accepted in (0.2, 1, 5)]
    counts = [sum(row) for row in settled]
    assert 0 < counts[0] < counts[1] < counts[2]
    assert all(row == sorted(row) for row in settled)


@pytest.mark.parametrize(
    ("names", "least"),
    [(["se"], 1), (["use"], 1), (["clip", "use"], 1), (["mta"], 8), (["use:skip=false"], 8), (["se", "tpt"], 8)],
)
def test_methods_that_compare_views_get_some(names: list[str], least: int) -> None:
    assert least_views(*map(methods.get, names)) == least


@pytest.mark.parametrize(("views", "accepted"), [(16, None), ("adaptive", 0.5), ("adaptive:2%", 2.0)])
def test_what_may_change_is_the_only_setting(views: int | str, accepted: float | None) -> None:
    assert accepted_changes(views) == accepted
    assert most_views(views) == (views if accepted is None else 64)


@pytest.fixture
def classifier(tiny_model: CLIP) -> Classifier:
    return Classifier(CLASSES, tiny_model, "se", views="adaptive", batch_size=4)


def test_the_answer_is_that_of_the_views_that_were_looked_at(tiny_model: CLIP, classifier: Classifier) -> None:
    images = [make_image(i) for i in range(12)]
    answers = classifier(images)
    counts = [len(answer.entropies) for answer in answers]
    assert set(counts) <= set(STAGES)
    assert len(set(counts)) > 1, "the test needs images that are settled early and others that are not"
    for image, answer, count in zip(images, answers, counts, strict=True):
        alone = Classifier(CLASSES, tiny_model, "se" if count > 1 else "clip", views=count)(image)
        np.testing.assert_allclose(answer.probs, alone.probs, atol=1e-5)
        assert answer.to_dict()["why"]["views"] == count


def test_zero_shot_needs_no_other_view(tiny_model: CLIP) -> None:
    answer = Classifier(CLASSES, tiny_model, "clip", views="adaptive")(make_image(0))
    assert len(answer.entropies) == 1


@pytest.mark.parametrize("augmix", [False, True])
def test_views_in_parts_are_the_views(augmix: bool) -> None:
    image = make_image(3)
    recipe = ViewRecipe(views=20, size=32, augmix=augmix)
    parts = [make_views(image, image_id(image), recipe, part=part) for part in stages(20)]
    assert torch.equal(torch.cat(parts), make_views(image, image_id(image), recipe))


def test_anything_but_a_number_or_adaptive_is_refused(
    tiny_model: CLIP, tiny_checkpoint: Path, images: list[Path]
) -> None:
    for wrong in ("few", "adaptive:0%", "adaptive:1"):
        with pytest.raises(ValueError, match=rf"from 0.2% to 5%, not '{wrong}'"):
            Classifier(CLASSES, tiny_model, views=wrong)
    options = [str(images[0]), "--classes", "cat,dog", "--model", str(tiny_checkpoint), "--views"]
    refused = CliRunner().invoke(app, ["classify", *options, "few"])
    assert refused.exit_code == 2
    assert "--views must be a number from 1 to 1024 or 'adaptive', not 'few'" in refused.stderr
    assert CliRunner().invoke(app, ["classify", *options, "adaptive"]).exit_code == 0
