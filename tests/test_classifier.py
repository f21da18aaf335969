from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.torch import save_file

from conftest import make_image
from data.server import serve
from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta import Classifier, Explanation, ImageError, Prediction, Recipe, classify, methods
from usetta.images import image_id, open_image
from usetta.methods.recipe import Reward, run
from usetta.models.base import encode_views
from usetta.models.clip import CLIP
from usetta.models.config import CLIPConfig
from usetta.prompts import ClassPrompts
from usetta.views import ViewRecipe, make_views

CLASSES = ["tabby_cat", "red fox", "golden retriever"]
AGREE, DISAGREE = 2, 3
"""Images of whose 16 views the tiny model's weak and most confident ones agree, and disagree."""


@pytest.fixture
def classifier(tiny_model: CLIP) -> Classifier:
    return Classifier(CLASSES, tiny_model, views=16)


@pytest.mark.parametrize("method", ["se", "uniform", "clip+reliability", "use", "tpt", "r-tpt", "use:steps=2"])
@pytest.mark.parametrize("number", [AGREE, DISAGREE])
def test_it_is_the_recipe_on_the_views(tiny_model: CLIP, method: str, number: int) -> None:
    recipe, image = methods.get(method), make_image(number)
    features = encode_views(tiny_model, make_views(image, image_id(image), ViewRecipe(views=16, size=32)))
    expected = run(recipe, features[None], ClassPrompts(tiny_model.text, CLASSES), tiny_model.logit_scale)
    answer = Classifier(CLASSES, tiny_model, method, views=16)(image)
    np.testing.assert_allclose(answer.probs, expected.probs[0].numpy(), atol=1e-6)
    np.testing.assert_allclose(answer.zero_shot, expected.weak_probs[0].numpy(), atol=1e-6)
    np.testing.assert_allclose(answer.weights, expected.weights[0].numpy(), atol=1e-6)
    assert answer.delta == pytest.approx(expected.delta[0].item())
    assert answer.chosen == tuple(expected.chosen[0].tolist())
    assert len(answer.entropies) == len(answer.view_labels) == len(answer.weights) == 16
    if recipe.tunes:
        np.testing.assert_allclose(answer.before, expected.before[0].numpy(), atol=1e-6)
        assert answer.skipped is expected.skipped[0].item()
        if method.startswith("use"):
            assert answer.skipped is (number == AGREE)
            # What it tunes on is chosen before the tuning, `chosen` after it.
            most_confident = 1 + np.argsort(answer.entropies[1:], kind="stable")[: len(answer.chosen)]
            assert answer.tuned_on == (() if answer.skipped else (0, *most_confident))
    else:
        assert (answer.before, answer.skipped, answer.tuned_on) == (None, None, ())


def test_beta_is_the_weak_view_s_weight_in_the_answer_or_nothing(tiny_model: CLIP) -> None:
    answers = {
        method: Classifier(CLASSES, tiny_model, method, views=16).explain(make_image(DISAGREE)).prediction
        for method in ("clip", "tpt", "strong", "uniform", "se", "use", "r-tpt", "zero", "mta", "sts")
    }
    betas = {method: answer.beta for method, answer in answers.items()}
    assert betas["clip"] == betas["tpt"] == 1
    assert betas["strong"] == 0
    assert betas["uniform"] == pytest.approx(1 / 2)  # one of 15 strong views is chosen
    assert betas["se"] == betas["use"] == pytest.approx(0.5 + 0.4 * (answers["se"].delta - 0.5))  # type: ignore[operator]
    assert {betas[method] for method in ("r-tpt", "zero", "mta", "sts")} == {None}
    for answer in answers.values():
        assert answer.weights.sum() == pytest.approx(1)


def test_tpt_looks_at_the_most_confident_of_all_views(tiny_model: CLIP) -> None:
    for number in range(8):
        answer = Classifier(CLASSES, tiny_model, "tpt:rho=0.25", views=16)(make_image(number))
        assert answer.tuned_on == tuple(np.argsort(answer.entropies, kind="stable")[:4])


@pytest.mark.parametrize(
    "config", [TINY_VIT, replace(TINY_VIT, activation="gelu"), TINY_RESNET], ids=["vit", "vit-gelu", "resnet"]
)
@pytest.mark.parametrize("method", ["use:skip=false", "tpt", "c-tpt", "r-tpt"])
def test_every_architecture_can_be_tuned(config: CLIPConfig, method: str) -> None:
    answer = Classifier(CLASSES, disturbed(config), method, views=8)(make_image(0))
    assert answer.before is not None
    assert answer.probs.sum() == pytest.approx(1)
    assert np.abs(answer.probs - answer.before).max() > 1e-4


