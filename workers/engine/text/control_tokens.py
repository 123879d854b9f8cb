"""Control tokens that a message's own text spells: found in the rendered chat, and encoded as the text that they are.

`<|im_end|>` written by a chat template ends a turn; the same characters inside a user's message are data. Both stand in
one rendered text. Which is which is told by rendering the messages a second time with marks at the spelled tokens. The
text is then encoded in one go by a twin of the tokenizer, in which control tokens go by other names: the template's own
are written by these, and what is still spelled the old way is text, in its place, split as any text is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Span = tuple[int, int]
"""First character and the one behind the last."""
Messages = Sequence[Mapping[str, Any]]

# Marks are lone surrogates: no text that can be encoded has them.
_MARKS = "[\ud800-\udfff]"
_OPEN, _CLOSE = "\ud800", "\ud801"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Stands for a byte in vocabularies that have no letter for it, and is a command in none."""
_BEFORE, _BEHIND, _KINDS = 0xDC00, 0xDE00, 0x200


class SpelledTokens(ValueError):
    """A message spells control tokens, and they cannot be taken as text; the message says why, and what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the messages spell control tokens, and {why}: set special_tokens_in_content to parse, or remove them"
        )


class ChatText(str):
    """A rendered chat that says where its messages spell control tokens. Otherwise the text that it is."""

    spelled: tuple[Span, ...]

    def __new__(cls, text: str, spelled: Sequence[Span]) -> ChatText:
        self = super().__new__(cls, text)
        self.spelled = tuple(spelled)
        return self

    def __getnewargs__(self) -> tuple[str, tuple[Span, ...]]:  # type: ignore[override]
        return str(self), self.spelled


class ControlTokens:
    """The tokens of a vocabulary that are commands in a chat: name -> id."""

    def __init__(self, ids: Mapping[str, int], backend: Tokenizer | None) -> None:
        self._ids = ids = {name: token for name, token in ids.items() if not _BYTE.fullmatch(name)}
        self._backend = backend
        names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)"
        self._name = re.compile(names)
        self._name_or_mark = re.compile(f"{names}|{_MARKS}")
        self._kinds = {name: index % _KINDS for index, name in enumerate(ids)}

    def located(self, text: str, messages: Messages, render: Callable[[Messages], str]) -> str:
        """The rendered `text` of the messages, with the places of control tokens that they spell.

        Raises `SpelledTokens` when the template does something else with messages whose control tokens are marked.
        """
        if not self._spelled(messages):
            return text
        for mark, is_marked in ((_around, _is_inside), (self._on_one_side, self._is_beside)):
            marked = render([self._with_marks(message, mark) for message in messages])
            spans = self._aligned(text, marked, is_marked)
            if spans is not None:
                return ChatText(text, spans)
        raise SpelledTokens("the chat template goes by them")

    def encode(self, text: ChatText) -> list[int]:
        """Token ids without any around the text. Raises `SpelledTokens` when the tokenizer cannot do it."""
        spelled = set(text.spelled)
        tokens = [match for match in self._name.finditer(text) if match.span() not in spelled]
        written = [match[0] for match in tokens]
        parts: list[str] = []
        end = 0
        for match in tokens:
            parts += text[end : match.start()], self._aliases[match[0]]
            end = match.end()
        parts.append(text[end:])
        ids = [
            self._originals.get(token, token)
            for token in self._twin.encode("".join(parts), add_special_tokens=False).ids
        ]
        for name in {text[start:end] for start, end in spelled}:
            if name != self._unknown and ids.count(self._ids[name]) != written.count(name):
                raise SpelledTokens(f"the tokenizer has {name!r} as a piece of text as well")
        return ids

    def _spelled(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._name.search(value) is not None
        if isinstance(value, Mapping):
            return any(self._spelled(key) or self._spelled(item) for key, item in value.items())
        return isinstance(value, list | tuple) and any(map(self._spelled, value))

    def _with_marks(self, value: Any, mark: Callable[[re.Match[str]], str]) -> Any:
        if isinstance(value, str):
            return self._name.sub(mark, value)
        if isinstance(value, Mapping):
            return {self._with_marks(key, mark): self._with_marks(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._with_marks(item, mark) for item in value]
        return value

    def _aligned(self, text: str, marked: str, is_marked: Callable[[re.Match[str]], bool]) -> list[Span] | None:
        """Spans of `text` that are marked in `marked`; None unless both have the same tokens, and between them the same
        text but for white space: templates strip the ends of texts, and a mark may be in the way of that."""
        found = list(self._name.finditer(text))
        matches = list(self._name_or_mark.finditer(marked))
        names = [match for match in matches if match[0] in self._ids]
        if [match[0] for match in found] != [match[0] for match in names]:
            return None
        if _between(text, found, found) != _between(marked, matches, names):
            return None
        return [match.span() for match, name in zip(found, names, strict=True) if is_marked(name)]

    def _on_one_side(self, match: re.Match[str]) -> str:
        """A mark on that side of the token which is not the end of the text, for templates that look at how it begins
        or ends. There is one for each token, since a template may put its own where that token was cut off."""
        kind = self._kinds[match[0]]
        if match.string[: match.start()].strip():
            return chr(_BEFORE + kind) + match[0]
        return match[0] + chr(_BEHIND + kind)

    def _is_beside(self, match: re.Match[str]) -> bool:
        kind = self._kinds[match[0]]
        return _before(match) == chr(_BEFORE + kind) or _behind(match) == chr(_BEHIND + kind)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        # NUL is in no text that is encoded.
        return {name: f"\0{index}\0" for index, name in enumerate(self._ids)}

    @cached_property
    def _unknown(self) -> str | None:
        """The token of letters that the vocabulary lacks: there may be any number of it."""
        name: str | None = getattr(self._backend.model, "unk_token", None) if self._backend is not None else None
        return name

    @cached_property
    def _twin(self) -> Tokenizer:
        if self._backend is None:
            raise SpelledTokens("this tokenizer cannot take them as text")
        from tokenizers import Tokenizer

        state = json.loads(self._backend.to_str())
        state["post_processor"] = state["truncation"] = state["padding"] = None
        for token in state["added_tokens"]:
            token["content"] = self._aliases.get(token["content"], token["content"])
        _rename(state["model"], self._aliases)
        return Tokenizer.from_str(json.dumps(state))

    @cached_property
    def _originals(self) -> dict[int, int]:
        """Ids of the twin that are others here: a token whose name is in the vocabulary twice gets a new one there."""
        assert self._backend is not None
        originals = {}
        for token, added in self._backend.get_added_tokens_decoder().items():
            here = self._twin.token_to_id(self._aliases.get(added.content, added.content))
            if here is not None and here != token:
                originals[here] = token
        return originals


def _rename(model: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Take the names out of a vocabulary, so that no text can be split into them."""
    model["unk_token"] = aliases.get(model.get("unk_token", ""), model.get("unk_token"))
    vocab = model.get("vocab")
    if isinstance(vocab, list):
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    elif isinstance(vocab, dict):
        merged = {
            "".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1)
            for merge in model.get("merges") or ()
        }
        model["vocab"] = {
            piece if piece in merged else aliases.get(piece, piece): token for piece, token in vocab.items()
        }


def _around(match: re.Match[str]) -> str:
    return f"{_OPEN}{match[0]}{_CLOSE}"


def _is_inside(match: re.Match[str]) -> bool:
    return _before(match) == _OPEN and _behind(match) == _CLOSE


def _before(match: re.Match[str]) -> str:
    return match.string[match.start() - 1 : match.start()]


def _behind(match: re.Match[str]) -> str:
    return match.string[match.end() : match.end() + 1]


def _between(text: str, cuts: Sequence[re.Match[str]], ends: Sequence[re.Match[str]]) -> list[str]:
    """The text without its `cuts`, in pieces that `ends`, some of the cuts, end; without white space around them."""
    pieces = [""]
    place = 0
    limits = {match.start() for match in ends}
    for cut in cuts:
        pieces[-1] += text[place : cut.start()]
        place = cut.end()
        if cut.start() in limits:
            pieces.append("")
    pieces[-1] += text[place:]
    return [piece.strip() for piece in pieces]
