"""Everything that computes gives the answers of the CPU on a GPU, as far as a pretended one can show it.

The pretended devices have to be there before torch, so `pretend_device/checks.py` runs once in a process of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from usetta import methods

FOLDER = Path(__file__).with_name("pretend_device")
ROUNDING = 2e-5
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pretend_device")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each check found, or where it failed."""
    if shutil.which("g++") is None:
        pytest.skip("no g++, which compiles the pretended devices")
    command = [sys.executable, str(FOLDER / "checks.py"), str(tmp_path_factory.mktemp("checks"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def numbers(value: Any) -> dict[str, float]:
    """A check's numbers; one that failed is a text, which shows why."""
    assert isinstance(value, dict), value
    return value


def test_a_pretended_device_refuses_what_a_real_one_does(found: dict[str, Any]) -> None:
    assert all(numbers(found["strictness"]).values()), found["strictness"]


@pytest.mark.parametrize("check", ["methods_on_cuda", "methods_with_a_reward_model_on_another_gpu", "methods_on_mps"])
def test_every_method_gives_the_answers_of_the_cpu(found: dict[str, Any], check: str) -> None:
    assert set(numbers(found[check])) == set(methods.names())
    assert max(found[check].values()) < ROUNDING, found[check]


@pytest.mark.parametrize("check", ["adaptive", "reward_models", "classify_out", "server", "coop"])
def test_so_does_everything_else(found: dict[str, Any], check: str) -> None:
    assert max(numbers(found[check]).values()) < ROUNDING, found[check]


def test_views_are_those_of_the_host_to_the_bit(found: dict[str, Any]) -> None:
    assert set(numbers(found["views"]).values()) == {0.0}


def test_every_precision_works_and_a_driver_without_a_gpu_knows_it(found: dict[str, Any]) -> None:
    precisions: dict[str, Any] = numbers(found["precisions"])
    assert {asked: result["is"] for asked, result in precisions.items()} == {
        **{precision: precision for precision in ("fp32", "bf16", "fp16")},
        "auto": "fp16",
    }
    assert all(result["driver"] for result in precisions.values())
    assert precisions["fp32"]["difference"] < ROUNDING
    assert max(result["difference"] for result in precisions.values()) < 0.02  # fp16 is compared with fp32


def test_a_run_has_the_rows_of_the_cpu_with_and_without_a_cache(found: dict[str, Any]) -> None:
    runs: dict[str, Any] = numbers(found["eval_runs"])
    assert {name: run["encoded"] for name, run in runs.items()} == {"cuda-0": 3, "cuda-1": 3, "cuda-2": 0, "mps-0": 3}
    for run in runs.values():
        assert run["same"]
        assert run["difference"] < ROUNDING


def test_bench_waits_for_the_device_and_reports_its_memory(found: dict[str, Any]) -> None:
    assert found["benchmark"] == {"waits": True, "device": "cuda:0", "memory": True}


def test_doctor_finds_both_gpus_well(found: dict[str, Any]) -> None:
    assert {"answers of cuda:0", "answers of cuda:1"} < set(numbers(found["doctor"]))
    assert set(found["doctor"].values()) == {True}


def test_a_device_gets_the_next_batch_before_the_last_is_read(found: dict[str, Any]) -> None:
    assert found["overlap"] == "eerererr"


def test_few_launches_and_one_read_a_batch(found: dict[str, Any]) -> None:
    costs: dict[str, Any] = numbers(found["costs"])
    for name, most in {"se": 150, "mta": 220, "use:skip=false": 180}.items():
        assert costs[name]["launches"] <= most, (name, costs[name])
        assert costs[name]["reasons"] == {"read": 1}
