"""A classifier in processes of `multiprocessing`, forked after it has computed in several threads, or started anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, sys, numpy
from conftest import make_image
from evaluate.runs import CLASSES, four_blocks
from usetta import Classifier

def make():
    return Classifier(CLASSES, four_blocks(), "use", views=8)

def answer(classifier, queue):
    queue.put((classifier or make())(make_image(3, (60, 50))).probs)

if __name__ == "__main__":
    classifier, context = make(), multiprocessing.get_context(sys.argv[1])
    expected, queue = classifier(make_image(3, (60, 50))).probs, context.Queue()
    given = classifier if sys.argv[1] == "fork" else None  # what is not forked makes its own
    child = context.Process(target=answer, args=(given, queue), daemon=True)
    child.start()
    numpy.testing.assert_allclose(queue.get(timeout=100), expected, atol=1e-5)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_has_the_answers_of_its_parent(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, script, method], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
