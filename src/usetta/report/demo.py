"""The page of `usetta demo`: one row per photograph, the methods side by side, no script and nothing from elsewhere."""

from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(rows: list[dict[str, Any]], *, model_name: str, views: int, classes: Sequence[str]) -> str:
    """The HTML page for `rows` as `usetta.demo.write_report` makes them."""
    environment = Environment(
        loader=PackageLoader("usetta.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    methods = list(rows[0]["methods"])
    right = {method: sum(row["methods"][method]["right"] for row in rows) for method in methods}
    return environment.get_template("demo.html.j2").render(
        rows=rows, methods=methods, right=right, model_name=model_name, views=views, classes=classes
    )
