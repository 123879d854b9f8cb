"""From a row's prompt or messages to the text that is tokenised."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.exceptions import TemplateSyntaxError

from storage.spec import JobSpec
from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.text.control_tokens import SpelledTokens
from workers.engine.text.template_limits import TemplateLimit
from workers.errors import BadRow, InvalidSpec
from workers.rows.texts import check_text

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_ALONE = "this engine answers text alone; leave the row out, or give its content as text"
IN_A_REQUEST = "this looks like a request in OpenAI's form; the column must hold the list under its key"
MOST_SHOWN = 200
"""Characters of a wrong value that its message quotes."""
SYSTEM_PROMPT_NEEDS_ONE = "system_prompt needs a chat template: remove it and write it into the prompts"
NO_TOOL_CALLS = (
    "has tool_calls and content null, and the target's chat template has no place for tool calls: give the message "
    "text as content, or use a model whose template has"
)


class PromptRenderer:
    """Renders what the text column of a job holds, prompts or messages; with the chat template for all rows or none.

    Raises `InvalidSpec` when no row at all could be rendered.
    """

    def __init__(
        self,
        spec: JobSpec,
        tokenizer: TextTokenizer,
        check_messages: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        """`check_messages` may raise `BadRow` before the template renders them."""
        self._tokenizer = tokenizer
        self._check_messages = check_messages
        self._system_prompt = spec.system_prompt
        self._from_messages = spec.input.messages_column is not None
        self._parse_content = spec.special_tokens_in_content == "parse"
        wanted = spec.chat_template
        self.uses_template = self._from_messages or (tokenizer.has_chat_template if wanted is None else wanted)
        """Whether the texts come from the chat template, which writes the special tokens itself."""
        self._require_template(spec)

    def render(self, value: Any) -> str:
        """The text of one row. Raises `BadRow` with the code of what is wrong with it."""
        if value is None:
            raise BadRow("null_prompt", "the messages are null" if self._from_messages else "the prompt is null")
        if self._from_messages:
            return self._apply_template(self._with_system_prompt(parse_messages(value)))
        if not isinstance(value, str):
            raise BadRow("invalid_text", f"the prompt must be a string, got {type(value).__name__}")
        check_text(value, "the prompt")
        if not self.uses_template:
            return value
        return self._apply_template(self._with_system_prompt([{"role": "user", "content": value}]))

    def _require_template(self, spec: JobSpec) -> None:
        require_sense(spec)
        if not self.uses_template:
            if spec.system_prompt is not None:
                raise InvalidSpec(f"the target's tokenizer has no chat template, and {SYSTEM_PROMPT_NEEDS_ONE}")
            return
        if not self._tokenizer.has_chat_template:
            column = spec.input.messages_column
            what = f"the messages of column {column!r} need" if column else "chat_template true needs"
            raise InvalidSpec(
                f"{what} a chat template, and the target's tokenizer has none: use a model that has, or a prompt "
                "column with chat_template false"
            )
        try:
            self._tokenizer.render([{"role": "user", "content": "-"}])
        except TemplateSyntaxError as error:
            raise InvalidSpec(f"the target's chat template does not compile: {error.message}") from error
        except Exception:
            # It may well refuse such a chat: then rows will say so.
            pass

    def _with_system_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A row's own system message counts more than the job's."""
        if self._system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        lacking = next((place for place, message in enumerate(messages) if "content" not in message), None)
        if self._check_messages is not None:
            self._check_messages(messages)
        try:
            text = self._tokenizer.render(messages, parse_content=self._parse_content)
            if lacking is not None and not self._shows_tool_calls(messages, text):
                raise BadRow("template_error", f"message {lacking} (assistant) {NO_TOOL_CALLS}")
        except BadRow:
            raise
        except (SpelledTokens, TemplateLimit) as error:
            what = "the chat template was stopped: " if isinstance(error, TemplateLimit) else ""
            raise BadRow("template_error", f"{what}{error}") from error
        except Exception as error:
            if lacking is not None:
                raise BadRow("template_error", f"message {lacking} (assistant) {NO_TOOL_CALLS} ({error})") from error
            raise BadRow("template_error", f"the chat template refused the messages: {error}") from error
        return text

    def _shows_tool_calls(self, messages: list[dict[str, Any]], text: str) -> bool:
        """Whether the text would be another without the tool calls."""
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        try:
            return self._tokenizer.render(without, parse_content=self._parse_content) != text
        except Exception:
            return True


def require_sense(spec: JobSpec) -> None:
    """Raises `InvalidSpec` for fields that contradict each other with any tokenizer."""
    if spec.chat_template is not False:
        return
    if spec.input.messages_column is not None:
        raise InvalidSpec(
            "messages need the chat template, and chat_template is false: remove it, or use a prompt column"
        )
    if spec.system_prompt is not None:
        raise InvalidSpec(f"chat_template is false, and {SYSTEM_PROMPT_NEEDS_ONE}")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages from a list of structs or maps, or from their JSON text; null fields are left out.

    Raises `BadRow`: empty_messages, bad_message, unknown_role or invalid_text, naming the message by its place.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("bad_message", f"the messages are not valid JSON: {error}") from error
    if not isinstance(value, list):
        raise BadRow("bad_message", f"messages must be a list of {{role, content}}, got {_kind(value)}")
    if not value:
        raise BadRow("empty_messages", "the list of messages is empty")
    return [_parse_message(message, place) for place, message in enumerate(value)]


def _parse_message(message: Any, place: int) -> dict[str, Any]:
    where = f"message {place}"
    if isinstance(message, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in message):
        message = dict(message)
    if not isinstance(message, Mapping):
        raise BadRow("bad_message", f"{where} must be a {{role, content}}, got {_shown(message)}")
    fields = {str(key): item for key, item in message.items() if item is not None}
    role = fields.get("role")
    if not isinstance(role, str):
        hint = f"; {IN_A_REQUEST} 'messages'" if "messages" in fields else ""
        raise BadRow("bad_message", f"{where} has no role; it must be one of {', '.join(ROLES)}{hint}")
    if role not in ROLES:
        raise BadRow("unknown_role", f"{where} has the unknown role {role!r}; known roles: {', '.join(ROLES)}")
    if "content" in fields:
        fields["content"] = _text_of(fields["content"], f"{where} ({role})")
    elif role != "assistant" or not fields.get("tool_calls"):
        raise BadRow("bad_message", f"{where} ({role}) has no text in content, got None")
    _check_texts(fields, where)
    return fields


def _text_of(content: Any, where: str) -> str:
    """A content that is text, or parts that all are: then these, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRow("bad_message", f"{where} has no text in content, got {_shown(content)}")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in (None, "text"):
            raise BadRow("bad_message", f"part {place} of the content of {where} is of type {kind!r}: {TEXT_ALONE}")
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise BadRow("bad_message", f"part {place} of the content of {where} has no text, got {_shown(part)}")
        texts.append(text)
    return "\n".join(texts)


def _kind(value: Any) -> str:
    """What a value is that is no list of messages; for a request in OpenAI's form, where its messages are."""
    if isinstance(value, Mapping):
        body = value.get("body")
        if "messages" in value:
            return f"an object: {IN_A_REQUEST} 'messages'"
        if isinstance(body, Mapping) and "messages" in body:
            return f"an object: {IN_A_REQUEST} 'messages' in 'body'"
    return type(value).__name__


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."


def _check_texts(value: Any, where: str) -> None:
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_texts(item, where)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(item, where)
