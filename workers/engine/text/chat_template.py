"""Chat templates: from messages to the text that a model was trained to read, as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from workers.engine.text.template_limits import require_size
from workers.engine.text.template_sandbox import BoundedEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages carry their reasoning; templates read the first, or the second."""


class ChatTemplate:
    """One template, compiled once. Raises `jinja2.TemplateError` when it does not compile."""

    def __init__(self, source: str) -> None:
        self._environment = _environment()
        self._template = self._environment.from_string(source)
        tree = self._environment.parse(source)
        texts = {node.data for node in tree.find_all(nodes.TemplateData)}
        texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.literals = "\0".join(sorted(texts))
        """All that the template writes or compares with by itself, NUL between the pieces."""

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, str]) -> str:
        """The text of the messages, ready for the answer; `variables` are the special tokens by their names.

        Raises what the template raises, and `TemplateLimit` when it takes too much.
        """
        chat = [_with_reasoning({str(key): _plain(value) for key, value in message.items()}) for message in messages]
        values = {**variables, "messages": chat, "tools": None, "documents": None, "add_generation_prompt": True}
        parts: list[str] = []
        size = 0
        with self._environment.bounded():
            for part in self._template.root_render_func(self._template.new_context(values)):
                parts.append(part)
                size += len(part)
                require_size(size)
        return "".join(parts)


def _plain(value: Any) -> Any:
    """JSON types alone, as transformers hands them to templates: others have methods that no sandbox knows."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Generation(Extension):
    """`{% generation %}`, with which templates mark answers for training: here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(template: str) -> str:
    # Python gives a time up to 256 times the length of its template.
    require_size(256 * len(template))
    return datetime.now().strftime(template)


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore. Shown without its contents, which may hold others."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in Jinja, so that `namespace(self=...)` works.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: its name begins with an underscore")
