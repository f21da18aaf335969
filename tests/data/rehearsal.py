"""`usetta reproduce all` with all fifteen datasets and two backbones, in miniature, in processes that are killed.

`python -m data.rehearsal FOLDER URL SEED` runs it to its end in FOLDER/whole, and with kills in FOLDER/killed. Every
attempt is a fork of this process, which has loaded everything once, and shares with the others only what they left on
the disk. The server at URL plays all sources of the datasets; the weights are random.
"""

import functools
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from data import world
from usetta import bench
from usetta.cli import app
from usetta.coop import save_context
from usetta.data import check, download
from usetta.evaluate import runner
from usetta.evaluate.store import Store
from usetta.models.clip import random_model
from usetta.models.config import CLIPConfig, ResNetConfig, TextConfig, ViTConfig
from usetta.models.registry import ModelEntry, register_model, unregister_model
from usetta.report import paper_report

_wait = time.sleep
_TEXT = TextConfig(width=16, layers=1, heads=1)
_BACKBONES = {
    "ViT-B-16": CLIPConfig(24, ViTConfig(32, 16, width=16, layers=2, heads=1), _TEXT),
    "RN50": CLIPConfig(24, ResNetConfig(32, width=4, layers=(1, 1, 1, 1), heads=2), _TEXT),
}
_LOADED_LATE = ("pyarrow.parquet", "huggingface_hub.utils", "torch.fx.experimental.symbolic_shapes")
"""What every attempt would import by itself otherwise."""
_KILLS = (0.02, 0.04, 0.2, 0.25, 0.25, 0.25)
"""At random moments, up to these parts of the time that the whole takes. The first come while datasets are fetched."""


def prepare(url: str, folder: Path) -> None:
    """Let names stand for miniatures in this process, and leave out what only takes time."""
    os.environ |= world.point_to(url) | {"HF_TOKEN": world.TOKEN, "USETTA_CACHE": str(folder / "cache")}
    os.environ["COLUMNS"] = "200"
    world.register_small(url)
    for name in _LOADED_LATE:
        importlib.import_module(name)
    for name, config in _BACKBONES.items():
        unregister_model(name)
        model = random_model(config, name=name, seed=0)
        register_model(name, ModelEntry(lambda _options, model=model: model))  # type: ignore[misc]
    runner.EvalSettings = functools.partial(runner.EvalSettings, views=3)  # type: ignore[assignment, misc]
    bench.seconds_of_methods = lambda _job, methods: dict.fromkeys([*methods, bench.CLIP_64], 1.0)
    download.time.sleep = lambda seconds: _wait(seconds / 50)  # type: ignore[attr-defined, assignment]
    save_context(folder / "context.safetensors", torch.zeros(4, _TEXT.width), {"template": "a photo of a {}."})


def attempt(folder: Path, before: Callable[[], object] = lambda: None) -> int:
    """The number of a process that reproduces everything in `folder`."""
    child = os.fork()
    if child:
        return child
    try:
        before()
        arguments = ["reproduce", "all", "--data", folder / "data", "--out", folder / "runs", "--seeds", "0"]
        arguments += ["--limit", 1, "--context", folder.parent / "context.safetensors"]
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        (folder / "stdout.txt").write_text(done.stdout)
        (folder / "stderr.txt").write_text(done.stderr)
        os._exit(done.exit_code)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent's code must not run here
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    os._exit(99)


def code_of(child: int) -> int:
    """How a process ended: its exit code, or the negative number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def strike() -> None:
    """Let the process kill itself when it has written a figure and is about to write another."""
    save, calls = paper_report.save, 0

    def replaced(figure: Figure, path: Path) -> list[Path]:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(figure, path)

    paper_report.save = replaced  # type: ignore[assignment]


def progress(folder: Path) -> tuple[int, int]:
    """How many datasets are complete, and how many answers are saved."""
    answers = 0
    for run in folder.glob("runs/paper-*/results.sqlite"):  # a kill may come before the folder has one
        with Store(run.parent, create=False) as store:
            answers += sum(count for *_, count in store.groups())
    data = folder / "data"
    return sum(report.state == "complete" for report in check(data)) if data.exists() else 0, answers


def main(folder: Path, url: str, seed: int) -> dict[str, Any]:
    """Reproduce everything twice, and report how the processes of the second time ended and what each left."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare(url, folder)
    whole, killed, rng = folder / "whole", folder / "killed", random.Random(seed)
    world.take_steps_by_hand(whole / "data")
    started = time.perf_counter()
    report: dict[str, Any] = {"whole": code_of(attempt(whole))}
    seconds = time.perf_counter() - started
    killed.mkdir()
    random_kills = []
    for number, longest in enumerate(_KILLS):
        if number == 2:
            world.take_steps_by_hand(killed / "data")
        child = attempt(killed)
        _wait(seconds * rng.uniform(longest / 3, longest))
        os.kill(child, signal.SIGKILL)  # a process that has ended is there until it is waited for
        random_kills.append((code_of(child), *progress(killed)))
    report["random"] = random_kills
    report["struck"] = code_of(attempt(killed, strike))
    report["killed"] = code_of(attempt(killed))
    report["progress"] = [progress(home) for home in (whole, killed)]
    report["seconds"] = seconds
    return report


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
