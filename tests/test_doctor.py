"""`usetta doctor` on a machine that is well, and on one whose views or device are wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

from usetta import doctor
from usetta.cli import app


def test_a_machine_that_is_well() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["is_well"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert [check["name"] for check in found["checks"]][:3] == ["views", "views made on cpu", "answers of cpu"]
    assert all(check["passed"] for check in found["checks"])


def test_what_is_wrong_is_named_and_the_other_tests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "view_digests", lambda: {"tall, crops, 32": "0"})
    monkeypatch.setattr(doctor.ViewPlan, "make", lambda *_: torch.zeros(8, 3, 224, 224, dtype=torch.uint8))
    calls = iter([torch.zeros(4, 4), torch.full((4, 4), 0.01)])
    monkeypatch.setattr(doctor, "_probabilities", lambda *_: next(calls))
    result = CliRunner().invoke(app, ["doctor"], terminal_width=200)
    assert result.exit_code == 1
    for message in ("cannot be compared: tall, crops, 32", "values differ from those of the host", "by up to 0.01"):
        assert message in " ".join(result.stdout.split())
    assert result.stdout.count("FAILED") == 3
