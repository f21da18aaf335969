"""From features to answers, and what cannot work is an error before any image is read."""

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import make_image
from evaluate.runs import CLASSES, four_blocks
from models.tiny import TINY_RESNET, disturbed
from usetta import methods
from usetta.episode import Episode, answer, check
from usetta.methods.recipe import run
from usetta.models.base import encode_views
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


@pytest.mark.parametrize("augmix", [False, True])
def test_views_of_another_size_are_brought_to_that_of_the_model(augmix: bool) -> None:
    larger, model = disturbed(TINY_RESNET), four_blocks()
    views = make_views(make_image(1), "image", ViewRecipe(views=3, size=32, augmix=augmix))
    assert larger.image_size == 64
    assert encode_views(larger, views).shape == (3, larger.embed_dim)
    flat = torch.full((2, 3, 96, 96), 128, dtype=torch.uint8)
    torch.testing.assert_close(
        encode_views(larger, flat), encode_views(larger, flat[..., :64, :64] / 255), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(encode_views(model, flat), encode_views(model, flat[..., :32, :32]), atol=1e-5, rtol=0)


def test_answers_for_several_images_are_those_of_the_recipe_for_each(model: CLIP, pixels: Tensor) -> None:
    """Images with other numbers of views among them."""
    other = make_views(make_image(2), "other", ViewRecipe(views=VIEWS, size=32))
    episodes = [
        Episode(encode_views(model, views), hidden=model.hidden_states(views)) for views in (pixels, other[:9], other)
    ]
    prompts = ClassPrompts(model.text, CLASSES)
    for name in ("se", "tpt", "ttl", "rlcf"):
        together = answer(methods.get(name), episodes, model, prompts)
        assert [len(result.entropies) for result in together] == [VIEWS, 9, VIEWS]
        for result, episode in zip(together, episodes, strict=True):
            (alone,) = answer(methods.get(name), [episode], model, prompts)
            torch.testing.assert_close(result.probs, alone.probs, atol=1e-5, rtol=0)
            if name == "se":
                expected = run(methods.get(name), episode.features[None], prompts, model.logit_scale)
                assert torch.equal(alone.probs, expected.probs[0])


def test_episodes_of_further_views_are_added_up(model: CLIP, pixels: Tensor) -> None:
    features = encode_views(model, pixels)
    first = Episode(features[:8], features[:8], pixels=pixels[:8], seconds=1.0, encoded=False)
    both = first + Episode(features[8:], features[8:], pixels=pixels[8:], seconds=2.0, encoded=True)
    assert len(both) == VIEWS
    assert both.reward_features is not None
    assert both.pixels is not None
    assert torch.equal(both.features, features)
    assert torch.equal(both.reward_features, features)
    assert torch.equal(both.pixels, pixels)
    assert (both.hidden, both.seconds, both.encoded) == (None, 3.0, True)


def test_the_reward_model_has_features_and_prompts_of_its_own(model: CLIP, pixels: Tensor) -> None:
    features, prompts = encode_views(model, pixels), ClassPrompts(model.text, CLASSES)
    # Of three classes that a view prefers, the one is rewarded whose text feature the reward model sees in every view.
    reward_prompts = ClassPrompts(model.text, CLASSES)
    rlcf = methods.get("rlcf:steps=9")

    def rewarded(label: int) -> Tensor:
        wanted = reward_prompts.features()[label].expand(VIEWS, -1)
        return answer(rlcf, [Episode(features, wanted)], model, prompts, reward_prompts)[0].probs

    top = answer(methods.get("clip"), [Episode(features)], model, prompts)[0].probs.topk(3).indices.tolist()
    probs = torch.stack([rewarded(label) for label in top])
    assert probs[:, top].argmax(dim=0).tolist() == [0, 1, 2]


def test_tuning_that_diverges_is_an_error(model: CLIP, pixels: Tensor) -> None:
    prompts = ClassPrompts(model.text, CLASSES)
    with pytest.raises(ValueError, match="'tpt:lr=1e\\+30' diverged .*: lower its lr or its steps"):
        answer(methods.get("tpt:lr=1e30"), [Episode(encode_views(model, pixels))], model, prompts)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("se", {"views": 1}, "method 'se' compares views, so it needs at least 2, not 1"),
        (
            "ttl",
            {"model": disturbed(TINY_RESNET)},
            "TTL",
        ),
        ("tpt", {"templates": ("a {}.", "the {}.")}, "method 'tpt' tunes the prompt, but .*; give one template"),
        ("use", {"templates": "{}."}, "method 'use' tunes the prompt, but .*; give one template with words before"),
    ],
)
def test_what_a_recipe_lacks_is_an_error(method: str, options: dict[str, Any], message: str) -> None:
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
