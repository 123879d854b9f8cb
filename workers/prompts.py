"""From a row's prompt or messages to the text that is tokenised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workers.engine.tokenizer import TextTokenizer
from workers.errors import BadRow
from workers.settings import JobSettings
from workers.texts import check_text

ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptRenderer:
    """Renders what the text column of a job holds, prompts or messages; with the chat template for all rows or none."""

    def __init__(self, settings: JobSettings, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = settings.system_prompt
        self._from_messages = settings.input.messages_column is not None
        wanted = settings.chat_template
        self.uses_template = self._from_messages or (tokenizer.has_chat_template if wanted is None else wanted)
        """Whether the texts come from the chat template, which writes the special tokens itself."""
        self._impossible = self._contradiction(settings)

    def render(self, value: Any) -> str:
        """The text of one row. Raises `BadRow` with the code of what is wrong with it."""
        if value is None:
            raise BadRow("null_prompt", "the messages are null" if self._from_messages else "the prompt is null")
        if self._impossible:
            raise BadRow("template_error", self._impossible)
        if self._from_messages:
            return self._apply_template(self._with_system_prompt(parse_messages(value)))
        if not isinstance(value, str):
            raise BadRow("invalid_text", f"the prompt must be a string, got {type(value).__name__}")
        check_text(value, "the prompt")
        if not self.uses_template:
            return value
        return self._apply_template(self._with_system_prompt([{"role": "user", "content": value}]))

    def _contradiction(self, settings: JobSettings) -> str | None:
        """Why no row at all can be rendered, or None."""
        if self._from_messages and settings.chat_template is False:
            return "messages need the chat template, and chat_template is false: remove it, or use a prompt column"
        if self.uses_template and not self._tokenizer.has_chat_template:
            return "the target's tokenizer has no chat template: use a prompt column with chat_template false"
        if settings.system_prompt is not None and not self.uses_template:
            return "system_prompt needs a chat template: remove it and write it into the prompts"
        return None

    def _with_system_prompt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A row's own system message counts more than the job's."""
        if self._system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._tokenizer.render(messages)
        except Exception as error:
            raise BadRow("template_error", f"the chat template refused the messages: {error}") from error


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
        raise BadRow("bad_message", f"messages must be a list of {{role, content}}, got {type(value).__name__}")
    if not value:
        raise BadRow("empty_messages", "the list of messages is empty")
    return [_parse_message(message, place) for place, message in enumerate(value)]


def _parse_message(message: Any, place: int) -> dict[str, Any]:
    where = f"message {place}"
    if isinstance(message, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in message):
        message = dict(message)
    if not isinstance(message, Mapping):
        raise BadRow("bad_message", f"{where} must be a {{role, content}}, got {message!r}")
    fields = {str(key): item for key, item in message.items() if item is not None}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str):
        raise BadRow("bad_message", f"{where} has no role; it must be one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise BadRow("unknown_role", f"{where} has the unknown role {role!r}; known roles: {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise BadRow("bad_message", f"{where} ({role}) has no text in content, got {content!r}")
    _check_texts(fields, where)
    return fields


def _check_texts(value: Any, where: str) -> None:
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping):
        for item in value.values():
            _check_texts(item, where)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_texts(item, where)
