"""The log and the counters of the server.

The log is one JSON object per line, and nothing that callers send goes into it: no image, class name or key. For the
same reason a label of a Prometheus counter is never a path, name or method that a caller chose; besides, each value of
a label takes memory for good.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

LOG_LEVELS = {
    "usetta": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "asyncio": logging.WARNING,
    "python_multipart": logging.CRITICAL,  # it quotes what is malformed, which callers read in the error anyway
}
"""Loggers that write to the log, and from which level on."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON, with the `fields` it was given."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line |= _describe(record.exc_info[1])
        return json.dumps(line)


def _describe(error: BaseException) -> dict[str, object]:
    """The type of an error and where it happened. Its message may repeat what a caller sent, and stays out."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "where": [f"{f.filename}:{f.lineno} {f.name}" for f in frames]}


class RepetitionFilter(logging.Filter):
    """Lets through so many records of a kind in so many seconds; the next one then says how many were left out.

    A kind is an event with its status. Requests that were answered are all logged: their number is bounded by the work
    they are, while an attack that costs its sender nothing would fill the disk.
    """

    def __init__(self, most: int = 50, seconds: float = 10.0) -> None:
        super().__init__()
        self._most = most
        self._seconds = seconds
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        fields: dict[str, object] = getattr(record, "fields", {})
        status = fields.get("status", 0)
        if record.levelno < logging.WARNING and isinstance(status, int) and status < 400:
            return True
        kind = record.name, record.msg, status
        began, count = self._kinds.get(kind, (record.created, 0))
        if not 0 <= record.created - began < self._seconds:  # also if the clock was set back
            if count > self._most:
                record.fields = fields | {"left_out": count - self._most}
            began, count = record.created, 0
        self._kinds[kind] = began, count + 1
        return count < self._most


def configure_log(stream: TextIO | None = None) -> None:
    """Send the log of this package, and warnings of the libraries below it, to `stream` or standard output."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RepetitionFilter())
    for name, level in LOG_LEVELS.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class ServerMetrics:
    """The counters of one application, apart from those of any other in the same process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "usetta_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "usetta_request_seconds", "Time from request to answer.", ["route"], registry=self._registry
        )
        self.queue = Gauge("usetta_queue", "Requests that are read, waiting or answered.", registry=self._registry)
        self.batches = Histogram(
            "usetta_batch_images",
            "Images that the model thread took from the queue together.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self._registry,
        )
        self.text_lists = Gauge(
            "usetta_text_lists", "Class lists whose text features are kept.", registry=self._registry
        )
        self.sessions = Gauge("usetta_sessions", "Memories of streams that are kept.", registry=self._registry)
        self.text_bytes = Gauge("usetta_text_bytes", "Memory of the kept text features.", registry=self._registry)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
