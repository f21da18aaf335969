"""The settings of a server. Every number that a caller could make large has its limit here."""

from dataclasses import dataclass, field, fields
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """The most that one caller gets; what exceeds it is refused before work is done for it."""

    upload: int = 16 * 2**20
    """Bytes of a request's body, in whatever format: images in JSON are a third longer because of base64."""
    json: int = 8 * 2**20
    """Bytes of a body in JSON, which takes more time and memory to read than a form."""
    pixels: int = 50_000_000
    """Pixels of an image, known from its header before it is decoded."""
    classes: int = 1000
    """Class names in a request."""
    name_length: int = 200
    """Characters of a class name, a template or a method."""
    templates: int = 8
    """Templates in a request; `ensemble` counts as its seven."""
    views: int = 128
    """Views of an image; adaptive requests stop there, too, if it is less than their own 64."""
    steps: int = 10
    """Tuning steps that a method may ask for (`use:steps=4`)."""
    methods: int = 16
    """Methods that are compared in a request."""
    images: int = 16
    """Images in a batch."""
    cost: int = 1280
    """Work for a request, in views that are encoded, see `costs`: 16 images of 64 views, and some tuning."""
    sessions: int = 64
    """Memories of streams that are kept: one for each session, method, model and class list."""
    queue: int = 64
    """Requests that are read, waiting or answered at one time; one more is refused and may try again later."""
    queue_per_caller: int = 32
    """Of these, requests of one caller: of one key, or of one address where there are no keys."""
    seconds: float = 60.0
    """Time of a request, from its first byte to its answer."""
    pause: float = 10.0
    """Time in which nothing of a request arrives: of its head in all, of its body at a stretch."""
    connections: int = 512
    """Open connections. One more closes the one that has waited longest for its request, if there is one."""
    connections_per_address: int = 128
    """Of these, connections of one address."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            # Written so that NaN is refused as well.
            if not getattr(self, limit.name) > 0:
                raise ValueError(f"the limit {limit.name} must be above 0, not {getattr(self, limit.name)}")


@dataclass(frozen=True)
class Settings:
    """What the server answers with, and to whom."""

    model: str = "auto"
    """The model that answers unless a request names another."""
    precision: str = "auto"
    """Of the image towers: auto, fp32, bf16, fp16 or int8."""
    device: str = "auto"
    """Where models compute: auto, cpu, cuda or mps."""
    extra_models: tuple[str, ...] = ()
    """Other models that a request may name. They are loaded at the start, from this machine alone."""
    reward_model: str | None = None
    """The model that methods with a reward (RLCF) learn from; by default the model that answers."""
    context: Path | None = None
    """A learned context for `model`, used where a request brings no templates."""
    calibration: Path | None = None
    """A file of `usetta calibrate`, for answers of `model` by the method that it was fitted on."""
    cache: Path | None = None
    """A folder that keeps features of views, so that an image is encoded once; it grows without limit."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys that callers must send; without any, the server is open to all who reach it."""
    limits: Limits = Limits()
    hosts: tuple[str, ...] = ()
    """Names by which callers may address the server, besides those of this machine: `usetta.example`; `*` for all."""
    page: bool = True
    """Whether there is a web page at `/`, and one about the API at `/docs`."""
    threads: int = 2
    """Threads that decode images and make views."""
    batch_views: int | None = None
    """Views that the model thread takes from the queue at once, if several images wait; one image may have more.
    By default 64 on a CPU, 512 on a GPU."""
    views_ahead: int = 1024
    """Views that may be ready and waiting for the model: at 224 pixels 150 KB each, 600 KB with AugMix."""
    text_bytes: int = 2**30
    """Memory for the text features, and the graphs for tuning, of recent class lists."""
    session_bytes: int = 2**29
    """Memory for what streams have learned; those that were not used for longest are forgotten first."""
    session_seconds: float = 3600.0
    """Time after which what a stream has learned is forgotten if nobody uses it."""

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.keys):
            raise ValueError("an API key must not be empty")
        if not self.session_seconds > 0:
            raise ValueError(f"session_seconds must be above 0, not {self.session_seconds}")
        for name in ("threads", "batch_views", "views_ahead", "text_bytes", "session_bytes"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
