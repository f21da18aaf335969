"""The command line: one plain typed function per command."""

from usetta.cli import bench, classify, evaluate, report, runs, stock, train  # noqa: F401  (they register commands)
from usetta.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line."""
    app()
