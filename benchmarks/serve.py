"""What the server does under load: `python -m benchmarks.serve [--json] [--seconds 60] [--clients 16]`.

Four phases of equal length against a server of its own process: one client that asks again when it has its answer,
`--clients` of them at once, as many of which every fifth request is garbage (text as an image, half a JPEG, a bomb,
malformed JSON, an unknown method, a body of two gigabytes, a client that hangs up), and as many of which every fifth is
an attack (work for minutes, JSON with a million keys, fifty connections with half a request each). `throughput_ratio`
is the throughput of many clients over that of one, `garbage_slowdown` the throughput of good requests without garbage
over that with it (1 is no loss), `hostile_slowdown` the median time of good requests under attack over that without,
`memory_growth` how much the server's memory grows from the second to the last quarter of a phase, relative to what it
uses.

The request is an image of 24 megapixels and the method `clip`, one view. On a CPU each image goes through the tower by
itself: with all cores for one client, which wait for each other, and with one core for each of many. So many clients
gain that waiting, and the time in which one client keeps a single core busy, when its image is sent, decoded and
cropped. With `--method se --views 8 --megapixels 1` nearly all time is spent in the tower on strong views, which have a
core each in any case. Measure on an idle machine, and do not set `OMP_NUM_THREADS`, which the server would inherit.
"""

import argparse
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median

import httpx
import numpy as np
import torch
from PIL import Image

CLASSES = ["tabby cat", "red fox", "golden retriever", "sports car", "teapot", "lighthouse", "violin", "mushroom"]
GARBAGE = 0.2
DEMO_IMAGES = 4


@dataclass(frozen=True)
class SentRequest:
    """A body to send, and the statuses that are right for it."""

    body: bytes
    content_type: str
    right: tuple[int, ...] = (200,)
    path: str = "/v1/classify"