def test_label_confidence_and_ranking_agree(classifier: Classifier, images: list[Path]) -> None:
    answer = classifier(images[0])
    ranked = answer.ranked()
    assert [p for _, p in ranked] == sorted((p for _, p in ranked), reverse=True)
    assert ranked[0] == (answer.label, answer.confidence)
    assert answer.label in CLASSES  # as the user wrote it, not as it was cleaned
    assert answer.ranked(2) == ranked[:2]
    plain = answer.to_dict(top=2)
    assert plain["label"] == answer.label
    assert [row["label"] for row in plain["ranked"]] == [label for label, _ in ranked[:2]]
    assert plain["why"]["chosen_views"] == list(answer.chosen)


def prediction(**changes: Any) -> Prediction:
    """SE's answer for an image with one strong view that counts and one that does not."""
    plain = Prediction(
        source="cat.png",
        classes=("cat", "dog"),
        probs=np.array([0.63, 0.37]),
        zero_shot=np.array([0.5, 0.5]),
        before=None,
        skipped=None,
        tuned_on=(),
        entropies=np.array([0.69, 0.2, 0.6]),
        view_labels=("cat", "cat", "dog"),
        chosen=(1,),
        delta=0.0,
        beta=0.3,
        weights=np.array([0.3, 0.7, 0.0]),
    )
    return replace(plain, **changes)


TUNED = {"skipped": False, "before": np.array([0.41, 0.59]), "tuned_on": (0, 1)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "the image itself counts 30.0%, its most confident view 70.0%"),
        ({"chosen": (1, 2), "beta": 0.6}, "the image itself counts 60.0%, its 2 most confident views 40.0%"),
        ({"beta": 1.0}, "zero-shot: the original image only"),
        ({"beta": None}, "2 of 3 views count, each with a weight of its own"),
        ({"skipped": True, "before": np.array([0.63, 0.37])}, "skipped: the views already agree"),
        (TUNED, "tuned: dog 59.0% -> cat 63.0%"),
        ({**TUNED, "before": np.array([0.51, 0.49])}, "tuned: cat 51.0% -> 63.0%"),
        ({**TUNED, "beta": None}, "tuned: dog 59.0% -> cat 63.0%"),
    ],
)
def test_the_reason_is_one_plain_sentence(changes: dict[str, Any], reason: str) -> None:
    answer = prediction(**changes)
    assert answer.reason == reason
    assert answer.to_dict()["why"]["reason"] == reason


def test_json_says_what_was_tuned() -> None:
    why = prediction(**TUNED).to_dict()["why"]
    assert why["before"] == {"label": "dog", "probability": 0.59}
    assert (why["skipped"], why["tuned_on"], why["weights"]) == (False, [0, 1], [0.3, 0.7, 0.0])
    plain = prediction().to_dict()["why"]
    assert (plain["before"], plain["skipped"], plain["tuned_on"]) == (None, None, [])
    assert prediction(beta=None).to_dict()["why"]["beta"] is None


def test_a_row_is_flat_and_has_the_numbers_of_the_answer() -> None:
    row = prediction(**TUNED, warnings=("one", "two")).to_row()
    assert row == {
        **{"source": "cat.png", "label": "cat", "probability": 0.63, "rejected": None, "calibrated": None},
        **{"zero_shot_label": "cat", "zero_shot_probability": 0.5},
        **{"views": 3, "beta": 0.3, "delta": 0.0, "skipped": False, "warnings": "one; two"},
    }


def test_every_kind_of_source_is_one_image(tiny_model: CLIP, images: list[Path]) -> None:
    image, clip = open_image(images[0]), Classifier(CLASSES, tiny_model, "clip")
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    with images[0].open("rb") as file, serve() as server:
        server.files["image.png"] = images[0].read_bytes()
        url = f"{server.url}/image.png"
        kinds = [images[0], str(images[0]), image, np.asarray(image), tensor, images[0].read_bytes(), file]
        answers = [clip(kind) for kind in kinds]
        answers.append(classify(url, CLASSES, model=tiny_model, method="clip", allow_urls=True))
        assert answers[-1].source == url
        assert "<img" in answers[-1]._repr_html_()
        with pytest.raises(ImageError, match="is a URL; to fetch images, make the classifier with allow_urls=True"):
            clip([url])
        absent = f"{server.url}/absent.png"
        with pytest.raises(ImageError) as caught:
            classify(absent, CLASSES, model=tiny_model, method="clip", allow_urls=True)
        assert str(caught.value) == f"{absent}: cannot be fetched: HTTP 404 Not Found"
    for other in answers[1:]:
        np.testing.assert_array_equal(answers[0].probs, other.probs)


