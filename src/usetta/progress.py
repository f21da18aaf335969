"""A progress bar on standard error, for people only: where nobody watches, there is none."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], total: int, description: str, shown: bool | None = None) -> Iterator[Item]:
    """`items`, behind a bar if `shown`, or by default if there are several and standard error is a terminal."""
    if not (total > 1 and sys.stderr.isatty() if shown is None else shown):
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # While a bar is drawn, rich moves what is printed above it, to the bar's own console. That is right for a terminal
    # and wrong for a file or a pipe: answers must stay on standard output.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task(description, total=total)
        for item in items:
            yield item
            progress.advance(task)
