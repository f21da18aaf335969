"""The commands and the Python of the README are run as they stand there, on real images with the real model.

What the documentation says of methods and settings is compared with the code.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from usetta import Recipe, demo, methods
from usetta.models import embedded
from usetta.models.package_files import cache_dir

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


COMMANDS = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
IN_ORDER = COMMANDS[COMMANDS.index(next(command for command in COMMANDS if " eval " in command)) :]
"""The commands about a run, each of which needs the one before."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would stand: a cat, a folder of images and a list of classes."""
    if not embedded.is_cached():
        pytest.skip("the embedded model was not fetched (`usetta models pull embedded`)")
    cats = list((cache_dir() / "demo").glob("tabby-cat.png")) or [demo.images(print)[0].path]
    folder = tmp_path_factory.mktemp("reader")
    for name in ("cat.png", "photos/cat.png", "labelled/tabby cat/cat.png", "labelled/red fox/cat.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(cats[0].read_bytes())
    (folder / "classes.txt").write_text("tabby cat\nred fox\ngolden retriever\n", encoding="utf-8")
    return folder


def run(command: list[str], folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_shows_both_commands_and_they_exist() -> None:
    shown = [shlex.split(command, comments=True) for command in COMMANDS if command.startswith("make")]
    assert shown == [["make", "demo"], ["make", "test"]]
    for command in shown:
        assert run([command[0], "--dry-run", command[1]], ROOT)


def test_the_readme_names_every_method() -> None:
    table = README.partition("## Methods")[2].partition("\n## ")[0]
    assert set(methods.names()) <= set(re.findall(r"`([^`]+)`", table))
    for name in re.findall(r"`([^`]+)`", table):
        assert methods.get(name)


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page.partition("| setting |")[2], flags=re.MULTILINE))
    settings = [field for field in fields(Recipe) if field.name not in ("name", "description", "options")]
    assert listed == {field.name: str(field.default).lower() for field in settings}
    for name, default in listed.items():
        assert methods.get(f"se:{name}={default}") == methods.get("se")


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("usetta") and each not in IN_ORDER])
def test_each_command_of_the_readme_runs(command: str, folder: Path) -> None:
    shown = run(shlex.split(command), folder)
    if "classify" in command:
        assert "tabby cat" in shown
    if "explain" in command:
        assert "skipped: the views already agree" in shown or "tuned: " in shown
    if "--out why.png" in command:
        assert (folder / "why.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_commands_about_a_run_follow_each_other(folder: Path) -> None:
    shown = {command.split()[1]: run(shlex.split(command), folder) for command in IN_ORDER}
    assert list(shown) == ["eval", "table", "report", "reproduce"]
    assert "Accuracy" in shown["eval"]
    assert "points" in shown["table"]
    assert (folder / "runs" / "a" / "report.html").stat().st_size > 10_000
    assert "table-24" in shown["reproduce"]


@pytest.mark.slow
def test_the_python_of_the_readme_runs(folder: Path) -> None:
    (block,) = blocks("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    assert run([sys.executable, "-c", block], folder).startswith("tabby cat")
