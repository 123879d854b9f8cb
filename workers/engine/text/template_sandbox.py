"""The Jinja sandbox in which chat templates run: a template is a stranger's code, so its steps, its time and what it
builds are bounded.

Jinja's own sandbox keeps a template from files, attributes and mutation, but not from `"a" * 10**10`, from nested loops
or from `[x, x]` sixty times over. Here the compiled template reports each statement and comparison (`tick`), and
whatever a call, filter, operator or literal makes is measured (`made`); what could be huge before it can be measured is
computed beforehand (`template_limits.checked`).
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

from workers.engine.text.template_limits import (
    STEP,
    Budget,
    checked,
    require_items,
    require_power,
    require_product,
    require_size,
)

FILTERS = (
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first",
    "float", "forceescape", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower",
    "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr",
    "slice", "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip
"""Jinja's filters without those that no chat needs and that are slow or random: wordwrap, urlize, random, ..."""
REFUSED_METHODS = frozenset({"encode", "from_bytes", "maketrans", "to_bytes", "translate"})
_NUMBER = re.compile(r"\d+")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds. Templates render inside `bounded()`; threads do not share a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        self._local = threading.local()
        super().__init__(**options, optimized=False)
        self.code_generator_class = _TickingGenerator
        self.globals.pop("lipsum", None)
        self.filters = {name: self._bounded_filter(name, self.filters[name]) for name in FILTERS}
        self.tests = {name: self._ticking(test) for name, test in self.tests.items()}

    @contextmanager
    def bounded(self) -> Iterator[Budget]:
        """A fresh budget for what this thread renders inside."""
        self._local.budget = budget = Budget()
        try:
            yield budget
        finally:
            del self._local.budget

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._bounded_filter(name, function)

    @property
    def _budget(self) -> Budget:
        # Constants are folded while a template is compiled, outside of any chat.
        budget: Budget | None = getattr(self._local, "budget", None)
        return Budget() if budget is None else budget

    def tick(self) -> None:
        """One step; None, so that the compiled code can put it before an expression with `or`."""
        self._budget.spend(STEP)

    def made(self, value: Any) -> Any:
        """The value, accounted for."""
        self._budget.made(value)
        return value

    def joined(self, values: Iterable[Any]) -> str:
        """The texts of the values, one behind the other."""
        return self.concat(map(self._text, values))

    def concat(self, parts: Iterable[str]) -> str:
        """Jinja's way to put the parts of a macro or a block together."""
        parts = list(parts)
        require_size(sum(map(len, parts)))
        text: str = self.made("".join(parts))
        return text

    def _text(self, value: Any) -> str:
        self._budget.size(value)
        return str(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "*":
            require_product(left, right)
        elif operator == "**":
            require_power(left, right)
        elif operator == "%" and isinstance(left, str):
            checked(self._budget, "format", left, [right], {})
        return self.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        self = __self
        self.tick()
        if isinstance(__obj, types.BuiltinMethodType | types.MethodType):
            receiver = __obj.__self__
            if isinstance(receiver, str | list | tuple | dict | int | float):
                name = "str.join" if __obj.__name__ == "join" else __obj.__name__
                args = checked(self._budget, name, receiver, args, kwargs)
        return self.made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        template: Any = value.__self__
        if isinstance(template, Markup):
            raise SecurityError("chat templates cannot format escaped text")

        def formatted(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return _BoundedFormatter(self).vformat(template, args, kwargs)

        return formatted

    def _ticking(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            return function(*args, **kwargs)

        return ticking

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            before, value, rest = args[:passed], args[passed], args[passed + 1 :]
            if isinstance(value, Iterator):
                value = list(value)
                require_items(len(value))
            rest = checked(self._budget, name, value, rest, kwargs)
            return self.made(function(*before, value, *rest, **kwargs))

        return bounded


class _BoundedFormatter(SandboxedFormatter):
    """`str.format`, whose widths and results are bounded."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        super().__init__(environment)
        self._environment = environment
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        for width in _NUMBER.findall(format_spec):
            require_size(int(width[:10]))
        self._environment._budget.size(value)
        text = self._environment.made(super().format_field(value, format_spec))
        self._size += len(text)
        require_size(self._size)
        return text


class _TickingGenerator(CodeGenerator):
    """Compiles a template into code that reports its steps and what it builds."""

    def blockvisit(self, statements: Iterable[nodes.Node], frame: Frame) -> None:
        def ticking() -> Iterator[nodes.Node]:
            # The body of a loop may be empty.
            self.writeline("environment.tick()")
            for statement in statements:
                yield statement
                self.writeline("environment.tick()")

        super().blockvisit(ticking(), frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(environment.tick() or ")
        super().visit_Compare(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        # An index gives what is there already; a slice is new.
        if isinstance(node.arg, nodes.Slice):
            self._made(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _made(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")
