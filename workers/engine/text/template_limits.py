"""What one chat template may take: units of work, seconds, characters; and what would be too much before it is made."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

MAX_TEXT = 2**24
"""Characters of the rendered chat, and of any single value on the way (an item of a list counts as one as well)."""
MAX_WORK = 2**27
"""Characters that all values together may have, a step counting as `STEP`."""
STEP = 64
MAX_SECONDS = 10.0
"""Processor time of one chat."""
MAX_ITEMS = 2**18
MAX_BITS = 2**14
MAX_DEPTH = 64

_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*([\d*]*)(?:\.([\d*]*))?")


class TemplateLimit(Exception):
    """A chat template took more than it may have; the message names the bound."""


class Budget:
    """What one chat may still take."""

    __slots__ = ("_look", "_sizes", "_started", "_work")

    def __init__(self) -> None:
        self._work = 0
        self._started = time.thread_time()
        self._look = time.perf_counter() + MAX_SECONDS
        self._sizes: dict[int, tuple[Any, int, int]] = {}

    def spend(self, work: int) -> None:
        """Raises `TemplateLimit` when work or time has run out."""
        self._work += work
        if self._work > MAX_WORK:
            raise TemplateLimit(f"it does more than the {MAX_WORK:,} units of work that a chat template may do")
        if time.perf_counter() > self._look:
            # A process that was stopped, or waited for a processor, has spent the clock's time and not its own.
            used = time.thread_time() - self._started
            if used > MAX_SECONDS:
                raise TemplateLimit(
                    f"it runs for more than the {MAX_SECONDS:.0f} seconds that a chat template may take"
                )
            self._look = time.perf_counter() + MAX_SECONDS - used

    def made(self, value: Any) -> None:
        """Account for a new value."""
        if isinstance(value, str | bytes):
            self.spend(len(value))
            require_size(len(value))
        elif isinstance(value, list | tuple | dict):
            require_items(len(value))
            self.spend(8 * len(value))
            self.size(value)

    def size(self, value: Any) -> int:
        """Characters and items of a value, of what it holds as often as it holds it. Raises `TemplateLimit`."""
        return self._measured(value)[0]

    def _measured(self, value: Any) -> tuple[int, int]:
        if isinstance(value, str | bytes):
            return len(value) + 1, 0
        if isinstance(value, int):
            return 1 + value.bit_length() // 3, 0
        children: Iterable[Any]
        if isinstance(value, Mapping):
            children = chain(value, value.values())
        elif isinstance(value, list | tuple | set):
            children = value
        else:
            return 1, 0
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1], known[2]
        size, depth = 1, 0
        for child in children:
            inner, below = self._measured(child)
            size, depth = size + inner, max(depth, below)
            require_size(size)
        if depth >= MAX_DEPTH:
            raise TemplateLimit(f"it nests lists or mappings more than {MAX_DEPTH} deep")
        # The value is held, so that nothing else gets its id.
        self._sizes[id(value)] = value, size, depth + 1
        return size, depth + 1


def require_size(size: int) -> None:
    """Raises `TemplateLimit` for a value with more characters and items than a chat may have."""
    if size > MAX_TEXT:
        raise TemplateLimit(f"it makes more than the {MAX_TEXT:,} characters that a chat template may make")


def require_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateLimit(f"it makes a list of more than {MAX_ITEMS:,} items")


def require_product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
            require_size(len(sequence) * times)
            if isinstance(sequence, list | tuple):
                require_items(len(sequence) * times)
    if isinstance(left, int) and isinstance(right, int):
        require_bits(left.bit_length() + right.bit_length())


def require_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        require_bits(left.bit_length() * abs(right))


def require_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimit(f"it computes a number of more than {MAX_BITS:,} bits")


_Check = Callable[[Budget, Any, list[str], list[int], list[Any]], None]
"""Raises `TemplateLimit` for (budget, value, arguments that are texts, those that are integers, all arguments)."""


def _check_join(budget: Budget, value: Any, texts: list[str], _: list[int], given: list[Any]) -> None:
    _check_joined(budget, value, "".join(texts))


def _check_method_join(budget: Budget, value: Any, _: list[str], __: list[int], given: list[Any]) -> None:
    for items in given:
        _check_joined(budget, items, str(value))


def _check_joined(budget: Budget, items: Any, separator: str) -> None:
    if isinstance(items, Iterable):
        items = list(items)
        require_size(budget.size(items) + len(items) * len(separator))


def _check_replace(_: Budget, value: Any, texts: list[str], __: list[int], ___: list[Any]) -> None:
    text = str(value)
    if len(texts) > 1:
        require_size(len(text) + (text.count(texts[0]) if texts[0] else len(text) + 1) * len(texts[1]))


def _check_indent(_: Budget, value: Any, texts: list[str], numbers: list[int], __: list[Any]) -> None:
    text = str(value)
    require_size(len(text) + (len(text.splitlines()) + 1) * max([4, *numbers, *map(len, texts)]))


def _check_tabs(_: Budget, value: Any, __: list[str], numbers: list[int], ___: list[Any]) -> None:
    text = str(value)
    require_size(len(text) + text.count("\t") * max([8, *numbers]))


def _check_json(budget: Budget, value: Any, texts: list[str], numbers: list[int], _: list[Any]) -> None:
    require_size(budget.size(value) * (1 + max([0, *numbers, *map(len, texts)])))


def _check_whole(budget: Budget, value: Any, _: list[str], __: list[int], ___: list[Any]) -> None:
    budget.size(value)


def _check_split(_: Budget, value: Any, texts: list[str], __: list[int], ___: list[Any]) -> None:
    separator = texts[0] if texts else None
    # Without a separator a text is split at runs of white space: counted only when there may be too many.
    if len(value) > MAX_ITEMS:
        require_items(value.count(separator) if separator else sum(map(str.isspace, value)))


def _check_list(_: Budget, value: Any, __: list[str], numbers: list[int], ___: list[Any]) -> None:
    require_items(max([len(value) if hasattr(value, "__len__") else 0, *numbers]))


def _check_round(_: Budget, __: Any, ___: list[str], numbers: list[int], ____: list[Any]) -> None:
    require_bits(4 * max([0, *numbers]))


def _check_sum(_: Budget, value: Any, __: list[str], ___: list[int], given: list[Any]) -> None:
    if any(isinstance(start, list | tuple) for start in given):
        raise TemplateLimit("it adds up lists, which a chat template may not")


def _check_format(budget: Budget, value: Any, _: list[str], __: list[int], given: list[Any]) -> None:
    text = str(value)
    widths = 0
    conversions = 0
    for conversion in _CONVERSION.finditer(text):
        conversions += 1
        for width in conversion.groups():
            if width and "*" in width:
                raise TemplateLimit("it formats with a width from an argument, which a chat template may not")
            widths += int(width[:10]) if width else 0
    require_size(len(text) + widths + conversions * sum(map(budget.size, given)))


_CHECKS: dict[str, _Check] = {
    "join": _check_join,
    "str.join": _check_method_join,
    "replace": _check_replace,
    "indent": _check_indent,
    "expandtabs": _check_tabs,
    "tojson": _check_json,
    "string": _check_whole,
    "urlencode": _check_whole,
    "split": _check_split,
    "rsplit": _check_split,
    "splitlines": lambda budget, value, texts, numbers, given: _check_split(budget, value, ["\n"], numbers, given),
    "list": _check_list,
    "batch": _check_list,
    "slice": _check_list,
    "round": _check_round,
    "sum": _check_sum,
    "format": _check_format,
}
"""What has to be computed before a filter or a method of text runs, since its result can outgrow its arguments."""


def checked(budget: Budget, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or of a method of text, those that are made on the way as lists.

    Raises `TemplateLimit` when what comes out would be too large.
    """
    args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
    given = [*args, *kwargs.values()]
    numbers = [abs(number) for number in given if isinstance(number, int)]
    if name in _CHECKS:
        _CHECKS[name](budget, value, [text for text in given if isinstance(text, str)], numbers, given)
    for number in numbers:
        require_size(number)
    return args
