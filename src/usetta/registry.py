"""Names and what they stand for: one registry for methods, losses, readouts, tuners, models and datasets.

Another package adds to a registry by an entry point (`usetta.methods`, `usetta.models`, `usetta.datasets`) whose name
is the name and whose object is the value. Entry points are loaded when an unknown name is asked for or all names are
listed, so they cost nothing before. One that fails to load is logged and left out: a broken plug-in must not break the
rest.
"""

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger("usetta")


class Registry(Generic[T]):
    """Values of one kind by name.

    `kind` is what error messages call them. `group` is the group of entry points that may add to them. `normalize`
    maps all spellings of a name to one (`ViT-B/16` and `vit_b_16`); by default there is one spelling only. `check`
    raises an error for a name and value that cannot be registered. `error` is raised for an unknown name.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str | None = None,
        normalize: Callable[[str], str] = str,
        check: Callable[[str, T], None] | None = None,
        error: Callable[[str], Exception] = ValueError,
    ) -> None:
        self.kind = kind
        self._group = group
        self._normalize = normalize
        self._check = check
        self._error = error
        self._values: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        """Aliases as written, with the name that each stands for."""
        self._spellings: dict[str, str] = {}
        """Names and aliases, normalized, with the name that each stands for."""

    def register(self, name: str, value: T, *aliases: str) -> T:
        """Make `value` known under a name that is not taken yet, and under aliases."""
        if self._check:
            self._check(name, value)
        for spelling in (name, *aliases):
            if self._normalize(spelling) in self._spellings:
                raise ValueError(f"there is already a {self.kind} called {spelling!r}")
        self._values[name] = value
        self._aliases |= dict.fromkeys(aliases, name)
        self._spellings |= {self._normalize(spelling): name for spelling in (name, *aliases)}
        return value

    def unregister(self, name: str) -> None:
        """Forget a name and its aliases."""
        del self._values[name]
        self._aliases = {alias: known for alias, known in self._aliases.items() if known != name}
        self._spellings = {spelling: known for spelling, known in self._spellings.items() if known != name}

    def find(self, name: str) -> T | None:
        """What `name` stands for, or None."""
        known = self._spellings.get(self._normalize(name))
        if known is None:
            self._load_entry_points()
            known = self._spellings.get(self._normalize(name))
        return None if known is None else self._values[known]

    def get(self, name: str) -> T:
        """What `name` stands for; an unknown name is an error that suggests the nearest one."""
        value = self.find(name)
        if value is None:
            hint = suggest(name, self.names(), self._normalize, aliases=self._aliases)
            raise self._error(f"unknown {self.kind} {name!r}; {hint}")
        return value

    def canonical(self, name: str) -> str | None:
        """The name that `name` is a spelling or an alias of, or None."""
        self.find(name)  # loads entry points if need be
        return self._spellings.get(self._normalize(name))

    def names(self) -> list[str]:
        """All names in the order of their registration, without aliases."""
        self._load_entry_points()
        return list(self._values)

    def items(self) -> list[tuple[str, T]]:
        """Names and what they stand for."""
        return [(name, self._values[name]) for name in self.names()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def __getitem__(self, name: str) -> T:
        return self.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def _load_entry_points(self) -> None:
        # Once, and also when the code of an entry point asks for a name while it is being loaded.
        group, self._group = self._group, None
        for point in entry_points(group=group) if group else ():
            try:
                value = point.load()
                # Importing the plug-in may already have registered what its entry point names.
                if self._values.get(point.name) is not value:
                    self.register(point.name, value)
            except Exception as error:  # noqa: BLE001 - code of another package may raise anything
                _log.warning("the plug-in %s (%s) cannot be loaded: %s", point.name, point.value, error)


def suggest(
    name: str, known: Iterable[str], normalize: Callable[[str], str] = str, *, aliases: Iterable[str] = ()
) -> str:
    """The hint for an unknown name: the nearest known name or alias, or else all known names."""
    known = list(known)
    by_spelling = {normalize(spelling): spelling for spelling in (*known, *aliases)}
    nearest = difflib.get_close_matches(normalize(name), list(by_spelling), n=1)
    return f"did you mean '{by_spelling[nearest[0]]}'?" if nearest else f"known: {', '.join(known)}"
