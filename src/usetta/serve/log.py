"""The log: one JSON object per line. What callers send, images, class names, keys, never goes in."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import TextIO


class JsonLines(logging.Formatter):
    """A record as one line, with the `fields` it was given."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line |= describe(record.exc_info[1])
        return json.dumps(line)


def describe(error: BaseException) -> dict[str, object]:
    """The kind of an error and where it happened. Its message may repeat what a caller sent, and stays out."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "where": [f"{f.filename}:{f.lineno} {f.name}" for f in frames]}


HEARD = {
    "usetta": logging.INFO,
    "uvicorn.error": logging.WARNING,
    "asyncio": logging.WARNING,
    "python_multipart": logging.CRITICAL,  # it quotes what is malformed; the caller is told anyway
}
"""Loggers that speak, and from which level on."""


def configure(stream: TextIO | None = None) -> None:
    """Send the log of this package, and what the libraries below it complain about, to `stream` or standard output."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines())
    for name, level in HEARD.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
