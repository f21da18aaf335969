"""Half an hour of everything at once: `python -m benchmarks.soak [--minutes 30] [--clients 8]`.

Clients send good requests, garbage and attacks (see `benchmarks.serve`) in a random mix to a server of its own process.
In the first half of the time it is killed at random moments and started again; in the second half it lives on. Wrong is
an answer that is not the library's own, any other status than the request deserves, a good request that fails or a
`/healthz` that does not answer although nobody killed the server, and a server that ends by itself. Between quarters of
the second half the clients pause, so that what the server still holds can be measured: its memory may not grow by more
than a tenth, nor its open descriptors by more than a few. SIGTERM must end it within five seconds.
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

from benchmarks.serve import (
    CLASSES,
    SentRequest,
    attacks,
    form,
    garbage,
    half_requests,
    hang_up,
    image,
    start,
    two_gigabytes,
)
from usetta import Classifier

METHODS = (("clip", "1"), ("se", "4"), ("use", "4"), ("se", "adaptive"))
TOLERANCE = 2e-6
"""Answers are rounded to six digits."""
KILLS = 5
MEMORY, DESCRIPTORS = 1.1, 5
"""How much more of them the server may hold at the end than after its first minutes."""


class Soak:
    """Clients of a server that comes and goes."""

    def __init__(self, clients: int, megapixels: float = 0.05) -> None:
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
        self.wrong: list[str] = []
        self._printed = 0
        self.answered = self.refused = self.unreachable = 0
        self._stopping, self._going = threading.Event(), threading.Event()
        self._going.set()
        self._idle = threading.Semaphore(0)
        self._life: int | None = None
        """Number of the server's life; None while there is no server."""
        self.process, self._port = start("embedded")
        self._life = 0
        threads = [threading.Thread(target=self._client, args=(seed,), daemon=True) for seed in range(clients)]
        self._threads = [*threads, threading.Thread(target=self._watch, daemon=True)]
        for thread in self._threads:
            thread.start()

    def kill(self) -> None:
        """Kill the server whatever it is doing, and start it again."""
        self.check_alive()
        life, self._life = self._life, None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process, self._port = start("embedded")
        self._life = (life or 0) + 1

    def check_alive(self) -> None:
        """Note it if the server has ended by itself."""
        if self.process.poll() is not None:
            self.wrong.append(f"the server ended by itself with {self.process.returncode}")

    def report(self, what: str) -> None:
        """Print how it goes, and what has gone wrong since the last time."""
        new, self._printed = self.wrong[self._printed :], len(self.wrong)
        print(f"{what}: {self.answered} answers, {self._printed} wrong", *new[:5], sep="\n  ", flush=True)

    def held(self) -> tuple[float, int]:
        """Megabytes and descriptors that the server holds while nobody asks it for anything."""
        self.check_alive()
        self._going.clear()
        for _ in self._threads:
            self._idle.acquire(timeout=150)
        time.sleep(3)
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1])
        descriptors = len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))
        self._going.set()
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, descriptors

    def stop(self) -> tuple[int, float]:
        """End the clients, and the server by SIGTERM; its exit code, and the seconds until then."""
        self.check_alive()
        self._stopping.set()
        for thread in self._threads:
            thread.join(150)
        began = time.monotonic()
        self.process.terminate()
        return self.process.wait(60), time.monotonic() - began

    def _pause(self) -> None:
        """Wait while `held` measures."""
        if not self._going.is_set():
            self._idle.release()
            self._going.wait()

    def _client(self, seed: int) -> None:
        """Send requests until the end."""
        wires: list[Any] = []
        rng = random.Random(seed)  # noqa: S311
        with _client() as client:
            while not self._stopping.is_set():
                if not self._going.is_set():
                    while wires:
                        wires.pop().close()
                self._pause()
                life = self._life
                try:
                    self._one(client, rng, wires)
                except Exception as error:  # noqa: BLE001 - a client that ends is a soak that tests less than it says
                    self._failed(life, f"{type(error).__name__}: {error}")
                    time.sleep(0.5)

    def _watch(self) -> None:
        """Ask every second whether the server is alive."""
        with _client() as client:
            while not self._stopping.wait(1):
                self._pause()
                life = self._life
                try:
                    client.get(f"http://127.0.0.1:{self._port}/healthz", timeout=10).raise_for_status()
                except httpx.HTTPError as error:
                    self._failed(life, f"/healthz: {type(error).__name__}: {error}")

    def _failed(self, life: int | None, what: str) -> None:
        """A request has failed, which is right only if the server was killed while it was under way."""
        self.unreachable += 1
        if life is not None and life == self._life:
            self.wrong.append(what)

    def _one(self, client: httpx.Client, rng: random.Random, wires: list[Any]) -> None:
        kind = rng.random()
        if kind < 0.7:
            sent, number, method, views = rng.choice(self._goods)
            key = number, method, views
            answer = self._post(client, sent)
            if answer.status_code == 200:
                self._compare(answer.json(), self._expected[key])
            elif answer.status_code not in (429, 503):
                self.wrong.append(f"{key}: {answer.status_code} {answer.text[:200]}")
        elif kind < 0.95:
            sent = rng.choice(self._bads)
            answer = self._post(client, sent)
            self.refused += 1
            if answer.status_code not in (*sent.right, 429, 503):
                self.wrong.append(f"bad request: {answer.status_code} {answer.text[:200]}")
        else:
            try:
                if kind < 0.97:
                    half_requests(self._port, wires)
                elif kind < 0.985:
                    hang_up(self._port, self._goods[0][0])
                else:
                    two_gigabytes(self._port)
            except (OSError, IndexError):  # a server may close such connections at any moment
                pass

    def _post(self, client: httpx.Client, sent: SentRequest) -> httpx.Response:
        url = f"http://127.0.0.1:{self._port}{sent.path}"
        return client.post(url, content=sent.body, headers={"content-type": sent.content_type})

    def _compare(self, answer: dict[str, Any], expected: Any) -> None:
        self.answered += 1
        own = {name: float(probability) for name, probability in zip(CLASSES, expected.probs, strict=True)}
        ranked = {one["label"]: one["probability"] for one in answer["ranked"]}
        if answer["label"] != expected.label or len(ranked) != 5:
            self.wrong.append(
                f"{answer['method']}: {answer['label']} of {len(ranked)} is {expected.label} by the library"
            )
        for name, probability in ranked.items():
            if not abs(own[name] - probability) <= TOLERANCE:
                self.wrong.append(f"{answer['method']}: {name} {probability} is {own[name]:.6f} by the library")


