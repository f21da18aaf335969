"""What is written down of a call: versions, commit, machine, memory."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

import usetta
from usetta.evaluate import provenance as module
from usetta.evaluate.provenance import commit, peak_memory, provenance


def test_versions_and_machine_are_those_of_this_process() -> None:
    before = datetime.now(UTC)
    facts = provenance()
    assert facts["usetta"] == usetta.__version__
    assert facts["python"] == platform.python_version()
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert facts["cpu"] == os.cpu_count()
    started = datetime.fromisoformat(facts["started"])
    assert started.tzinfo is not None
    assert abs((started - before).total_seconds()) < 5
    assert None not in [facts[name] for name in ("pillow", "safetensors", "tokenizers", "platform")]


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert module._version("no-such-package-anywhere") is None


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_checkout_this_code_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "usetta" / "evaluate"
    package.mkdir(parents=True)
    file = package / "provenance.py"
    file.write_text("pass\n")
    monkeypatch.setattr(module, "__file__", str(file))
    found = commit.__wrapped__
    assert found() is None  # no checkout
    git(tmp_path, "init", "--quiet")
    (tmp_path / "other.py").write_text("pass\n")
    git(tmp_path, "add", "other.py")
    git(tmp_path, "commit", "--quiet", "-m", "of something else")
    assert found() is None  # as in a project with this package in its environment
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    assert found() == head
    (tmp_path / "notes.txt").write_text("beside the package")
    assert found() == head
    (package.parent / "views.py").write_text("changed\n")
    assert found() == head + "+"
    monkeypatch.setenv("PATH", "")
    assert found() is None  # no git


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    """In a process of its own, which is small: to go beyond the peak of this one would take gigabytes."""
    code = (
        "import numpy as np; from usetta.evaluate.provenance import peak_memory; first = peak_memory()\n"
        "held = np.ones(first // 8 + 2**24); second = peak_memory(); del held; print(first, second, peak_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    first, second, last = map(int, done.stdout.split())
    assert 2**25 < first < 2**40
    assert second > first + 2**26
    assert last >= second


def test_where_the_system_does_not_tell_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peak_memory() is None
