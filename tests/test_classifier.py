from pathlib import Path

import numpy as np
import pytest

from conftest import make_picture
from usetta import Classifier, ImageError, Prediction, Recipe
from usetta.images import open_image, picture_id
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.recipe import run
from usetta.views import ViewRecipe, make_views

CLASSES = ["tabby_cat", "red fox", "golden retriever"]


@pytest.fixture
def classifier(tiny_model: CLIP) -> Classifier:
    return Classifier(CLASSES, tiny_model, views=16)


def test_it_is_the_recipe_on_the_views(classifier: Classifier, tiny_model: CLIP, pictures: list[Path]) -> None:
    image = open_image(pictures[0])
    features = tiny_model.encode_images(make_views(image, picture_id(image), ViewRecipe(views=16, size=32)))
    text = ClassPrompts(tiny_model.text, CLASSES).features()
    expected = run(classifier.recipe, features[None], text, tiny_model.logit_scale)
    answer = classifier(pictures[0])
    np.testing.assert_allclose(answer.probs, expected.probs[0].numpy(), atol=1e-7)
    np.testing.assert_allclose(answer.zero_shot, expected.weak_probs[0].numpy(), atol=1e-7)
    assert answer.beta == pytest.approx(expected.beta[0].item())
    assert answer.delta == pytest.approx(expected.delta[0].item())
    assert answer.chosen == tuple(expected.chosen[0].tolist())
    assert len(answer.entropies) == len(answer.view_labels) == 16


def test_label_confidence_and_ranking_agree(classifier: Classifier, pictures: list[Path]) -> None:
    answer = classifier(pictures[0])
    ranked = answer.ranked()
    assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
    assert ranked[0] == (answer.label, answer.confidence)
    assert answer.label in CLASSES  # as the user wrote it, not as it was cleaned
    assert answer.ranked(2) == ranked[:2]
    plain = answer.as_dict(top=2)
    assert plain["label"] == answer.label
    assert [row["label"] for row in plain["ranked"]] == [label for label, _ in ranked[:2]]
    assert plain["why"]["chosen_views"] == list(answer.chosen)


def test_path_image_array_and_bytes_are_one_picture(classifier: Classifier, pictures: list[Path]) -> None:
    image = open_image(pictures[0])
    kinds = [pictures[0], str(pictures[0]), image, np.asarray(image), pictures[0].read_bytes()]
    answers = [classifier(kind).probs for kind in kinds]
    for other in answers[1:]:
        np.testing.assert_array_equal(answers[0], other)


def test_batch_size_and_order_change_nothing(tiny_model: CLIP, pictures: list[Path]) -> None:
    one_by_one = Classifier(CLASSES, tiny_model, views=16).predict_proba(pictures)
    for batch_size in (2, 3, 5, 8):
        classifier = Classifier(CLASSES, tiny_model, views=16, batch_size=batch_size)
        np.testing.assert_allclose(classifier.predict_proba(pictures), one_by_one, atol=1e-6)
        np.testing.assert_allclose(classifier.predict_proba(pictures[::-1])[::-1], one_by_one, atol=1e-6)


def test_the_seed_decides_the_views(tiny_model: CLIP, pictures: list[Path]) -> None:
    first, again, other = (Classifier(CLASSES, tiny_model, views=16, seed=s)(pictures[0]) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.probs, again.probs)
    assert first.entropies[0] == other.entropies[0]
    assert not np.allclose(first.entropies[1:], other.entropies[1:])


def test_zero_shot_is_the_weak_view_and_encodes_no_other(tiny_model: CLIP, pictures: list[Path]) -> None:
    clip = Classifier(CLASSES, tiny_model, method="clip")(pictures[0])
    se = Classifier(CLASSES, tiny_model, method="se", views=16)(pictures[0])
    np.testing.assert_allclose(clip.probs, se.zero_shot, atol=1e-6)
    assert len(clip.entropies) == 1
    assert clip.chosen == ()
    assert clip.delta is None
    assert clip.beta == 1


def test_scikit_learn_s_conventions(classifier: Classifier, pictures: list[Path]) -> None:
    probs = classifier.predict_proba(pictures)
    assert probs.shape == (5, 3)
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    assert classifier.predict(pictures).tolist() == classifier.classes_[probs.argmax(axis=1)].tolist()
    assert classifier.predict(pictures[0]).shape == (1,)
    assert classifier.predict_proba([]).shape == (0, 3)
    assert classifier([]) == []


def test_a_bad_picture_does_not_lose_the_others(tiny_model: CLIP, pictures: list[Path]) -> None:
    pictures[2].write_bytes(b"")
    for batch_size in (1, 3, 5):
        classifier = Classifier(CLASSES, tiny_model, views=4, batch_size=batch_size)
        outcomes = list(classifier.stream(pictures))
        assert [isinstance(o, Prediction) for o in outcomes] == [True, True, False, True, True]
        assert [o.source for o in outcomes if isinstance(o, Prediction)] == [
            str(p) for i, p in enumerate(pictures) if i != 2
        ]
        with pytest.raises(ImageError, match=r"picture-2.png: file is empty"):
            classifier(pictures)


def test_augmix_gives_other_strong_views(tiny_model: CLIP, pictures: list[Path]) -> None:
    plain, mixed = (Classifier(CLASSES, tiny_model, views=8, augmix=a)(pictures[0]) for a in (False, True))
    assert plain.entropies[0] == pytest.approx(mixed.entropies[0], abs=1e-5)
    assert not np.allclose(plain.entropies[1:], mixed.entropies[1:])


def test_a_recipe_of_one_s_own(tiny_model: CLIP, pictures: list[Path]) -> None:
    answer = Classifier(CLASSES, tiny_model, method=Recipe("mine", beta=0.25, rho=0.5), views=9)(pictures[0])
    assert answer.beta == 0.25
    assert len(answer.chosen) == 4


@pytest.mark.parametrize("augmix", [False, True])
@pytest.mark.parametrize("method", ["clip", "se"])
def test_an_explanation_shows_the_views_it_was_made_from(
    tiny_model: CLIP, tmp_path: Path, method: str, augmix: bool
) -> None:
    image = make_picture(3)
    explanation = Classifier(CLASSES, tiny_model, method=method, views=12, augmix=augmix).explain(image)
    assert explanation.views.shape == (12, 32, 32, 3)
    assert explanation.views.dtype == np.uint8
    assert explanation.prediction.entropies.shape == (12,)
    explanation.save(tmp_path / "figure.png", shown=5)
    assert open_image(tmp_path / "figure.png").width > 1000


def test_wrong_settings_are_named(tiny_model: CLIP) -> None:
    with pytest.raises(ValueError, match="'se' compares views, so it needs at least 2, not 1"):
        Classifier(CLASSES, tiny_model, views=1)
    with pytest.raises(ValueError, match="unknown method 'es'"):
        Classifier(CLASSES, tiny_model, method="es")
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        Classifier(CLASSES, tiny_model, batch_size=0)
    with pytest.raises(ValueError, match="a list of names, not one string"):
        Classifier("cat", tiny_model)
