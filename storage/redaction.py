"""Secrets of URLs, kept out of everything that is shown or logged: messages, tracebacks, what drivers say."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote, unquote_plus

HIDDEN = "***"

# A password may hold a semicolon; the one before another URL ends an entry of a list, `redis://a;redis://b`.
_LETTER = r"(?!;[A-Za-z][\w+.-]*://)\S"
_USERINFO = re.compile(rf"(?<=://)(?P<user>[^:/?#@\s;]*):(?P<secret>(?:{_LETTER})*)@")
_PARAMETER = re.compile(rf"(?<=[?&])(?P<name>[^=&?#\s;/]+)=(?P<secret>(?:(?!&){_LETTER})*)")
_CONNINFO = re.compile(r"\b(?P<name>\w*password|passwd|pwd)\s*=\s*(?P<secret>'(?:[^'\\]|\\.)*'|[^\s&'\"]+)", re.I)
_SECRET_NAME = re.compile(
    r"pass|pwd|secret|token|credential|signature|authorization|^sig$"
    r"|(api|access|account|private|shared|storage)[_-]?key",
    re.I,
)
_PATH_NAME = re.compile(r"file$|path$", re.I)
_MARKS = "'\"),.:;"
"""What may stand behind a URL in a sentence."""
_SHORTEST = 4
"""Characters of a secret that is looked for by itself: a shorter one is found in any text."""


def redacted(text: str, *urls: str) -> str:
    """The text with the secrets of all URLs in it hidden, in userinfo, query parameters and libpq's `password=...`.

    `urls` are those that the text is about: their secrets are hidden wherever they stand, since drivers quote parts of
    what they were given.
    """
    for secret in sorted({secret for url in urls for secret in _secrets(url)}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    if "=" not in text and "@" not in text:
        return text
    text = _USERINFO.sub(lambda match: f"{match['user']}:{HIDDEN}@", text)
    text = _PARAMETER.sub(_without_secret, text)
    return _CONNINFO.sub(_without_secret, text)


def _without_secret(match: re.Match[str]) -> str:
    name, secret = match["name"], match["secret"]
    if not is_secret(name):
        return match[0]
    kept = secret[len(secret.rstrip(_MARKS)) :] if not secret.startswith("'") else ""
    return match[0][: match.start("secret") - match.start()] + HIDDEN + kept


def is_secret(name: str) -> bool:
    """Whether a parameter of that name, percent-encoded or not, holds a secret and not the place of one."""
    name = unquote_plus(name)
    return _SECRET_NAME.search(name) is not None and _PATH_NAME.search(name) is None


def _secrets(url: str) -> Iterator[str]:
    """What is secret in a URL, as it is written there and as it is meant."""
    found: list[str] = [match["secret"] for match in _USERINFO.finditer(url)]
    found += [match["secret"] for match in _PARAMETER.finditer(url) if is_secret(match["name"])]
    for secret in found:
        for form in (secret, unquote(secret), unquote_plus(secret)):
            # A password with an "@" that is not encoded is torn in two by most drivers.
            yield from (part for part in (form, *form.split("@")) if len(part) >= _SHORTEST)


class RedactingFormatter(logging.Formatter):
    """Another formatter's text, tracebacks included, without secrets."""

    def __init__(self, inner: logging.Formatter | None) -> None:
        super().__init__()
        self._inner = inner or logging.Formatter()

    def format(self, record: logging.LogRecord) -> str:
        return redacted(self._inner.format(record))


def redact_logs(handlers: Iterable[logging.Handler]) -> None:
    """Keep secrets out of what these handlers write."""
    for handler in handlers:
        if not isinstance(handler.formatter, RedactingFormatter):
            handler.setFormatter(RedactingFormatter(handler.formatter))