@dataclass
class Phase:
    """What the clients observed in a phase."""

    answered: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def throughput(self) -> float:
        """Good requests that were answered, per second."""
        return self.answered / self.seconds

    def growth(self) -> float:
        """Megabytes by which the least of the last quarter exceeds the least of the second (the first warms up).

        The least, because an image of this size takes a hundred megabytes while it is decoded.
        """
        quarter = max(1, len(self.memory) // 4)
        return min(self.memory[-quarter:]) - min(self.memory[quarter : 2 * quarter] or self.memory)


def image(seed: int, megapixels: float) -> bytes:
    """A JPEG with shapes and a little noise, three by two."""
    rng = np.random.default_rng(seed)
    height = int((megapixels * 1e6 / 1.5) ** 0.5)
    coarse = Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((height * 3 // 2, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noise = np.tile(
        rng.integers(-6, 7, (256, 256, 1), dtype=np.int16), (-(-height // 256), -(-pixels.shape[1] // 256), 1)
    )
    noisy = np.clip(pixels + noise[:height, : pixels.shape[1]], 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def form(content: bytes, method: str, views: str) -> SentRequest:
    fields = {"classes": "\n".join(CLASSES), "method": method, "views": views}
    files = {"image": ("image.jpg", content)}
    sent = httpx.Request("POST", "http://127.0.0.1/", data=fields, files=files)
    return SentRequest(sent.read(), sent.headers["content-type"])


def garbage(good: SentRequest, content: bytes, method: str) -> list[SentRequest]:
    """Requests that must be refused."""
    kind = good.content_type

    def refused(body: bytes) -> SentRequest:
        return SentRequest(body, kind, (422,))

    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    return [
        refused(good.body.replace(content, b"this is not an image")),
        refused(good.body.replace(content, content[: len(content) // 2])),
        refused(good.body.replace(content, bomb.getvalue())),
        refused(good.body[: len(good.body) // 2]),
        refused(good.body.replace(f"\r\n\r\n{method}\r\n".encode(), b"\r\n\r\nnonsense\r\n")),
        SentRequest(b'{"classes": [', "application/json", (422,)),
        SentRequest(b"hello", "text/plain", (415,)),
    ]


def attacks(content: bytes) -> list[SentRequest]:
    """Requests that would keep a server busy."""
    fields = {"classes": "\n".join(CLASSES), "method": "ttl:steps=10", "views": "64"}
    long = httpx.Request("POST", "http://127.0.0.1/", data=fields, files=[("images", ("a.jpg", content))] * 2)
    keys = ",".join(f'"{number}":0' for number in range(600_000)).encode()
    return [
        SentRequest(long.read(), long.headers["content-type"], (422,), "/v1/classify/batch"),
        SentRequest(b"{" + keys[:8_000_000] + b"}", "application/json", (422,)),
        SentRequest(b"{" + keys + keys + b"}", "application/json", (413,)),
    ]


def half_requests(port: int, wires: list[socket.socket]) -> None:
    """Fifty connections with half a head; those of the last time are closed."""
    while wires:
        wires.pop().close()
    for _ in range(50):
        wires.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        wires[-1].sendall(b"POST /v1/classify HTTP/1.1\r\nHost: loc")


def hang_up(port: int, good: SentRequest) -> None:
    """Send half a request, and close the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as wire:
        head = f"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: {good.content_type}\r\n"
        wire.sendall(f"{head}Content-Length: {len(good.body)}\r\n\r\n".encode() + good.body[:10_000])


def two_gigabytes(port: int) -> int:
    """The status that a request of such a length gets."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        head = b"POST /v1/classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        wire.sendall(head + b"Content-Length: 2147483648\r\n\r\n")
        return int(wire.recv(100).split()[1])


class Load:
    """Clients of one server."""

    def __init__(
        self, port: int, goods: list[SentRequest], bads: list[SentRequest], hostile: list[SentRequest]
    ) -> None:
        self._port = port
        self._hostile = hostile
        self._url = f"http://127.0.0.1:{port}"
        self._goods = goods
        self._bads = bads

    def phase(self, clients: int, seconds: float, bad: float = 0.0, *, hostile: bool = False) -> Phase:
        """`clients` that send requests until the time is over, a share `bad` of them garbage, or `hostile`."""
        phase, start = Phase(), time.monotonic()
        end = start + seconds
        threads = [
            threading.Thread(target=self._client, args=(phase, end, bad, hostile, random.Random(number)))  # noqa: S311
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        while time.monotonic() < end:
            phase.memory.append(self.metric("process_resident_memory_bytes") / 2**20)
            time.sleep(min(1.0, seconds / 20))
        for thread in threads:
            thread.join()
        phase.seconds = time.monotonic() - start
        return phase

    def metric(self, name: str) -> float:
        """A value that the server counts."""
        lines = httpx.get(f"{self._url}/metrics", timeout=60).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def _client(self, phase: Phase, end: float, bad: float, hostile: bool, rng: random.Random) -> None:
        wires: list[socket.socket] = []
        with httpx.Client(timeout=120) as client:
            while (start := time.monotonic()) < end:
                try:
                    if rng.random() < bad:
                        outcome = self._attack(client, rng, wires) if hostile else self._nonsense(client, rng)
                    else:
                        outcome = self._ask(client, rng.choice(self._goods))
                except (httpx.HTTPError, OSError) as error:
                    outcome = type(error).__name__
                with phase.lock:
                    phase.latencies += [time.monotonic() - start] * (outcome == "answered")
                    phase.answered += outcome == "answered"
                    phase.refused += outcome == "refused"
                    if outcome not in ("answered", "refused"):
                        phase.wrong.append(outcome)

    def _ask(self, client: httpx.Client, request: SentRequest) -> str:
        answer = client.post(
            f"{self._url}{request.path}", content=request.body, headers={"content-type": request.content_type}
        )
        if answer.status_code not in request.right:
            return f"{answer.status_code}: {answer.text[:200]}"
        return "answered" if answer.status_code == 200 and answer.json()["label"] in CLASSES else "refused"

    def _attack(self, client: httpx.Client, rng: random.Random, wires: list[socket.socket]) -> str:
        choice = rng.randrange(len(self._hostile) + 1)
        if choice < len(self._hostile):
            return self._ask(client, self._hostile[choice])
        half_requests(self._port, wires)
        return "refused"

    def _nonsense(self, client: httpx.Client, rng: random.Random) -> str:
        choice = rng.randrange(len(self._bads) + 2)
        if choice < len(self._bads):
            return self._ask(client, self._bads[choice])
        if choice == len(self._bads):
            hang_up(self._port, self._goods[0])
            return "refused"
        return "refused" if two_gigabytes(self._port) == 413 else "two gigabytes were not refused"


def start(model: str) -> tuple[subprocess.Popen[str], int]:
    """A server that is ready, and its port."""
    code = "import usetta.cli.serve, usetta.cli; usetta.cli.main()"
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", code, "serve", "--port", "0", "--model", model],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    lines = map(json.loads, iter(process.stdout.readline, ""))
    port = next(line["port"] for line in lines if line["event"] == "listening")
    threading.Thread(target=_drain, args=(process.stdout.readline,), daemon=True).start()
    while httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=60).status_code != 200:
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(0.2)
    return process, port


def _drain(read: Callable[[], str]) -> None:
    while read():
        pass


def measure(options: argparse.Namespace) -> dict[str, float | int | str]:
    """The figures, by name."""
    contents = [image(seed, options.megapixels) for seed in range(DEMO_IMAGES)]
    goods = [form(content, options.method, options.views) for content in contents]
    process, port = start(options.model)
    try:
        bads, hostile = garbage(goods[0], contents[0], options.method), attacks(contents[0])
        load = Load(port, goods, bads, hostile)
        load.phase(2, min(5.0, options.seconds))  # to warm up
        alone = load.phase(1, options.seconds)
        before = load.metric("usetta_batch_images_sum"), load.metric("usetta_batch_images_count")
        together = load.phase(options.clients, options.seconds)
        after = load.metric("usetta_batch_images_sum"), load.metric("usetta_batch_images_count")
        disturbed = load.phase(options.clients, options.seconds, bad=GARBAGE)
        attacked = load.phase(options.clients, options.seconds, bad=GARBAGE, hostile=True)
    finally:
        process.terminate()
        code = process.wait(120)
    for wrong in (*alone.wrong, *together.wrong, *disturbed.wrong, *attacked.wrong)[:10]:
        print(f"error: {wrong}", file=sys.stderr)
    return {
        "requests_per_second_alone": alone.throughput,
        "throughput_ratio": together.throughput / alone.throughput,
        "garbage_slowdown": together.throughput / disturbed.throughput,
        "garbage_refused": disturbed.refused,
        "hostile_slowdown": median(attacked.latencies) / median(together.latencies),
        "hostile_refused": attacked.refused,
        "errors": sum(len(phase.wrong) for phase in (alone, together, disturbed, attacked)),
        "memory_growth": max(phase.growth() for phase in (together, disturbed, attacked)) / mean(together.memory),
        "memory_mb": mean(together.memory),
        "images_per_batch": (after[0] - before[0]) / max(1, after[1] - before[1]),
        "exit_code": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each phase")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--method", default="clip")
    parser.add_argument("--views", default="1", help="a number, or adaptive")
    parser.add_argument("--megapixels", type=float, default=24.0, help="of the images")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        setting = {"threads": torch.get_num_threads(), "clients": options.clients, "seconds": options.seconds}
        print(json.dumps(setting | figures))
        return
    for name, figure in figures.items():
        print(f"{figure:10.3f}  {name}")


if __name__ == "__main__":
    main()
