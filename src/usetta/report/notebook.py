"""A prediction as HTML for a notebook: the image, bars of the best classes, and the views that count.

The views are made again from the image, so a prediction need not keep them.
"""

from collections.abc import Iterator

from PIL import Image

from usetta.images import ImageError, image_id, open_image
from usetta.prediction import Prediction
from usetta.report.html import render, thumbnail
from usetta.views import ViewRecipe
from usetta.views.show import view_image

_CLASSES = 5
_VIEWS = 6
_SIDE = 96
"""Pixels of a view."""


def prediction_html(prediction: Prediction) -> str:
    """A piece of HTML that stands alone; without the image where that cannot be opened again."""
    image = _image(prediction)
    views: list[dict[str, str]] = []
    if image and prediction.origin:
        views = list(_views(prediction, image, prediction.origin.views))
    zero_shot = dict(zip(prediction.classes, prediction.zero_shot.tolist(), strict=True))
    return render(
        "prediction.html.j2",
        prediction=prediction,
        image=thumbnail(image, 2 * _SIDE) if image else "",
        bars=[(label, probability, zero_shot[label]) for label, probability in prediction.ranked(_CLASSES)],
        views=views,
        count=len(prediction.entropies),
        side=_SIDE,
    )


def _image(prediction: Prediction) -> Image.Image | None:
    if prediction.origin is None:
        return None
    source = prediction.origin.source
    try:
        return open_image(source() if callable(source) else source)
    except ImageError:  # moved or closed since
        return None


def _views(prediction: Prediction, image: Image.Image, recipe: ViewRecipe) -> Iterator[dict[str, str]]:
    """The views that count, by falling weight, with what each would choose by itself."""
    name = image_id(image)
    ranked = sorted(range(len(prediction.weights)), key=lambda view: -float(prediction.weights[view]))
    for view in ranked[:_VIEWS]:
        weight = float(prediction.weights[view])
        if weight > 0:
            yield {
                "image": thumbnail(view_image(image, name, view, recipe), _SIDE),
                "label": prediction.view_labels[view],
                "weight": f"{weight:.0%}",
            }
