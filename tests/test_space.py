"""The Gradio Space of `examples/space`, run against a stand-in for Gradio, which tests do not install."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import make_image
from usetta import Classifier
from usetta.models.clip import CLIP

SPACE = Path(__file__).parents[1] / "examples" / "space"


def test_the_space_answers_as_the_classifier_does(
    monkeypatch: pytest.MonkeyPatch, tiny_model: CLIP, tiny_checkpoint: Path
) -> None:
    parts = {name: lambda *_given, **_named: None for name in ("Image", "Textbox", "CheckboxGroup", "Label", "Plot")}
    fake = SimpleNamespace(
        **parts, Dataframe=parts["Label"], Error=RuntimeError, Interface=lambda function, **_named: function
    )
    monkeypatch.setitem(sys.modules, "gradio", fake)  # type: ignore[arg-type]
    monkeypatch.setenv("USETTA_MODEL", str(tiny_checkpoint))
    app: dict[str, Any] = runpy.run_path(str(SPACE / "app.py"))
    best, rows, figure = app["demo"](make_image(3), "tabby cat\n\nred fox \n", ["clip", "use"])
    expected = Classifier(["tabby cat", "red fox"], tiny_model, "use")(make_image(3))
    assert best == pytest.approx(dict(expected.ranked()), abs=1e-5)
    assert [row[0] for row in rows] == ["clip", "use"]
    assert figure.axes
    with pytest.raises(RuntimeError, match="at least two classes"):
        app["demo"](make_image(3), "tabby cat", ["clip"])
    with pytest.raises(RuntimeError, match="class name number 2 is empty"):
        app["demo"](make_image(3), "tabby cat\n_", ["clip"])
