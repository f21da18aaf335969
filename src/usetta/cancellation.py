"""Lets long work stop between two of its steps, when nobody waits for the result any more.

Whoever starts the work says within `checked_by` what is to happen between steps; loops that take long call
`checkpoint`. The work does not know who asked for it, and without anybody who checks, nothing happens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


class WorkCancelledError(Exception):
    """Nobody waits for the result any more."""


@contextmanager
def checked_by(check: Callable[[], None]) -> Iterator[None]:
    """Within it, `check` is called between steps, by any thread. It may raise `WorkCancelledError`."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def checkpoint() -> None:
    """Between two steps of long work."""
    if (check := _check.get()) is not None:
        check()


def current_check() -> Callable[[], None]:
    """`checkpoint` for threads that the work starts: they do not see who checks."""
    return _check.get() or _nobody


def _nobody() -> None:
    pass
