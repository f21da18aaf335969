"""Fixtures of the model tests."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from models.fake_hub import Hub, serve
from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta.models import openai_files
from usetta.models.clip import CLIP


@pytest.fixture(autouse=True)
def no_openai_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever OpenAI's package has downloaded on this machine."""
    monkeypatch.setattr(openai_files, "FOLDER", tmp_path / "no such folder")


@pytest.fixture(params=["vit", "vit-gelu", "resnet"])
def tiny(request: pytest.FixtureRequest) -> CLIP:
    configs = {"vit": TINY_VIT, "vit-gelu": replace(TINY_VIT, activation="gelu"), "resnet": TINY_RESNET}
    return disturbed(configs[request.param])


@pytest.fixture
def tiny_vit() -> CLIP:
    return disturbed(TINY_VIT)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(monkeypatch) as hub:
        yield hub
