"""What tests of HTML pages share: a reader that collects what a page is made of, and pages without figures."""

from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure

from usetta.report import explain, figures, trust_figures

VOID = frozenset({"br", "hr", "img", "meta"})
DRAWINGS = (
    *((figures, name) for name in ("gains", "reliability", "skips", "cost")),
    *((trust_figures, name) for name in ("over_the_stream", "order_sensitivity")),
    (explain, "view_grid"),
)
"""The functions that draw the figures of a report."""


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text; an element that is not closed is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(str(html))  # a Markup would escape what it is joined with
        self.close()
        assert self._open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag} {attrs}>"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "title"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of all elements of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


def leave_figures_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them takes longer than all the rest of a report."""
    for module, name in DRAWINGS:
        monkeypatch.setattr(module, name, lambda *_, **__: Figure(figsize=(1, 1)))