@pytest.mark.parametrize("wrong", [None, 3, len])
def test_what_is_no_image_says_what_was_expected(classifier: Classifier, wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=r"expected an image \(a path, .* or a torch tensor\) or a list of images, not "
    ):
        classifier(wrong)


@pytest.mark.parametrize(("method", "rounding"), [("se", 1e-6), ("use", 1e-5), ("c-tpt", 1e-5)])
def test_batch_size_and_order_change_nothing(
    tiny_model: CLIP, images: list[Path], method: str, rounding: float
) -> None:
    one_by_one = Classifier(CLASSES, tiny_model, method, views=16).predict_proba(images)
    for batch_size in (2, 3, 5, 8):
        classifier = Classifier(CLASSES, tiny_model, method, views=16, batch_size=batch_size)
        np.testing.assert_allclose(classifier.predict_proba(images), one_by_one, atol=rounding)
        np.testing.assert_allclose(classifier.predict_proba(images[::-1])[::-1], one_by_one, atol=rounding)


def test_the_seed_decides_the_views(tiny_model: CLIP, images: list[Path]) -> None:
    first, again, other = (Classifier(CLASSES, tiny_model, views=16, seed=s)(images[0]) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.probs, again.probs)
    assert first.entropies[0] == other.entropies[0]
    assert not np.allclose(first.entropies[1:], other.entropies[1:])


def test_zero_shot_is_the_weak_view_and_encodes_no_other(tiny_model: CLIP, images: list[Path]) -> None:
    clip = Classifier(CLASSES, tiny_model, method="clip")(images[0])
    se = Classifier(CLASSES, tiny_model, method="se", views=16)(images[0])
    np.testing.assert_allclose(clip.probs, se.zero_shot, atol=1e-6)
    assert len(clip.entropies) == 1
    assert clip.chosen == ()
    assert clip.delta is None
    assert clip.beta == 1


def test_scikit_learn_s_conventions(classifier: Classifier, images: list[Path]) -> None:
    probs = classifier.predict_proba(images)
    assert probs.shape == (5, 3)
    np.testing.assert_allclose(probs.sum(axis=1), 1, atol=1e-6)
    assert classifier.predict(images).tolist() == classifier.classes_[probs.argmax(axis=1)].tolist()
    assert classifier.predict(images[0]).shape == (1,)
    assert classifier.predict_proba([]).shape == (0, 3)
    assert classifier([]) == []


def test_a_bad_image_does_not_lose_the_others(tiny_model: CLIP, images: list[Path]) -> None:
    images[2].write_bytes(b"")
    for batch_size in (1, 3, 5):
        classifier = Classifier(CLASSES, tiny_model, views=4, batch_size=batch_size)
        outcomes = list(classifier.stream(images))
        assert [isinstance(o, Prediction) for o in outcomes] == [True, True, False, True, True]
        assert [o.source for o in outcomes if isinstance(o, Prediction)] == [
            str(p) for i, p in enumerate(images) if i != 2
        ]
        with pytest.raises(ImageError, match=r"image-2.png: file is empty"):
            classifier(images)


def test_augmix_gives_other_strong_views(tiny_model: CLIP, images: list[Path]) -> None:
    plain, mixed = (Classifier(CLASSES, tiny_model, views=8, augmix=a)(images[0]) for a in (False, True))
    assert plain.entropies[0] == pytest.approx(mixed.entropies[0], abs=1e-5)
    assert not np.allclose(plain.entropies[1:], mixed.entropies[1:])


def test_a_classifier_and_a_prediction_show_themselves_in_a_line(tiny_model: CLIP, images: list[Path]) -> None:
    classifier = Classifier([*CLASSES, "hen"], tiny_model, "clip")
    assert repr(classifier) == (
        "<Classifier clip by tiny-random (cpu, fp32), adaptive views, 4 classes: "
        "tabby_cat, red fox, golden retriever, …>"
    )
    answer = Classifier(CLASSES, tiny_model, "clip", views=16)(images[0])
    ranked = ", ".join(f"{label} {p:.1%}" for label, p in answer.ranked())
    assert repr(answer) == f"<Prediction {images[0]}: {ranked}; zero-shot: the original image only>"


