"""A progress bar on standard error, for people only: where nobody watches, there is none.

It is drawn by rich and is one line whatever the width of the terminal: no column but the bar itself may wrap, since a
second line would be left behind at every update. Where a text is shown beside it, such as the accuracy so far, a narrow
terminal shows the text rather than the bar.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Tick = Callable[[int, str], None]
"""Takes how many more are done, and the text beside the bar."""

_WIDE = 110
"""Columns of a terminal that has space for the bar and a text."""
_SPEED_PERIOD = 600
"""Seconds that the speed is the mean of. A batch of images may take a minute, and rich's own 30 s would see none."""


def track(items: Iterable[Item], total: int, description: str, shown: bool | None = None) -> Iterator[Item]:
    """`items`, behind a bar if `shown`, or by default if there are several and standard error is a terminal."""
    with _bar(total, description, shown, speed=False, text=False) as tick:
        for item in items:
            yield item
            tick(1, "")


@contextmanager
def bar(total: int, description: str, shown: bool | None = None, *, speed: bool = False) -> Iterator[Tick]:
    """A bar that is moved by calling what is yielded; with `speed` it also shows how many are done in a second."""
    with _bar(total, description, shown, speed=speed, text=True) as tick:
        yield tick


@contextmanager
def _bar(total: int, description: str, shown: bool | None, *, speed: bool, text: bool) -> Iterator[Tick]:
    if not (total > 1 and sys.stderr.isatty() if shown is None else shown):
        yield lambda done, text: None
        return
    import rich.progress as rich
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    class SpeedColumn(rich.ProgressColumn):
        """Items per second; rich has this for bytes only."""

        def render(self, task: rich.Task) -> Text:
            return Text(f"{task.speed:.3g}/s" if task.speed else "", style="progress.data.speed")

    console = Console(stderr=True)
    columns: list[rich.ProgressColumn] = []
    if console.width >= _WIDE or not text:
        columns += [rich.TextColumn("{task.description}"), rich.BarColumn(20 if text else 40)]
    columns.append(rich.MofNCompleteColumn(table_column=Column(no_wrap=True)))
    if speed:
        columns.append(SpeedColumn(table_column=Column(no_wrap=True)))
    columns.append(rich.TimeRemainingColumn(table_column=Column(no_wrap=True)))
    if text:  # it takes the space that the others leave, and is cut to it
        columns.append(rich.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)))
    progress = rich.Progress(
        *columns,
        console=console,
        expand=text,
        speed_estimate_period=_SPEED_PERIOD,
        # While a bar is drawn, rich moves what is printed above it, to the bar's own console. That is right for a
        # terminal and wrong for a file or a pipe: answers must stay on standard output.
        redirect_stdout=sys.stdout.isatty(),
    )
    with progress:
        task = progress.add_task(description, total=total, text="")
        yield lambda done, text: progress.update(task, advance=done, text=text)
