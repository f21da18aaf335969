"""From views to answers: the weak view goes by itself, and what cannot work is told before."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_image
from evaluate.runs import CLASSES, four_blocks
from models.tiny import TINY_RESNET, disturbed
from usetta import methods
from usetta.episode import Episode, answer, check, encode, encode_together, encode_with_hidden
from usetta.methods.recipe import run
from usetta.models.clip import CLIP
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

VIEWS = 20


@pytest.fixture(scope="module")
def model() -> CLIP:
    return four_blocks()


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return make_views(make_image(1), "image", ViewRecipe(views=VIEWS, size=32))


def test_features_of_the_weak_view_do_not_depend_on_others(model: CLIP, pixels: Tensor) -> None:
    features = encode(model, pixels)
    assert features.shape == (VIEWS, 32)
    for others in (1, 2, 9, VIEWS):
        assert torch.equal(encode(model, pixels[:others])[0], features[0])
    torch.testing.assert_close(features, model.encode_images(pixels), atol=1e-6, rtol=0)
    weak, _ = encode_with_hidden(model, pixels[:1])
    assert torch.equal(encode_with_hidden(model, pixels)[0][0], weak[0])


@pytest.mark.parametrize("counts", [(1, 1, 1), (VIEWS, 5, 1), (VIEWS,)])
def test_images_that_are_encoded_together_get_their_own_features(
    model: CLIP, pixels: Tensor, counts: tuple[int, ...]
) -> None:
    images = [pixels.flip(-1)[:count] if i else pixels[:count] for i, count in enumerate(counts)]
    for found, image in zip(encode_together(model, images), images, strict=True):
        torch.testing.assert_close(found, encode(model, image), atol=1e-6, rtol=0)


def test_hidden_states_lead_to_the_same_features(model: CLIP, pixels: Tensor) -> None:
    features, states = encode_with_hidden(model, pixels)
    assert torch.equal(features, encode(model, pixels))  # else methods would answer otherwise in TTL's company
    assert states.shape == (VIEWS, 17, 64)
    torch.testing.assert_close(model.last_blocks().encode(states), features, atol=1e-6, rtol=0)


@pytest.mark.parametrize("augmix", [False, True])
def test_views_of_another_size_are_brought_to_that_of_the_model(augmix: bool) -> None:
    larger, model = disturbed(TINY_RESNET), four_blocks()
    views = make_views(make_image(1), "image", ViewRecipe(views=3, size=32, augmix=augmix))
    assert larger.image_size == 64
    assert encode(larger, views).shape == (3, larger.embed_dim)
    flat = torch.full((2, 3, 96, 96), 128, dtype=torch.uint8)
    torch.testing.assert_close(encode(larger, flat), encode(larger, flat[..., :64, :64] / 255), atol=1e-5, rtol=0)
    torch.testing.assert_close(encode(model, flat), encode(model, flat[..., :32, :32]), atol=1e-5, rtol=0)


def test_answers_for_a_batch_are_those_of_the_recipe(model: CLIP, pixels: Tensor) -> None:
    other = make_views(make_image(2), "other", ViewRecipe(views=VIEWS, size=32))
    episodes = [Episode(*_features(model, each)) for each in (pixels, other)]
    prompts = ClassPrompts(model.text, CLASSES)
    features = torch.stack([each.features for each in episodes])
    se = answer(methods.get("se"), episodes, model, prompts)
    assert torch.equal(se.probs, run(methods.get("se"), features, prompts, model.logit_scale).probs)
    for name in ("ttl", "rlcf"):
        both = answer(methods.get(name), episodes, model, prompts)
        for i, episode in enumerate(episodes):
            alone = answer(methods.get(name), [episode], model, prompts)
            torch.testing.assert_close(both.probs[i], alone.probs[0], atol=1e-5, rtol=0)


def _features(model: CLIP, pixels: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    features, states = encode_with_hidden(model, pixels)
    return features, None, states


def test_a_judge_is_asked_about_its_own_features_and_words(model: CLIP, pixels: Tensor) -> None:
    features, prompts = encode(model, pixels), ClassPrompts(model.text, CLASSES)
    # Of three classes that a view prefers, the judge rewards the one that it has as its own feature.
    words = ClassPrompts(model.text, CLASSES)
    rlcf = methods.get("rlcf:steps=9")

    def judged_as(label: int) -> Tensor:
        wanted = words.features()[label].expand(VIEWS, -1)
        return answer(rlcf, [Episode(features, wanted)], model, prompts, words).probs[0]

    top = answer(methods.get("clip"), [Episode(features)], model, prompts).probs[0].topk(3).indices.tolist()
    found = torch.stack([judged_as(label) for label in top])
    assert found[:, top].argmax(dim=0).tolist() == [0, 1, 2]


def test_what_tuning_has_blown_up_is_an_error(model: CLIP, pixels: Tensor) -> None:
    prompts = ClassPrompts(model.text, CLASSES)
    with pytest.raises(ValueError, match="'tpt:lr=1e\\+30' tuned until nothing but NaN was left; its settings"):
        answer(methods.get("tpt:lr=1e30"), [Episode(encode(model, pixels))], model, prompts)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("se", {"views": 1}, "method 'se' compares views, so it needs at least 2, not 1"),
        (
            "ttl",
            {"model": disturbed(TINY_RESNET)},
            "the image tower of tiny has no attention blocks .* which TTL needs",
        ),
        ("tpt", {"templates": ("a {}.", "the {}.")}, "method 'tpt' tunes the prompt, but .*; give one template"),
        ("use", {"templates": "{}."}, "method 'use' tunes the prompt, but .*; give one template with words before"),
    ],
)
def test_what_a_recipe_lacks_is_told(method: str, options: dict[str, Any], message: str) -> None:
    model = options.get("model", four_blocks())
    prompts = ClassPrompts(model.text, CLASSES, options.get("templates", "a photo of a {}."))
    with pytest.raises(ValueError, match=message):
        check(methods.get(method), model, prompts, options.get("views", 64))


def test_what_a_recipe_does_not_need_may_be_missing() -> None:
    resnet = disturbed(TINY_RESNET)
    ensemble = ClassPrompts(resnet.text, CLASSES, "ensemble")
    for method, views in (("clip", 1), ("se", 2), ("tps", 2), ("zero", 64), ("se:beta=1.0", 1)):
        check(methods.get(method), resnet, ensemble, views)
    check(methods.get("ttl"), four_blocks(), ClassPrompts(four_blocks().text, CLASSES), 2)
