"""What the page on serving says is what the server does."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

import usetta.cli.serve
from conftest import make_image
from serve.conftest import CLASSES, Running, running
from usetta.cli import app
from usetta.models.clip import CLIP
from usetta.serve.schemas import ClassifyOptions, CompareOptions
from usetta.serve.settings import Settings

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the page speaks of."""
    for i, name in enumerate(("cat.png", "fox.png")):
        make_image(i).save(tmp_path / name)
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def open_server(tiny_model: CLIP) -> Iterator[Running]:
    with running(Settings(keys=("first-key",)), tiny_model) as server:
        yield server


def test_the_table_of_limits_is_that_of_the_command() -> None:
    documented = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([\d.]+) \|", section("Limits"), flags=re.MULTILINE))
    options = {
        option.opts[0]: str(option.default)
        for option in get_command(app).commands["serve"].params  # type: ignore[attr-defined]
        if option.opts[0].startswith("--max-")
        or option.opts[0]
        in ("--pause", "--timeout", "--text-memory", "--session-memory", "--session-idle", "--threads")
    }
    assert documented == options
    assert usetta.cli.serve.Settings().limits.upload == int(documented["--max-upload"])


def test_the_tables_of_fields_are_those_of_the_requests() -> None:
    documented = dict(
        re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Requests").partition("| address |")[0], flags=re.MULTILINE)
    )
    fields = ClassifyOptions.model_fields | CompareOptions.model_fields
    assert documented.keys() == fields.keys()
    for name, field in fields.items():
        if field.default is not None and not field.is_required():
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            assert documented[name] == f"`{default}`"


def test_the_addresses_are_all_there_are(server: Running) -> None:
    documented = re.findall(r"`(?:GET|POST|DELETE) (/[\w/.{}]+)`", section("Requests"))
    known = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert sorted(documented) == sorted([*known, "/openapi.json", "/docs"])


def test_the_codes_of_errors_are_those_of_the_sources() -> None:
    sources = (Path(__file__).parents[2] / "src" / "usetta" / "serve").rglob("*.py")
    raised = {
        code
        for source in sources
        for code in re.findall(r"ApiError\(\s*\d{3},\s*\"(\w+)\"", source.read_text(encoding="utf-8"))
    }
    documented = set(
        re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| [\d, ]+ \|(.*?)\|", section("Errors"), re.MULTILINE)))
    )
    assert documented == raised | {"not_found", "method_not_allowed"}


@pytest.mark.usefixtures("here")
def test_the_python_on_the_page_runs(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", section("Requests"), flags=re.DOTALL | re.MULTILINE)
    exec(compile(block.replace(URL, server.url), "serving.md", "exec"), {})
    assert capsys.readouterr().out.split(" 0.")[0] in CLASSES


@pytest.mark.usefixtures("here")
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("command", re.findall(r"^\$ (curl .*)$", PAGE, flags=re.MULTILINE))
def test_the_commands_on_the_page_are_answered(server: Running, open_server: Running, command: str) -> None:
    url = open_server.url if "Bearer" in command else server.url
    done = subprocess.run(
        [*shlex.split(command.replace(URL, url)), "--silent", "--fail-with-body"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout
