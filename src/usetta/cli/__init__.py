"""The command line: one plain typed function per command."""

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
    """Run the command line."""
    app()
