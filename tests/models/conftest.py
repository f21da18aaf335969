"""Fixtures of the model tests."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from models.fake_hub import Hub, serve
from models.tiny import TINY_RESNET, TINY_VIT, disturbed
from usetta.models.clip import CLIP


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
