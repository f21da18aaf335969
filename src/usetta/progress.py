"""A progress bar on standard error, for people only: where nobody watches, there is none.

It is drawn by rich and is one line whatever the width of the terminal: no column but the bar itself may wrap, since a
second line would be left behind at every update. Where a text is shown beside it, such as the accuracy so far, a narrow
terminal shows the text rather than the bar. Work inside of other work (class names that are encoded when the first
image needs them) has a line of its own below, as long as it takes.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

Item = TypeVar("Item")
Tick = Callable[[int, str], None]
"""Takes how many more are done, and the text beside the bar."""

_WIDE = 110
"""Columns of a terminal that has space for the bar and a text."""
_quiet = False
_current: "Progress | None" = None
"""What is drawn now: two independent displays would overwrite each other."""
_SPEED_PERIOD = 600
"""Seconds that the speed is the mean of. A batch of images may take a minute, and rich's own 30 s would see none."""


def be_quiet(quiet: bool) -> None:
    """Show no bars in this process, or show them again."""
    global _quiet
    _quiet = quiet


@contextmanager
def waiting(description: str) -> Iterator[None]:
    """A spinner and the seconds so far, for work of one step; it disappears when the work is done."""
    if _quiet or _current or not sys.stderr.isatty():
        yield
        return
    import rich.progress as rich
    from rich.console import Console
    from rich.text import Text

    class CountColumn(rich.MofNCompleteColumn):
        """How many of how many, for work inside of this."""

        def render(self, task: rich.Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = (rich.SpinnerColumn(), rich.TextColumn("{task.description}", markup=False), CountColumn())
    progress = rich.Progress(
        *columns,
        rich.TimeElapsedColumn(),
        console=Console(stderr=True),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    )
    with _drawn(progress):
        progress.add_task(description, total=None, text="")
        yield


def track(items: Iterable[Item], total: int | None, description: str, shown: bool | None = None) -> Iterator[Item]:
    """`items`, behind a bar if `shown`, or by default if there are several and standard error is a terminal.

    The total is None where nobody knows it yet.
    """
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
def _bar(total: int | None, description: str, shown: bool | None, *, speed: bool, text: bool) -> Iterator[Tick]:
    if shown is None:  # while a bar is drawn, standard error is rich's, which does not say that it is a terminal
        shown = (total is None or total > 1) and not _quiet and bool(_current or sys.stderr.isatty())
    if not shown:
        yield lambda done, text: None
        return
    if outer := _current:
        inner = outer.add_task(description, total=total, text="")
        try:
            yield lambda done, text: outer.update(inner, advance=done)
        finally:
            outer.remove_task(inner)
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
    with _drawn(progress):
        task = progress.add_task(description, total=total, text="")
        yield lambda done, text: progress.update(task, advance=done, text=text)


@contextmanager
def _drawn(progress: "Progress") -> Iterator[None]:
    global _current
    _current = progress
    try:
        with progress:
            yield
    finally:
        _current = None
