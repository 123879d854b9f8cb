"""What drafters learn from: prompts with the target's answers, as token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from workers.training.errors import UnusableData

PROMPT, ANSWER, CATEGORY = "prompt_token_ids", "output_token_ids", "category"
SCHEMA = pa.schema([(PROMPT, pa.list_(pa.int32())), (ANSWER, pa.list_(pa.int32())), (CATEGORY, pa.string())])
"""Columns of a file of answers; others are ignored."""
MIN_ANSWER = 2
"""Tokens: the first one of an answer is never drafted, so that one alone teaches nothing."""


@dataclass(frozen=True, slots=True)
class Document:
    """A prompt and its answer. Loss is taken on the answer, by position."""

    tokens: tuple[int, ...]
    num_prompt: int
    category: str | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.num_prompt]

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.num_prompt :]


@dataclass(frozen=True, slots=True)
class Documents:
    learned: tuple[Document, ...]
    held_out: tuple[Document, ...]
    unusable: dict[str, int]
    """Reason -> answers that were left out for it."""
    digest: str
    """Of all tokens and of the split: says whether two runs learn from the same."""


def read_documents(files: Iterable[Path], *, vocab_size: int, max_tokens: int, held_out: float) -> Documents:
    """Read files of answers (`SCHEMA`) and keep the share `held_out` of their prompts apart.

    An answer is cut where it reaches `max_tokens`, prompt included. Raises `UnusableData` when a file lacks a column,
    holds an id that is none of the vocabulary, or when nothing is left to learn from.
    """
    unusable: Counter[str] = Counter()
    kept: list[Document] = []
    for file in files:
        for document in _read(file):
            if max(document.tokens, default=0) >= vocab_size or min(document.tokens, default=0) < 0:
                raise UnusableData(f"{file}: holds token ids beyond the target's {vocab_size}: another tokenizer's?")
            reason = _unusable(document, max_tokens)
            if reason:
                unusable[reason] += 1
            else:
                kept.append(Document(document.tokens[:max_tokens], document.num_prompt, document.category))
    apart = [_held_out(document, held_out) for document in kept]
    learned = tuple(document for document, out in zip(kept, apart, strict=True) if not out)
    if not learned:
        found = ", ".join(f"{count} {reason}" for reason, count in unusable.items()) or "there are none"
        raise UnusableData(f"no answer is left to learn from: {found}")
    rest = tuple(document for document, out in zip(kept, apart, strict=True) if out)
    return Documents(learned, rest, dict(unusable), _digest(learned, rest))


def _read(file: Path) -> Iterable[Document]:
    try:
        parquet = pq.ParquetFile(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise UnusableData(f"{file}: cannot be read as Parquet: {error}") from error
    for column in (PROMPT, ANSWER):
        if column not in parquet.schema_arrow.names:
            raise UnusableData(f"{file}: has no column {column}: make the file with `nightdraft distill`")
    columns = [name for name in SCHEMA.names if name in parquet.schema_arrow.names]
    for batch in parquet.iter_batches(columns=columns):
        for row in batch.to_pylist():
            prompt, answer = row[PROMPT] or [], row[ANSWER] or []
            yield Document((*prompt, *answer), len(prompt), row.get(CATEGORY))


def _unusable(document: Document, max_tokens: int) -> str | None:
    if not document.num_prompt:
        return "without a prompt"
    if len(document.answer) < MIN_ANSWER:
        return f"shorter than {MIN_ANSWER} tokens"
    if document.num_prompt > max_tokens - MIN_ANSWER:
        return f"behind a prompt that alone reaches max_tokens ({max_tokens})"
    return None


def _held_out(document: Document, share: float) -> bool:
    """By a hash of the prompt, so that no prompt is on both sides, however often and in whatever order it comes."""
    digest = blake2b(_bytes(document.prompt), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _digest(*parts: Seq[Document]) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        for document in part:
            digest.update(document.num_prompt.to_bytes(8, "big") + _bytes(document.tokens))
    return digest.hexdigest()


def _bytes(tokens: Seq[int]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in tokens)