def _client() -> httpx.Client:
    """Each request gets a connection of its own: one that is kept may be closed by the server at any moment."""
    return httpx.Client(timeout=120, verify=False, limits=httpx.Limits(max_keepalive_connections=0))  # noqa: S501


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    soak = Soak(options.clients)
    try:
        sys.exit(not run(soak, 30 * options.minutes))
    finally:
        soak.process.kill()


def run(soak: Soak, half: float) -> bool:
    """Twice `half` seconds; whether everything was right."""
    rng = random.Random(0)  # noqa: S311
    for life in range(KILLS):
        time.sleep(half / KILLS * rng.uniform(0.2, 1))
        soak.kill()
        soak.report(f"killed {life + 1} times")
    held: list[tuple[float, int]] = []
    for _ in range(4):
        time.sleep(half / 4)
        held.append(soak.held())
        soak.report(f"{held[-1][0]:.0f} MB, {held[-1][1]} descriptors")
    code, seconds = soak.stop()
    soak.report(f"ended with {code} in {seconds:.1f} s")
    print(f"{soak.refused} refusals, {soak.unreachable} requests while there was no server")
    flat = held[-1][0] <= MEMORY * held[0][0] and held[-1][1] <= held[0][1] + DESCRIPTORS
    return bool(soak.answered and soak.refused and not soak.wrong and flat and code == 0 and seconds < 5)


if __name__ == "__main__":
    main()
