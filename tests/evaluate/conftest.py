from pathlib import Path

import pytest

from evaluate.runs import four_blocks, make_dataset
from usetta.data import Dataset
from usetta.models.clip import CLIP


@pytest.fixture(scope="session")
def model() -> CLIP:
    return four_blocks()


@pytest.fixture
def things(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "things")
