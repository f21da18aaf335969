"""Half an hour of everything at once: `python -m benchmarks.soak [--minutes 30] [--clients 8]`.

Clients send good requests, garbage and attacks (see `benchmarks.serve`) in a random mix to a server of its own process,
which is killed now and then and started again. Every answer has to be the library's own; at the end memory and open
descriptors must be what they were after the first minute of that process, and SIGTERM must end it within five seconds.
"""

import argparse
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve import CLASSES, attacks, form, garbage, half_requests, hang_up, image, start, two_gigabytes
from usetta import Classifier

METHODS = (("clip", "1"), ("se", "4"), ("use", "4"), ("se", "adaptive"))
TOLERANCE = 2e-6
"""Answers are rounded to six digits."""


class Soak:
    """Clients of a server that comes and goes."""

    def __init__(self, megapixels: float = 0.05) -> None:
        contents = [image(seed, megapixels) for seed in range(4)]
        self._goods = [
            (form(c, method, views), i, method, views) for i, c in enumerate(contents) for method, views in METHODS
        ]
        self._bads = [*garbage(self._goods[0][0], contents[0], "clip"), *attacks(contents[0])]
        self._expected = {
            (i, method, views): Classifier(
                CLASSES, "embedded", method, views=views if views == "adaptive" else int(views)
            )(c)
            for i, c in enumerate(contents)
            for method, views in METHODS
        }
        self.port = 0
        self.stopping = threading.Event()
        self.wrong: list[str] = []
        self.answered = 0
        self.unreachable = 0

    def client(self, seed: int) -> None:
        """Send requests until the end."""
        wires: list[Any] = []
        rng = random.Random(seed)  # noqa: S311
        while not self.stopping.is_set():
            try:
                self._one(rng, wires)
            except (httpx.HTTPError, OSError, IndexError):  # the server is being started again
                self.unreachable += 1
                time.sleep(0.5)

    def _one(self, rng: random.Random, wires: list[Any]) -> None:
        kind = rng.random()
        url = f"http://127.0.0.1:{self.port}"
        if kind < 0.7:
            sent, number, method, views = rng.choice(self._goods)
            key = number, method, views
            answer = httpx.post(
                url + sent.path, content=sent.body, headers={"content-type": sent.content_type}, timeout=120
            )
            if answer.status_code == 200:
                self._compare(answer.json(), self._expected[key])
            elif answer.status_code not in (429, 503):
                self.wrong.append(f"{key}: {answer.status_code} {answer.text[:200]}")
        elif kind < 0.95:
            sent = rng.choice(self._bads)
            answer = httpx.post(
                url + sent.path, content=sent.body, headers={"content-type": sent.content_type}, timeout=120
            )
            if answer.status_code not in (*sent.right, 429, 503):
                self.wrong.append(f"bad request: {answer.status_code} {answer.text[:200]}")
        elif kind < 0.97:
            half_requests(self.port, wires)
        elif kind < 0.985:
            hang_up(self.port, self._goods[0][0])
        else:
            two_gigabytes(self.port)

    def _compare(self, answer: dict[str, Any], expected: Any) -> None:
        self.answered += 1
        for ranked in answer["ranked"]:
            probability = float(expected.probs[CLASSES.index(ranked["label"])])
            if abs(probability - ranked["probability"]) > TOLERANCE:
                self.wrong.append(f"{answer['method']}: {ranked} is {probability:.6f} by the library")


def state(pid: int) -> tuple[float, int]:
    """Megabytes and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    soak, rng = Soak(), random.Random(0)  # noqa: S311
    lives = max(2, int(options.minutes // 5))
    process, soak.port = start("embedded")
    clients = [threading.Thread(target=soak.client, args=(i,), daemon=True) for i in range(options.clients)]
    for client in clients:
        client.start()
    growth: list[tuple[float, int]] = []
    for life in range(lives):
        seconds = 60 * options.minutes / lives
        time.sleep(seconds / 4)
        before = state(process.pid)
        time.sleep(seconds * 3 / 4 * (1 if life == lives - 1 else rng.uniform(0.6, 1)))
        after = state(process.pid)
        growth.append((after[0] / before[0], after[1] - before[1]))
        print(
            f"life {life + 1}: {soak.answered} answers, memory {before[0]:.0f} -> {after[0]:.0f} MB, "
            f"descriptors {before[1]} -> {after[1]}, wrong {len(soak.wrong)}",
            flush=True,
        )
        if life < lives - 1:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process, soak.port = start("embedded")
    soak.stopping.set()
    for client in clients:
        client.join(120)
    left = time.monotonic()
    process.terminate()
    code, seconds = process.wait(60), time.monotonic() - left
    for wrong in soak.wrong[:10]:
        print(f"error: {wrong}", file=sys.stderr)
    print(
        f"{soak.answered} answers, {soak.unreachable} while there was no server; ended with {code} in {seconds:.1f} s"
    )
    flat = all(memory < 1.3 and descriptors < 100 for memory, descriptors in growth)
    sys.exit(not (soak.answered and not soak.wrong and flat and code == 0 and seconds < 5))


if __name__ == "__main__":
    main()
