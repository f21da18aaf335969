"""`usetta serve` as a process: how it starts, what it prints, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

import usetta.cli.serve
from serve.conftest import CLASSES, eventually, in_base64, png
from usetta.cli import app
from usetta.serve.app import listen

PLAIN = "import usetta.cli.serve, usetta.cli; usetta.cli.main()"
SLOW = """
import time
import usetta.cli, usetta.cli.serve
import usetta.serve.service as service

class Slow:
    def __init__(self, model): self._model = model
    def __getattr__(self, name): return getattr(self._model, name)
    def encode_images(self, pixels):
        time.sleep(0.5)
        return self._model.encode_images(pixels)

load = service.load_model
service.load_model = lambda name, **settings: Slow(load(name, **settings))
usetta.cli.main()
"""


def ask(url: str, **headers: str) -> httpx.Response:
    asked = {"image": in_base64(png()), "classes": CLASSES, "views": 2}
    return httpx.post(f"{url}/v1/classify", json=asked, headers=headers, timeout=60)


@contextmanager
def started(
    model: Path, *options: str, code: str = PLAIN, stderr: int = subprocess.PIPE, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that is ready, and its address."""
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--model", str(model), *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | variables,
    )
    assert process.stdout is not None
    try:
        lines = map(json.loads, iter(process.stdout.readline, ""))
        port = next(line["port"] for line in lines if line["event"] == "listening")  # the model may be there before
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, 120)
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_sigterm_finishes_what_is_running_and_exits_with_0(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Keys come from the environment and from a file, and a person at the terminal is shown the address."""
    (tmp_path / "keys").write_text("from-file\n\n", encoding="utf-8")
    terminal, stderr = os.openpty()
    with (
        started(
            *(tiny_checkpoint, "--api-key-file", str(tmp_path / "keys")),
            code=SLOW,
            stderr=stderr,
            USETTA_API_KEYS="one two",
        ) as (process, url),
        ThreadPoolExecutor(3) as clients,
    ):
        assert ask(url).status_code == 401
        begun = [clients.submit(ask, url, **{"x-api-key": key}) for key in ("one", "two", "from-file")]
        metrics = {"x-api-key": "one"}
        eventually(lambda: "usetta_queue 3.0" in httpx.get(f"{url}/metrics", headers=metrics).text)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 503)
        assert ask(url).json()["error"]["code"] == "shutting_down"
        assert [answer.result().status_code for answer in begun] == [200] * 3
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    lines = [json.loads(line) for line in out.splitlines()]  # every line is JSON
    answered = [line for line in lines if line.get("route") == "/v1/classify" and line["status"] == 200]
    assert len(answered) == 3
    assert all(line["method"] == "se" and line["views"] == 2 and line["ms"] > 250 for line in answered)
    assert os.read(terminal, 1000).decode() == f"Open {url}/\r\n"  # and nothing else
    os.close(terminal)
    os.close(stderr)
    for private in ("tabby", in_base64(png())[:20], "from-file"):
        assert private not in out


def serve(*options: object) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, options)])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--model", "nowhere.safetensors"], 1, "usetta: nowhere.safetensors"),
        (["--model", "ViT-B/61"], 2, "usetta: unknown model 'ViT-B/61'; did you mean"),
        (["--api-key", " "], 2, "usetta: an API key must not be empty"),
        (["--api-key-file", "nowhere"], 1, "No such file"),
        (["--api-key-file", os.devnull], 2, "there is no key in"),
        (["--max-views", "0"], 2, "Invalid value"),
        (["--host", "256.1.1.1"], 1, "usetta: cannot listen on 256.1.1.1"),
    ],
)
def test_a_server_that_cannot_start_says_why(options: list[str], code: int, message: str) -> None:
    result = serve("--port", 0, *options)
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert "Traceback" not in result.output


def test_a_port_that_is_taken_is_reported(tiny_checkpoint: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        result = serve("--port", port, "--model", tiny_checkpoint)
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in result.stderr


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("127.0.0.1", [], False),
        ("::1", [], False),
        ("localhost", [], False),
        ("0.0.0.0", [], True),
        ("::", [], True),
        ("0.0.0.0", ["--api-key", "k"], False),
    ],
)
def test_a_server_open_to_all_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, host: str, keys: list[str], warned: bool
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("usetta.serve.app.run", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr("usetta.serve.monitoring.configure_log", lambda: None)
    result = serve("--host", host, *keys)
    assert result.exit_code == 0
    assert ("WARNING: anybody who reaches" in result.stderr) is warned
    assert len(asked) == 1


def test_without_the_extra_packages_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("usetta.serve.app",):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = serve()
    assert result.exit_code == 1
    assert "pip install 'usetta[serve]'" in result.stderr


def test_the_command_line_starts_without_the_heavy_packages() -> None:
    heavy = "{'torch', 'fastapi', 'pydantic', 'uvicorn', 'matplotlib'}"
    code = f"import sys, usetta.cli.serve; print({heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_option_reaches_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[usetta.cli.serve.Settings, str, int]] = []
    monkeypatch.setattr("usetta.serve.app.run", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr("usetta.serve.monitoring.configure_log", lambda: None)
    names = ["upload", "json", "pixels", "classes", "name-length", "templates", "views", "steps", "methods", "images"]
    names += ["cost", "sessions", "queue", "queue-per-caller", "connections", "connections-per-address"]
    numbers = {name: 11 + place for place, name in enumerate(names)}
    options = [part for name, number in numbers.items() for part in (f"--max-{name}", number)]
    options += [
        "--timeout",
        2.5,
        "--pause",
        1.5,
        "--allowed-host",
        "h",
        "--threads",
        3,
        "--text-memory",
        99,
        "--session-memory",
        98,
        "--session-idle",
        97.5,
        "--context",
        "c",
    ]
    options += ["--extra-model", "a", "--extra-model", "b", "--reward-model", "r", "--cache", "f"]
    options += ["--calibration", "d"]
    assert serve("--model", "m", "--port", 1234, *options, "--api-key", "k").exit_code == 0
    ((settings, host, port, _announce),) = asked
    assert (host, port) == ("127.0.0.1", 1234)
    assert vars(settings.limits) == {name.replace("-", "_"): number for name, number in numbers.items()} | {
        "seconds": 2.5,
        "pause": 1.5,
    }
    assert settings.hosts == ("h",)
    assert (settings.model, settings.extra_models, settings.reward_model) == ("m", ("a", "b"), "r")
    assert (settings.context, settings.cache, settings.keys) == (Path("c"), Path("f"), ("k",))
    assert settings.calibration == Path("d")
    assert (settings.device, settings.precision) == ("auto", "auto")
    assert (settings.threads, settings.text_bytes) == (3, 99)
    assert (settings.session_bytes, settings.session_seconds) == (98, 97.5)
