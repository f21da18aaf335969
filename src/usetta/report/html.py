"""What the HTML pages share: templates in which every value is escaped, tables, and images inside the page.

Pages load nothing from elsewhere: an image is a `data:` address, a table plain HTML.
"""

import base64
import io
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from usetta import methods
from usetta.report.style import DPI
from usetta.report.tables import Table, lay_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IN_PLAIN_WORDS = {
    "clip": "looks at the image once and picks the class whose text fits best.",
    "se": "also looks at crops, keeps the few that the model is most confident about, and mixes what they say with what "
    "the image says. The image counts more where it is more confident than its crops.",
    "tpt": "tunes the prompt for this one image until the most confident crops agree on a class, then looks at the "
    "image once more with the tuned prompt.",
    "use": "leaves the prompt alone where the image and its most confident crops already agree (skipped). Elsewhere "
    "it tunes the prompt towards the mixture that se would give, then mixes as se does.",
}


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("usetta.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> str:
    """The page that a template of this package makes of `values`."""
    return _environment().get_template(template).render(values)


def in_plain_words(method: str) -> str:
    """What a method does, for somebody who has not read the paper; most go by the description of their recipe."""
    try:
        return _IN_PLAIN_WORDS.get(method) or methods.get(method).description
    except ValueError:  # registered by whoever made the run, and not known here
        return "a method of one's own."


def fragment(table: Table) -> Markup:
    """A table as HTML: scrolls sideways where it is too wide, with its notes below."""
    return Markup(render("table.html.j2", table=lay_out(table)))  # noqa: S704  (the template escapes)


def thumbnail(image: Image.Image, side: int) -> str:
    """The address of a small copy of an RGB image, at most `side` pixels wide and high."""
    small = image.copy()
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    small.save(out, "JPEG", quality=80, optimize=True)
    return _address(out.getvalue(), "image/jpeg")


def drawn(figure: "Figure", *, images: bool = False) -> str:
    """The address of a figure, sharper than the page shows it; `images` are not kept to the last bit."""
    out = io.BytesIO()
    if images:
        figure.savefig(out, format="jpeg", dpi=1.5 * DPI, pil_kwargs={"quality": 75, "optimize": True})
        return _address(out.getvalue(), "image/jpeg")
    figure.savefig(out, format="png", dpi=2 * DPI, metadata={"Software": None})
    return _address(out.getvalue(), "image/png")


def _address(content: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
