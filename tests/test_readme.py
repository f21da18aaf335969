"""The commands and the Python of the README are run as they stand there, on a real image with the real model.

They run in this process, so that the model is loaded once and the views of the image are encoded once for all of them.
The commands about a run get a tiny model instead: what they print does not depend on how good it is.
What the documentation says of methods and settings is compared with the code.
"""

import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from usetta import Recipe, demo, load_model, methods
from usetta.cli import app
from usetta.models import Model, embedded
from usetta.models.clip import CLIP
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
    cats = list((cache_dir() / "demo").glob("tabby-cat.png")) or [demo.demo_dataset(print)[0].path]
    folder = tmp_path_factory.mktemp("reader")
    for name in ("cat.png", "photos/cat.png", "labelled/tabby cat/cat.png", "labelled/red fox/cat.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(cats[0].read_bytes())
    (folder / "classes.txt").write_text("tabby cat\nred fox\ngolden retriever\n", encoding="utf-8")
    return folder


class Remembering:
    """A model that encodes the same views once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[bytes, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_images(self, pixels: Tensor) -> Tensor:
        key = pixels.numpy().tobytes()
        if key not in self._known:
            self._known[key] = self._model.encode_images(pixels)
        return self._known[key]


@pytest.fixture(scope="module")
def default_model(folder: Path) -> Remembering:
    """What the commands load that name no model."""
    return Remembering(load_model("auto", device="auto", precision="auto"))


@pytest.fixture
def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Stand where the reader stands, with a model that is loaded already."""

    def put_in_place(model: Any) -> None:
        monkeypatch.chdir(folder)
        for place in ("usetta.models.load_model", "usetta.classifier.load_model"):
            monkeypatch.setattr(place, lambda name, **_: model if name == "auto" else pytest.fail(name))

    return put_in_place


def run(command: str) -> str:
    program, *arguments = shlex.split(command)
    assert program == "usetta"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_readme_shows_both_commands_and_they_exist() -> None:
    shown = [shlex.split(command, comments=True) for command in COMMANDS if command.startswith("make")]
    assert shown == [["make", "demo"], ["make", "test"]]
    for program, target in shown:
        assert subprocess.run([program, "--dry-run", target], cwd=ROOT, capture_output=True, check=True).stdout


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
@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("usetta") and line not in IN_ORDER])
def test_each_command_of_the_readme_runs(
    command: str, folder: Path, use: Callable[[Any], None], default_model: Remembering
) -> None:
    use(default_model)
    shown = run(command)
    if "classify" in command:
        assert "tabby cat" in shown
    if "explain" in command:
        assert "skipped: the views already agree" in shown or "tuned: " in shown
    if "--out why.png" in command:
        assert (folder / "why.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_commands_about_a_run_follow_each_other(folder: Path, use: Callable[[Any], None], tiny_model: CLIP) -> None:
    use(tiny_model)
    shown = {command.split()[1]: run(command) for command in IN_ORDER}
    assert list(shown) == ["eval", "table", "report", "reproduce"]
    assert "Accuracy" in shown["eval"]
    assert "points" in shown["table"]
    assert (folder / "runs" / "a" / "report.html").stat().st_size > 10_000
    assert "table-24" in shown["reproduce"]


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    use: Callable[[Any], None], default_model: Remembering, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("python")
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    use(default_model)
    exec(block, {})
    assert capsys.readouterr().out.startswith("tabby cat")