def test_a_stream_reads_images_that_are_functions_and_keeps_features(tiny_model: CLIP, tmp_path: Path) -> None:
    class Once:
        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_model, name)

        def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return tiny_model.encode_images(pixels)

    model, sources = Once(), [lambda i=i: make_image(i) for i in range(3)]
    first, again = (
        [
            o.probs
            for o in Classifier(CLASSES, model, views=8, cache=tmp_path).stream(sources)
            if isinstance(o, Prediction)
        ]
        for _ in range(2)
    )
    assert model.calls == 3 * 2, "the weak view and the strong ones of each image, once"
    np.testing.assert_array_equal(first, again)


def test_a_recipe_of_one_s_own(tiny_model: CLIP, images: list[Path]) -> None:
    answer = Classifier(CLASSES, tiny_model, method=Recipe("mine", beta=0.25, rho=0.5), views=9)(images[0])
    assert answer.beta == 0.25
    assert len(answer.chosen) == 4


@pytest.mark.parametrize("augmix", [False, True])
@pytest.mark.parametrize("method", ["clip", "se"])
def test_an_explanation_shows_the_views_it_was_made_from(
    tiny_model: CLIP, tmp_path: Path, method: str, augmix: bool
) -> None:
    image = make_image(3)
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
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        Classifier(CLASSES, tiny_model, threads=0)
    with pytest.raises(ValueError, match="a list of names, not one string"):
        Classifier("cat", tiny_model)


@pytest.mark.parametrize(
    ("templates", "reason"),
    [
        (["a {}.", "art of the {}."], "an ensemble of templates has no single context"),
        ("{} in a photo.", "there are no words before '{}'"),
    ],
)
def test_nothing_to_tune_is_an_error_before_an_image_is_read(
    tiny_model: CLIP, templates: str | list[str], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"'use' tunes the prompt, but .*{reason}.*such as 'a photo of a {{}}.'"):
        Classifier(CLASSES, tiny_model, "use", templates=templates)
    fixed = Classifier(CLASSES, tiny_model, templates=templates, views=4)
    assert fixed(make_image()).label in CLASSES
    with pytest.raises(ValueError, match="'tpt' tunes the prompt"):
        fixed.compare("no such image.png", ["se", "tpt"])


def test_tuning_that_diverges_is_no_answer(tiny_model: CLIP) -> None:
    with pytest.raises(ValueError, match=r"'tpt:lr=1e\+30' diverged"):
        Classifier(CLASSES, tiny_model, "tpt:lr=1e30", views=4)(make_image())


def texts(figure: Figure) -> list[str]:
    return [str(text.get_text()) for text in figure.findobj(Text) if text.get_text()]


def bars(figure: Figure) -> dict[str, list[float]]:
    """Lengths of the bars of each answer, by the name in the legend."""
    return {
        container.get_label(): sorted((bar.get_width() for bar in container), reverse=True)
        for container in figure.subfigs[0].axes[1].containers
    }


def framed(figure: Figure) -> list[str]:
    """Captions of the views below that have a thick frame."""
    below = [axes for axes in figure.subfigs[1].axes if axes.axison]
    return [axes.get_xlabel() for axes in below if axes.spines["left"].get_linewidth() > 2]


@pytest.mark.parametrize(
    ("method", "number", "series"),
    [
        ("clip", DISAGREE, ["zero-shot"]),
        ("se", DISAGREE, ["zero-shot", "SE"]),
        ("use", AGREE, ["zero-shot", "USE"]),
        ("use", DISAGREE, ["zero-shot", "before tuning", "USE, tuned"]),
        ("tpt", AGREE, ["zero-shot (before tuning)", "TPT, tuned"]),
        ("r-tpt", AGREE, ["zero-shot", "before tuning", "R-TPT, tuned"]),
        ("use:rho=0.5", DISAGREE, ["zero-shot", "before tuning", "USE:rho=0.5, tuned"]),
    ],
)
def test_the_figure_shows_each_answer_once(tiny_model: CLIP, method: str, number: int, series: list[str]) -> None:
    explanation = Classifier(CLASSES, tiny_model, method, views=16).explain(make_image(number))
    answer, figure = explanation.prediction, explanation.figure(8)
    shown = bars(figure)
    assert list(shown) == series
    assert shown[series[0]] == pytest.approx(sorted(answer.zero_shot, reverse=True))
    assert shown[series[-1]] == pytest.approx(sorted(answer.probs, reverse=True))
    if len(series) == 3:
        assert shown["before tuning"] == pytest.approx(sorted(answer.before, reverse=True))  # type: ignore[call-overload]
    reasons = [text for text in texts(figure) if answer.reason in text]
    assert len(reasons) == (answer.skipped is not None)


