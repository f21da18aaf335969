"""A prediction as HTML: the image, bars of the best classes, and the views that count."""

import re
from pathlib import Path

from conftest import make_image
from report.pages import Page
from usetta import Classifier
from usetta.models.clip import CLIP

CLASSES = ["cat", "red <fox>", "owl", "lemon", "bridge", "boat"]


def test_it_shows_the_image_the_best_classes_and_the_views_that_count(tiny_model: CLIP) -> None:
    prediction = Classifier(CLASSES, tiny_model, "se", views=40)(make_image(0))
    html = prediction._repr_html_()
    page = Page(html)
    assert len(page.all("img")) == 1 + 1 + 3  # the image, the weak view and the three chosen of 39 strong ones
    assert all(image["src"].startswith("data:image/jpeg;base64,") for image in page.all("img"))
    assert "40 views" in page.text
    assert f"{prediction.label} {100 * prediction.confidence:.1f} %" in page.text
    bars = [int(width) for width in re.findall(r"width: (\d+)px; background", html)]
    assert bars == [round(200 * probability) for _, probability in prediction.ranked(5)]
    assert "<fox>" not in html


def test_without_the_image_the_rest_is_shown(tiny_model: CLIP, tmp_path: Path) -> None:
    path = tmp_path / "gone.png"
    make_image(0).save(path)
    prediction = Classifier(CLASSES, tiny_model, "clip")(path)
    path.unlink()
    page = Page(prediction._repr_html_())
    assert page.all("img") == []
    assert "1 view" in page.text
    assert prediction.label in page.text


def test_a_comparison_shows_each_explanation_with_its_own_views(tiny_model: CLIP) -> None:
    comparison = Classifier(CLASSES, tiny_model, views=12).compare(make_image(1), ["clip", "use"])
    assert repr(comparison[1]) == f"<Explanation of <Image> by use: {comparison[1].prediction.label}, 12 views>"
    assert len(repr(comparison)) < 200
    page = Page(comparison._repr_html_())
    for explanation in comparison:
        assert f"{explanation.method}: {explanation.prediction.label}" in page.text
        # The views that an explanation holds are those that a prediction makes again.
        assert explanation._repr_html_().count("<img") == explanation.prediction._repr_html_().count("<img")
        assert (sources := [image["src"] for image in Page(explanation._repr_html_()).all("img")])
        assert sources == [image["src"] for image in Page(explanation.prediction._repr_html_()).all("img")]
