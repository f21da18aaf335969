"""Options: the parameters that a loss, a readout, a tuner or a selection rule declares for itself.

They are the keyword-only parameters that have a default, so a function declares them by its signature:

    def reliability(recipe, before, after, features, *, neighbours: Count = 20, temperature: Positive = 0.01)

and `r-tpt:neighbours=10` works. The annotation gives type and range; without one the type is that of the default.
Keyword-only parameters without a default, such as a tuner's `lr`, are filled in from the recipe's own settings.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, get_args

Value: TypeAlias = float | int | str | bool


@dataclass(frozen=True)
class ValueRange:
    """The range of a number: from `low` on, or above it, up to `high`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    """Whether `low` itself is excluded."""

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        limits = [low] * math.isfinite(self.low) + [f"at most {self.high:g}"] * math.isfinite(self.high)
        return " and ".join(limits) or "finite"


Share = Annotated[float, ValueRange(0, 1, above=True)]
Positive = Annotated[float, ValueRange(0, above=True)]
NotNegative = Annotated[float, ValueRange(0)]
Count = Annotated[int, ValueRange(1)]
Seed = Annotated[int, ValueRange(0, 2**63 - 1)]


@dataclass(frozen=True)
class Option:
    """One parameter that a function declares."""

    name: str
    kind: type
    """float, int, str or bool."""
    default: Value
    interval: ValueRange = ValueRange()
    """Of numbers."""

    def parse(self, text: str) -> Value:
        """The value that is written as `text` in a method's name."""
        return self.check(parse_value(self.name, text, (self.kind,)))

    def check(self, value: Any) -> Value:
        """`value` in the option's own type; ValueError if it is of another type or out of range."""
        if self.kind is float and type(value) is int:
            value = float(value)  # so that 1 and 1.0 give one recipe and one name
        of_its_kind: bool = type(value) is self.kind  # not isinstance: True is an int, too
        if not of_its_kind:
            raise ValueError(f"{self.name} must be of type {self.kind.__name__}, not {value!r}")
        checked: Value = value
        if self.kind in (float, int) and float(checked) not in self.interval:
            raise ValueError(f"{self.name} must be {self.interval}, not {value!r}")
        return checked


@cache
def options_of(function: Callable[..., Any]) -> Mapping[str, Option]:
    """The options that a function, or the constructor of a class, declares, by name."""
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty:
            options[name] = _option(function, name, parameter)
    return MappingProxyType(options)


def parse_value(name: str, text: str, kinds: tuple[type, ...]) -> Value:
    """`text` as a value of the first of `kinds` that it can be read as."""
    for kind in kinds:
        try:
            value: Value = {"true": True, "false": False}[text] if kind is bool else kind(text)
        except (ValueError, KeyError):
            continue
        return value
    raise ValueError(f"invalid value {text!r} for the setting {name}")


def _option(function: Callable[..., Any], name: str, parameter: inspect.Parameter) -> Option:
    declared = parameter.annotation
    kind, *extras = get_args(declared) if hasattr(declared, "__metadata__") else (declared,)
    if kind not in (float, int, str, bool):  # none, or a string because of `from __future__ import annotations`
        kind = type(parameter.default)
    if kind not in (float, int, str, bool):
        raise TypeError(f"the option {name} of {function!r} must be a number, a string or a bool")
    interval = next((extra for extra in extras if isinstance(extra, ValueRange)), ValueRange())
    return Option(name, kind, parameter.default, interval)
