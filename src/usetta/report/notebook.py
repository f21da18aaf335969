"""Predictions and explanations as HTML for a notebook: the image, bars of the best classes, and the views that count.

The views of a prediction are made again from the image, so that it need not keep them.
"""

from collections.abc import Callable, Iterator

from PIL import Image

from usetta.images import ImageError, image_id, open_image
from usetta.prediction import Explanation, Prediction
from usetta.report.html import render, thumbnail
from usetta.views.show import view_image

_CLASSES = 5
_VIEWS = 6
_SIDE = 96
"""Pixels of a view."""


def prediction_html(prediction: Prediction) -> str:
    """A piece of HTML that stands alone; without the image where that cannot be opened again."""
    image = _image(prediction)
    if image is None or prediction.origin is None:
        return _html(prediction, None, None)
    name, recipe = image_id(image), prediction.origin.views
    return _html(prediction, image, lambda view: view_image(image, name, view, recipe))


def explanation_html(explanation: Explanation) -> str:
    """The same with the name of the method; the views are those of the explanation."""
    views = explanation.views
    image = _image(explanation.prediction) or Image.fromarray(views[0])
    return _html(explanation.prediction, image, lambda view: Image.fromarray(views[view]), explanation.method)


def _html(
    prediction: Prediction, image: Image.Image | None, view: Callable[[int], Image.Image] | None, method: str = ""
) -> str:
    zero_shot = dict(zip(prediction.classes, prediction.zero_shot.tolist(), strict=True))
    return render(
        "prediction.html.j2",
        prediction=prediction,
        method=method,
        image=thumbnail(image, 2 * _SIDE) if image else "",
        bars=[(label, probability, zero_shot[label]) for label, probability in prediction.ranked(_CLASSES)],
        views=list(_views(prediction, view)) if view else [],
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


def _views(prediction: Prediction, make: Callable[[int], Image.Image]) -> Iterator[dict[str, str]]:
    """The views that count, by falling weight, with what each would choose by itself."""
    ranked = sorted(range(len(prediction.weights)), key=lambda view: -float(prediction.weights[view]))
    for view in ranked[:_VIEWS]:
        weight = float(prediction.weights[view])
        if weight > 0:
            yield {
                "image": thumbnail(make(view), _SIDE),
                "label": prediction.view_labels[view],
                "weight": f"{weight:.0%}",
            }
