"""A progress bar on standard error, for people only: where nobody watches, there is none."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Tick = Callable[[int, str], None]
"""Takes how many more are done, and what to say beside the bar."""


def track(items: Iterable[Item], total: int, description: str, shown: bool | None = None) -> Iterator[Item]:
    """`items`, behind a bar if `shown`, or by default if there are several and standard error is a terminal."""
    with bar(total, description, shown) as tick:
        for item in items:
            yield item
            tick(1, "")


@contextmanager
def bar(total: int, description: str, shown: bool | None = None, unit: str = "") -> Iterator[Tick]:
    """A bar to be moved by what is yielded; with a `unit` it also tells how many of them are done in a second."""
    if not (total > 1 and sys.stderr.isatty() if shown is None else shown):
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.2f} {unit}/s" if unit and task.speed else "")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(), TimeLeft())
    said = TextColumn("{task.fields[text]}")
    # While a bar is drawn, rich moves what is printed above it, to the bar's own console. That is right for a terminal
    # and wrong for a file or a pipe: answers must stay on standard output.
    with Progress(*columns, said, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as progress:
        task = progress.add_task(description, total=total, text="")
        yield lambda done, text: progress.update(task, advance=done, text=text)
