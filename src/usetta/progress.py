"""A progress bar on standard error, for people only: where nobody watches, there is none.

It is one line whatever the width of the terminal: a second one would be left behind at every move. What is least
important gives way, first the bar itself.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
Tick = Callable[[int, str], None]
"""Takes how many more are done, and what to say beside the bar."""

_SHORTEST_BAR, _LONGEST_BAR = 10, 40
_GIVES_WAY = ("description", "speed", "text", "left")
"""Parts of the line that are left out where it is too narrow, the first one first; a text is cut as far as needed."""
_PERIOD = 600
"""Seconds that the speed is the mean of: a batch of images may take a minute, and two are needed to tell."""


def track(items: Iterable[Item], total: int, description: str, shown: bool | None = None) -> Iterator[Item]:
    """`items`, behind a bar if `shown`, or by default if there are several and standard error is a terminal."""
    with bar(total, description, shown) as tick:
        for item in items:
            yield item
            tick(1, "")


@contextmanager
def bar(total: int, description: str, shown: bool | None = None, *, speed: bool = False) -> Iterator[Tick]:
    """A bar to be moved by what is yielded; with `speed` it also tells how many are done in a second."""
    if not (total > 1 and sys.stderr.isatty() if shown is None else shown):
        yield lambda done, text: None
        return
    from rich.console import Console, ConsoleOptions
    from rich.progress import Progress, Task, TimeRemainingColumn
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    time_left = TimeRemainingColumn()

    class Line:
        def __init__(self, task: Task) -> None:
            self._task = task

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
            task = self._task
            parts = {
                "description": task.description,
                "count": f"{task.completed:.0f}/{total}",
                "speed": f"{task.speed:.3g}/s" if speed and task.speed else "",
                "left": str(time_left.render(task)),
                "text": task.fields["text"],
            }
            kept, length = fit(parts, options.max_width)
            shown = {name: Text(part, _STYLES.get(name, "")) for name, part in kept.items()}
            first = [shown.pop("description")] if "description" in shown else []
            moving = [ProgressBar(total=total, completed=task.completed, width=length)] if length else []
            row = Table.grid(padding=(0, 1))
            row.add_row(*first, *moving, *shown.values())
            yield row

    class OneLine(Progress):
        def get_renderables(self) -> Iterator[Line]:
            return map(Line, self.tasks)

    # While a bar is drawn, rich moves what is printed above it, to the bar's own console. That is right for a terminal
    # and wrong for a file or a pipe: answers must stay on standard output.
    console, also_stdout = Console(stderr=True), sys.stdout.isatty()
    with OneLine(console=console, redirect_stdout=also_stdout, speed_estimate_period=_PERIOD) as progress:
        task = progress.add_task(description, total=total, text="")
        yield lambda done, text: progress.update(task, advance=done, text=text)


_STYLES = {"count": "progress.download", "speed": "progress.data.speed", "left": "progress.remaining"}


def fit(parts: dict[str, str], width: int) -> tuple[dict[str, str], int]:
    """The parts of a line that find room in `width` columns with spaces between them, and the length of the bar.

    The bar takes what is left, within bounds; it is 0 where that is too little.
    """
    kept = {name: part for name, part in parts.items() if part}
    for name in _GIVES_WAY:
        surplus = _length(kept) - width
        if surplus > 0 and name in kept:
            part = kept.pop(name)
            if name == "text" and len(part) > surplus + 1:
                kept[name] = part[: -surplus - 1] + "…"
    room = width - _length(kept) - 1
    return kept, min(room, _LONGEST_BAR) if room >= _SHORTEST_BAR else 0


def _length(parts: dict[str, str]) -> int:
    return sum(map(len, parts.values())) + len(parts) - 1
