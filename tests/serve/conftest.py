"""A real server on a free loopback port, with the tiny model, for tests that talk HTTP to it."""

import base64
import faulthandler
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from conftest import make_image
from usetta.models import Model
from usetta.models.clip import CLIP
from usetta.serve.app import listen, make_server
from usetta.serve.monitoring import LOG_LEVELS
from usetta.serve.service import ModelService
from usetta.serve.settings import Settings

CLASSES = ["tabby cat", "red fox", "golden retriever"]


def png(seed: int = 0, size: tuple[int, int] = (60, 40)) -> bytes:
    return saved(make_image(seed, size), "PNG")


def saved(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def in_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


@dataclass(frozen=True)
class Running:
    """A server in a thread of this process."""

    port: int
    service: ModelService
    signal: Callable[[int], None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, content: bytes = b"", *, timeout: float = 60, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """The answer about an image, asked in JSON."""
        asked = {"image": in_base64(content or png()), "classes": CLASSES, "views": 8} | options
        return httpx.post(f"{self.url}/v1/classify", json=asked, timeout=timeout, headers=headers)

    def compare(
        self, content: bytes = b"", *, timeout: float = 60, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """The answer of several methods about an image, asked in JSON."""
        asked = {"image": in_base64(content or png()), "classes": CLASSES, "views": 8} | options
        return httpx.post(f"{self.url}/v1/compare", json=asked, timeout=timeout, headers=headers)

    def send(self, fields: dict[str, Any], content: bytes | None = None, name: str = "cat.png") -> httpx.Response:
        """The answer about an image, asked by a form."""
        files = {"image": (name, png() if content is None else content)}
        return httpx.post(f"{self.url}/v1/classify", data=fields, files=files, timeout=60)

    def raw(self, request: bytes) -> "Wire":
        """A connection on which `request` was sent as it is."""
        wire = Wire(socket.create_connection(("127.0.0.1", self.port), timeout=30))
        wire.socket.sendall(request)
        return wire

    def metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)


@dataclass(frozen=True)
class Wire:
    """A connection without a client library."""

    socket: socket.socket

    def answer(self) -> tuple[int, dict[str, Any]]:
        """The status and the JSON of the answer."""
        reader = self.socket.makefile("rb")
        status = int(reader.readline().split()[1])
        length = 0
        while (line := reader.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return status, json.loads(reader.read(length))


class Waiting:
    """A model that encodes nothing before it may, and records how many views it was given at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.may = threading.Event()
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        if len(pixels):  # the strong views of an image that has none
            self.calls.append(len(pixels))
        assert self.may.wait(60)
        return self._model.encode_images(pixels)


def eventually(fact: Callable[[], Any], seconds: float = 20) -> None:
    """Wait until `fact` is true."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


@contextmanager
def running(settings: Settings, model: Any) -> Iterator[Running]:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = make_server(settings, model)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started and server.service.is_ready)
        yield Running(port, server.service, lambda number: server.handle_exit(number, None))
    finally:
        server.service.is_shutting_down = True
        thread.join(30)
        if thread.is_alive():
            faulthandler.dump_traceback()
        assert not thread.is_alive(), f"{server.service.in_flight} requests in flight"


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """After a test that sets up the log, the loggers are as they were."""
    loggers = [logging.getLogger(name) for name in LOG_LEVELS]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Views that go through the model together are one call of it, however many cores there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def server(tiny_model: CLIP) -> Iterator[Running]:
    """A server with the limits it has by default."""
    with running(Settings(), tiny_model) as shared:
        yield shared


@pytest.fixture
def waiting(tiny_model: CLIP) -> Iterator[Waiting]:
    """The tiny model, stopped until a test lets it go; it goes at the end in any case."""
    model = Waiting(tiny_model)
    yield model
    model.may.set()
