"""Runs that are killed, in a process of their own that has loaded everything once: `python -m evaluate.victim`.

Every attempt is a fork of it that calls `evaluate` anew, so an attempt starts in no time and shares nothing with those
before but the files that they left.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluate.runs import Counting, four_blocks, make_dataset
from usetta import episode, feature_cache
from usetta.evaluate import store, worker, writing
from usetta.evaluate.runner import EvalSettings, evaluate

METHODS = ("clip", "se", "use", "ttl", "tda", "dmn")
"""The last two have a memory: they see all images as a stream."""
STREAMS = ("tda", "dmn-weak", "dmn", "boostadapter", "dpe", "ecalp", "onzeta", "dota", "bca", "tda+se")
_TOGETHER = 4
"""Images that go through a memory together, so that a stream of twenty has several steps."""
BLOWS: dict[str, tuple[Any, str, int]] = {
    "a row of a batch is about to be written": (store, "astuple", 40),
    "features are about to be written": (feature_cache.FeatureCache, "put", 3),
    "features are written and rows are not": (store.Store, "add", 4),
    "rows are written and the log of the run is not": (store.Store, "note", 9),
    "facts are about to be written": (store.Store, "fix_all", 1),
}
"""A function whose n-th call is the last of its process."""


class Slow(Counting):
    """A model that takes its time, so that kills hit the middle of something."""

    def encode_images(self, pixels: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().encode_images(pixels)


class Runs:
    """Processes that all work on the same question."""

    def __init__(self, folder: Path, images: int, methods: Sequence[str] = METHODS) -> None:
        self._folder = folder
        self._methods = methods
        self._model = Slow(four_blocks())
        self._dataset = make_dataset(folder / "images", images)
        self._dataset[3].path.write_bytes(b"")  # a bad image is tried again by every attempt

    def start(self, out: str, before: Callable[[], object] = lambda: None) -> int:
        """The number of a process that continues a run."""
        child = os.fork()
        if child:
            return child
        try:
            before()
            folder, cache = self._folder / out, self._folder / f"{out}-cache"
            evaluate(
                self._model,
                [self._dataset],
                self._methods,
                folder,
                EvalSettings(views=6),
                seeds=(0, 1),
                order_seeds=(0, 1),
                cache=cache,
                batch_size=2,
            )
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent's code must not run here
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)


def killed(child: int, after: float) -> bool:
    """Whether a process lived until it was killed after so many seconds; one that failed is an error."""
    time.sleep(after)
    os.kill(child, signal.SIGKILL)  # a process that has ended is there until it is waited for
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"a run failed with exit code {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status)


def wait_for_rows(out: Path, seconds: float = 30) -> None:
    """Return as soon as a run has more rows than before."""

    def rows() -> int:
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(out / store.FILE)) as db:
            return int(db.execute("SELECT COUNT(*) FROM results").fetchone()[0])
        return 0

    before, end = rows(), time.perf_counter() + seconds
    while rows() == before and time.perf_counter() < end:
        time.sleep(0.002)


def torn(out: Path) -> int:
    """Images that some methods have answered and others have not, though they came together."""
    query = (
        "SELECT COUNT(*) FROM (SELECT 1 FROM results GROUP BY image, seed, order_seed "
        "HAVING COUNT(*) != iif(order_seed < 0, 4, 2))"
    )
    with closing(sqlite3.connect(out / store.FILE)) as db:
        return int(db.execute(query).fetchone()[0])


def ended(child: int) -> bool:
    """Whether a process ended well."""
    return os.waitpid(child, 0)[1] == 0


def strike(owner: Any, name: str, count: int) -> None:
    """Let the process kill itself in place of a given call of a function."""
    function, calls = getattr(owner, name), 0

    def last(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, last)


def main(folder: Path, seed: int) -> dict[str, Any]:
    """Runs in `folder` that were left alone, struck, killed and shared, all of them ended; and how many kills hit."""
    rng, runs, begin = random.Random(seed), Runs(folder, images=20), time.perf_counter()
    report: dict[str, Any] = {"ended": {"whole": ended(runs.start("whole"))}}
    task = (time.perf_counter() - begin) / 20

    def moment() -> float:
        return rng.uniform(0, 1.5) * task

    report |= {"struck": {}, "killed": 0, "killed beside another": 0, "refused": 0, "torn": 0}
    for name, blow in BLOWS.items():
        _, status = os.waitpid(runs.start("struck", partial(strike, *blow)), 0)
        report["struck"][name] = os.WIFSIGNALED(status)
        report["torn"] += torn(folder / "struck")
    for attempt in range(13):
        child = runs.start("killed")
        if attempt % 2:  # the others are killed while they begin
            wait_for_rows(folder / "killed")
        report["killed"] += killed(child, moment())
    for _ in range(4):
        writer = runs.start("shared")
        wait_for_rows(folder / "shared")
        report["refused"] += not ended(runs.start("shared"))  # one process writes at a time
        report["killed beside another"] += killed(writer, moment())
    streams = Runs(folder, images=20, methods=STREAMS)
    report["ended"]["whole streams"] = ended(streams.start("whole streams"))
    report["killed in a stream"] = 0
    steps = len(STREAMS) * -(-20 // _TOGETHER)  # of one of the four streams
    for attempt in range(10):
        step = rng.randint(1, steps) + steps * (attempt in (2, 5, 7))  # in the next stream, or in the one after it
        _, status = os.waitpid(streams.start("streams", partial(strike, episode, "run_stream", step)), 0)
        report["killed in a stream"] += os.WIFSIGNALED(status)
    report["ended"]["streams"] = ended(streams.start("streams"))
    report["ended"] |= {name: ended(runs.start(name)) for name in ("struck", "killed", "shared")}
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    writing._SECONDS = 0.0
    worker._STREAM_BATCH = _TOGETHER
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