def test_the_figure_frames_what_counts_or_what_was_tuned_on(tiny_model: CLIP) -> None:
    classifier = Classifier(CLASSES, tiny_model, views=16)
    names = ["clip", "se:rho=0.2", "use:rho=0.2", "tpt:rho=0.2", "r-tpt:rho=0.2"]
    explained = dict(zip(names, classifier.compare(make_image(DISAGREE), names), strict=True))
    figures = {name: explanation.figure(15) for name, explanation in explained.items()}
    assert {name: len(framed(figure)) for name, figure in figures.items()} == dict(
        zip(names, [0, 3, 3, 3, 3], strict=True)
    )
    below = {name: figure.subfigs[1].get_suptitle() for name, figure in figures.items()}
    assert below["clip"] == "the 15 most confident of 15 strong views; the weak view answers alone"
    assert below["se:rho=0.2"].endswith("; framed: the 3 that count")
    assert below["use:rho=0.2"].endswith("before tuning; framed: the 3 that count, in tuning and in the answer")
    assert below["tpt:rho=0.2"].endswith("framed: the 3 that the prompt was tuned on; the weak view answers alone")
    assert below["r-tpt:rho=0.2"].endswith(
        "framed: the 3 that the prompt was tuned on; every view counts by its weight"
    )


def test_the_figure_gives_reliability_weights_and_no_beta(tiny_model: CLIP) -> None:
    explanation = Classifier(CLASSES, tiny_model, "r-tpt", views=16).explain(make_image(DISAGREE))
    shown = texts(explanation.figure(15))
    assert not [text for text in shown if "β" in text]
    assert sum(f"weight {weight:.1%}" in text for weight in explanation.prediction.weights for text in shown) >= 16
    heights = [bar.get_height() for bar in explanation.figure().subfigs[0].axes[2].containers[0]]
    order = np.argsort(explanation.prediction.entropies, kind="stable")
    assert heights == pytest.approx(list(explanation.prediction.weights[order]))


def test_the_figure_names_views_that_were_chosen_after_tuning() -> None:
    answer = prediction(chosen=(2,), weights=np.array([0.3, 0.0, 0.7]), delta=0.5, **TUNED)
    figure = Explanation(answer, "tpt+se", np.zeros((3, 8, 8, 3), np.uint8)).figure(1)
    assert figure.subfigs[1].get_suptitle() == (
        "the 1 most confident of 2 strong views before tuning; framed: 0 of the 1 that count, chosen after tuning"
    )
    assert "weight of the weak view: β = 0.30\nafter tuning more confident than 50% of the rest" in texts(figure)


def test_a_figure_of_the_weak_view_alone_and_of_strange_names(tiny_model: CLIP, tmp_path: Path) -> None:
    names = ["a $5 note_{ and a $10 note", "x" * 200, "cat"]
    Classifier(names, tiny_model, "clip", views=1).explain(make_image()).save(tmp_path / "one.png")
    explanation = Classifier(names, tiny_model, "use:skip=false", views=4).explain(make_image())
    explanation.save(tmp_path / "strange.svg")
    labels = explanation.figure().subfigs[0].axes[1].get_yticklabels()
    assert {r"a \$5 note_{ and a \$10 n…", "x" * 23 + "…", "cat"} == {label.get_text() for label in labels}


@pytest.mark.parametrize("method", [name for name in methods.names() if methods.get(name).tunes])
def test_every_method_that_tunes_answers_and_says_what_it_did(method: str, tiny_model: CLIP) -> None:
    classifier = Classifier(["cat", "dog", "red fox", "hen"], tiny_model, methods.get(method, skip=False), views=12)
    answers = classifier([make_image(1), make_image(2)])
    for answer in answers:
        assert answer.probs.sum() == pytest.approx(1, abs=1e-5)
        assert answer.weights.sum() == pytest.approx(1, abs=1e-5)
        assert answer.skipped is False
        assert answer.before is not None
        assert np.abs(answer.before - answer.probs).max() > 1e-7, "something must have moved"
    assert not np.allclose(answers[0].probs, answers[1].probs, atol=1e-6)


