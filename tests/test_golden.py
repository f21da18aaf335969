"""No change of the code may change an answer: probabilities of every method, compared with a committed file.

The file was written before the second version of the architecture by `python tests/test_golden.py`. Write it again only
where an answer is meant to change, and say so in the changelog.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import make_image
from evaluate.runs import CLASSES, four_blocks
from usetta import methods
from usetta.classifier import Classifier

GOLDEN = Path(__file__).with_name("golden.json")
PLUG_INS = ("tpt+se", "c-tpt+se", "r-tpt+se", "sts+se", "tpt+uniform", "rce+uniform", "use:steps=2:gamma=0.2")
AUGMIX = ("se", "use")
ADAPTIVE = ("se", "mta", "use")
SIZES = (
    *((60, 40), (40, 60), (32, 32), (33, 97), (120, 31), (64, 64)),
    *((50, 48), (31, 31), (90, 70), (8, 8), (200, 20), (57, 57)),
)
VIEWS = 32
"""Enough that three strong views are chosen: with one, some methods are the same."""


def cases() -> dict[str, tuple[str, dict[str, object]]]:
    """Method and settings of each case by its name."""
    plain = {name: (name, {"views": VIEWS}) for name in (*methods.names(), *PLUG_INS)}
    augmix = {f"{name}, augmix": (name, {"views": VIEWS, "augmix": True}) for name in AUGMIX}
    adaptive = {f"{name}, adaptive": (name, {"views": "adaptive"}) for name in ADAPTIVE}
    ensemble = {"se, ensemble": ("se", {"views": VIEWS, "templates": "ensemble"})}
    return plain | augmix | adaptive | ensemble


def answers(name: str) -> np.ndarray:
    """Probabilities (12, C) of a case."""
    method, settings = cases()[name]
    classifier = Classifier(CLASSES, four_blocks(), method, **settings)  # type: ignore[arg-type]
    return classifier.predict_proba([make_image(100 + i, size) for i, size in enumerate(SIZES)], progress=False)


@pytest.mark.parametrize("name", cases())
def test_the_answers_are_those_of_the_first_version(name: str) -> None:
    golden = np.array(json.loads(GOLDEN.read_text())[name])
    assert answers(name) == pytest.approx(golden, abs=1e-5)


def test_the_answers_of_methods_differ() -> None:
    """Else the file would guard nothing."""
    golden = {name: np.array(probs) for name, probs in json.loads(GOLDEN.read_text()).items()}
    assert golden.keys() == cases().keys()
    spread = np.stack([golden[name] for name in methods.names()])
    assert len({tuple(probs.argmax(axis=-1)) for probs in spread}) > 5
    same = {("mem", "tpt"), ("tpt-rce", "tpt"), ("tpt", "tpt-rce")}
    for one in methods.names():
        for other in methods.names():
            if one != other and (one, other) not in same:
                assert np.abs(golden[one] - golden[other]).max() > 1e-4, (one, other)


if __name__ == "__main__":
    values = {name: answers(name).astype(float).round(7).tolist() for name in cases()}
    GOLDEN.write_text("{\n" + ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in values.items()) + "\n}\n")
