"""The page of `usetta demo`: one row per photograph, the methods side by side, no script and nothing from elsewhere."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(
    rows: list[dict[str, Any]], *, about: dict[str, str], model_name: str, views: int, classes: Sequence[str]
) -> str:
    """The HTML page for `rows` as `usetta.demo.write_report` makes them; `about` tells of each method what it does."""
    environment = Environment(
        loader=PackageLoader("usetta.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    right = {method: sum(row["methods"][method]["right"] for row in rows) for method in about}
    return environment.get_template("demo.html.j2").render(
        rows=rows, about=about, right=right, model_name=model_name, views=views, classes=classes
    )