def test_ttl_refuses_a_tower_without_blocks_before_any_image_is_read() -> None:
    with pytest.raises(ValueError, match="has no attention blocks that can be run again"):
        Classifier(["cat", "dog"], disturbed(TINY_RESNET), "ttl")


def test_rewards_come_from_the_template_whatever_context_was_learned(
    tiny_model: CLIP, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rewards = ["cat", "dog", "red fox", "hen"], []
    prompts = ClassPrompts(tiny_model.text, names)

    def noting(*arguments: Any, reward: Reward, hidden: None) -> Any:
        rewards.append(reward)
        return run(*arguments, reward=reward, hidden=hidden)

    monkeypatch.setattr("usetta.episode.run", noting)
    Classifier(names, tiny_model, "rlcf", views=20, context=prompts.context + 0.3)(make_image(3))
    (reward,) = rewards
    assert reward.features.shape == (1, 20, 32)
    torch.testing.assert_close(reward.text, prompts.features())


def test_rlcf_takes_another_reward_model(tiny_model: CLIP) -> None:
    image, names, other = make_image(3), ["cat", "dog", "red fox", "hen"], disturbed(TINY_RESNET)
    assert other.image_size != tiny_model.image_size
    answer = Classifier(names, tiny_model, "rlcf", views=20, reward_model=other)(image)
    pixels = make_views(image, image_id(image), ViewRecipe(20, tiny_model.image_size))
    size = (other.image_size, other.image_size)
    larger = torch.nn.functional.interpolate(pixels / 255, size=size, mode="bicubic", antialias=True).clamp(0, 1)
    reward = Reward(other.encode_images(larger)[None], ClassPrompts(other.text, names).features())
    features, prompts = tiny_model.encode_images(pixels)[None], ClassPrompts(tiny_model.text, names)
    expected = run(methods.get("rlcf"), features, prompts, tiny_model.logit_scale, reward=reward).probs[0]
    np.testing.assert_allclose(answer.probs, expected.numpy(), atol=1e-5)
    assert not np.allclose(answer.probs, Classifier(names, tiny_model, "rlcf", views=20)(image).probs, atol=1e-5)


@pytest.mark.parametrize("method", ["tda", "dmn", "ecalp", "bca", "tda+se"])
def test_a_stream_goes_on_from_a_saved_state_to_the_last_bit(method: str, tiny_model: CLIP, tmp_path: Path) -> None:
    images = [make_image(i, (40, 30)) for i in range(6)]
    whole = Classifier(["cat", "dog", "owl"], tiny_model, method, views=4)
    expected = whole.predict_proba(images, progress=False)
    assert whole.seen == 6
    first, second = (Classifier(["cat", "dog", "owl"], tiny_model, method, views=4) for _ in range(2))
    begun = first.predict_proba(images[:3], progress=False)
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    second.explain(images[0])  # which learns nothing
    rest = second.predict_proba(images[3:], progress=False)
    assert np.array_equal(np.concatenate([begun, rest]), expected)
    second.reset()
    assert np.array_equal(second.predict_proba(images, progress=False), expected)
    with pytest.raises(ValueError, match="with other settings"):
        Classifier(["cat", "dog", "owl"], tiny_model, f"{method}:rho=0.5").load_state(tmp_path / "state")


def test_an_image_that_cannot_be_read_cannot_be_compared(tiny_model: CLIP, tmp_path: Path) -> None:
    classifier = Classifier(["cat", "dog"], tiny_model, views=2)
    (tmp_path / "a.jpg").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"a\.jpg: not an image, or in an unsupported format"):
        classifier.compare(tmp_path / "a.jpg", ["clip", "se"])
    with pytest.raises(ImageError, match=r"b\.jpg: no such file"):
        classifier.explain(tmp_path / "b.jpg")


def test_a_file_that_is_not_the_memory_of_a_stream_is_refused(tiny_model: CLIP, tmp_path: Path) -> None:
    classifier, path = Classifier(["cat", "dog"], tiny_model, "tda", views=2), tmp_path / "state"
    classifier([make_image(1)])
    for content in (None, b"", b"no tensors"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} cannot be read as the memory of a stream: "):
            classifier.load_state(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=f"{path} is not the memory of a stream$"):
        classifier.load_state(path)
    assert classifier.seen == 1, "it still has its own"


def test_a_method_without_a_memory_has_no_state(tiny_model: CLIP) -> None:
    with pytest.raises(ValueError, match="'se' answers every image by itself"):
        Classifier(["cat", "dog"], tiny_model, "se").reset()
