"""The command line: one plain typed function per command."""

import atexit
import gc

from usetta.cli import (  # noqa: F401  (they register their commands)
    attack,
    bench,
    classify,
    data,
    demo,
    doctor,
    evaluate,
    export_model,
    listing,
    reproduce,
    results,
    sample,
    serve,
    train,
)
from usetta.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line.

    The objects that torch makes when it is imported live until the end, so the collector need not look through them
    again and again meanwhile, nor when the process ends: that takes as long as an answer.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    app()
