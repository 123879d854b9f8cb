"""What the option classes check alike: every option by itself, then those that must fit together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

Problem = tuple[str, str]
"""An option, and what is wrong with it: a sentence that begins with its name."""


def wrong_types(options: Any) -> Iterator[Problem]:
    """Options of a dataclass whose values are not of the type that it declares (YAML's `max_batch: "8"`)."""
    for item in fields(options):
        value = getattr(options, item.name)
        kinds = [part.strip() for part in str(item.type).split("|")]
        if value is None and "None" in kinds:
            continue
        is_one, words = _TYPES[kinds[0]]
        if not is_one(value):
            yield item.name, f"{item.name} must be {words}, got {value!r}"


class Range(NamedTuple):
    """Which numbers an option takes, the ends included; `above`: `low` itself is not one of them."""

    low: float
    high: float = math.inf
    above: bool = False

    def has(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"> {self.low}" + ("" if self.high == math.inf else f" and <= {self.high}")
        return f"at least {self.low}" if self.high == math.inf else f"{self.low} to {self.high}"


def out_of_range(options: Any, ranges: Mapping[str, Range], wrong: Mapping[str, str]) -> Iterator[Problem]:
    """Numbers outside their range, apart from those in `wrong`; None is not set."""
    for name, allowed in ranges.items():
        value = None if name in wrong else getattr(options, name)
        if value is not None and not allowed.has(value):
            yield name, f"{name} must be {allowed}, got {value!r}"


def not_among(options: Any, choices: Mapping[str, tuple[str, ...]], wrong: Mapping[str, str]) -> Iterator[Problem]:
    """Names, or lists of names, that are not to choose from, apart from those in `wrong`; None is not set."""
    for name, allowed in choices.items():
        value = None if name in wrong else getattr(options, name)
        for one in (value,) if isinstance(value, str) else value or ():
            if one not in allowed:
                yield name, f"{name} must be one of {', '.join(allowed)}; got {one!r}"


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite one: neither nan nor infinity can be an option, or be stored as JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_list(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(is_item(item) for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_integer, "an integer"),
    "float": (is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (_is_text, "text"),
    "tuple[str, ...]": (_is_list(_is_text), "a list of texts"),
    "tuple[RankPath, ...]": (_is_list(_is_list(is_integer)), "a list of lists of ranks"),
    "SpeculationConfig": (lambda value: type(value).__name__ == "SpeculationConfig", "a SpeculationConfig"),
}
