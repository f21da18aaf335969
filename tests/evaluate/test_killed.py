"""A run may be killed at any instant: the same command continues it, and the end is that of a run left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evaluate.runs import content
from usetta.evaluate.store import Store


@pytest.mark.slow
def test_killed_runs_end_like_one_that_was_left_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evaluate.victim", str(tmp_path), "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert all(report["ended"].values()), (report, done.stderr)
    assert all(report["struck"].values()), report
    assert report["torn"] == 0
    assert report["killed"] >= 10
    assert report["killed beside another"] >= 3
    assert report["refused"] >= 3
    assert report["killed in a stream"] == 10
    whole = content(tmp_path / "whole")
    assert len(whole.rows) == 19 * 2 * 4 + 19 * 2 * 2 * 2  # of four methods, and of two in two orders
    assert len(whole.seen) == 19 * 2
    assert [reason for _, _, reason in whole.bad] == ["file is empty"]
    streams = content(tmp_path / "whole streams")
    assert len(streams.rows) == 19 * 2 * 2 * 10  # seeds of views, seeds of the order, methods
    assert content(tmp_path / "streams") == streams
    for name in ("struck", "killed", "shared"):
        assert content(tmp_path / name) == whole, name
        with Store(tmp_path / name) as store:
            invocations = store.facts("invocation")
        assert len(invocations) >= 3, "too few of the killed got as far as writing something"
