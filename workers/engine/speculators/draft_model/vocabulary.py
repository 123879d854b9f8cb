"""Two vocabularies compared by what their tokens stand for: which are common, and how to say the others.

Tokens are compared as bytes, so it does not matter whether a tokenizer writes a space as "Ġ", as "▁" or as itself.
Special tokens are compared by name. Rows of the logits that no token belongs to are never common.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from workers.engine.api.tokenizer import Piece
from workers.engine.models.executor import Model

MAPPED_FROM = 0.5
"""Overlap from which on `auto` drafts from the common tokens."""
SMALLEST_OVERLAP = 0.02
"""Below this the common tokens could hardly say anything."""


@dataclass(slots=True)
class Spelling:
    """Says bytes with the tokens of one vocabulary: the longest token first, from left to right."""

    pieces: Seq[Piece]
    by_bytes: dict[bytes, int] = field(init=False)
    longest: int = field(init=False)
    size: int = field(init=False)
    """Ids that stand for something."""

    def __post_init__(self) -> None:
        self.by_bytes = {}
        for token, piece in enumerate(self.pieces):
            if isinstance(piece, bytes):
                self.by_bytes.setdefault(piece, token)
        self.size = sum(piece is not None for piece in self.pieces)
        self.longest = max(map(len, self.by_bytes), default=0)

    def spell(self, text: bytes) -> list[int]:
        """Bytes that no token has are left out."""
        tokens, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self.longest), start, -1):
                token = self.by_bytes.get(text[start:end])
                if token is not None:
                    tokens.append(token)
                    start = end
                    break
            else:
                start += 1
        return tokens

    def say(self, tokens: Iterable[int]) -> bytes:
        """The text of ordinary tokens; special ones have none."""
        pieces = (self.pieces[token] if token < len(self.pieces) else None for token in tokens)
        return b"".join(piece for piece in pieces if isinstance(piece, bytes))


class VocabularyMap:
    """From the target's tokens to the draft's, and from the draft's logits to the target's."""

    def __init__(self, target: Model, draft: Model) -> None:
        self.target = Spelling(target.tokenizer.pieces())
        self.draft = Spelling(draft.tokenizer.pieces())
        self._width = target.facts.vocab_size
        specials = {piece: token for token, piece in enumerate(self.draft.pieces) if isinstance(piece, str)}
        draft_eos, target_eos = draft.tokenizer.eos_token_ids, target.tokenizer.eos_token_ids
        self._filler = min(draft_eos, default=0)
        self._ids: dict[int, tuple[int, ...]] = dict.fromkeys(target_eos, (self._filler,))
        common: dict[int, int] = {}
        for token, piece in enumerate(self.target.pieces[: self._width]):
            known = self.draft.by_bytes if isinstance(piece, bytes) else specials
            twin = known.get(piece) if piece is not None else None  # type: ignore[arg-type]
            if twin is not None and twin < draft.facts.vocab_size:
                common.setdefault(twin, token)
                self._ids[token] = (twin,)
        self._twins, self._common = torch.tensor(list(common)), torch.tensor(list(common.values()))

    @property
    def num_common(self) -> int:
        return len(self._common)

    @property
    def overlap(self) -> float:
        """Common tokens by tokens of the smaller vocabulary."""
        return self.num_common / max(1, min(self.target.size, self.draft.size))

    @property
    def coverage(self) -> float:
        """Share of the target's tokens that the draft has."""
        return self.num_common / max(1, self.target.size)

    def describe(self) -> str:
        shared = f"{self.num_common} tokens in common ({self.overlap:.0%} of the smaller)"
        return f"{shared}, {self.target.size} in the target's, {self.draft.size} in the draft's"

    def to_draft(self, token: int) -> tuple[int, ...]:
        """The draft's token or tokens, at least one, for one of the target's."""
        ids = self._ids.get(token)
        if ids is None:
            piece = self.target.pieces[token] if token < len(self.target.pieces) else None
            text = piece if isinstance(piece, bytes) else (piece or "").encode()
            ids = self._ids[token] = tuple(self.draft.spell(text)) or (self._filler,)
        return ids

    def to_target(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, Vd] -> [R, Vt] with -inf for tokens that the draft does not have: its softmax is the draft's
        distribution, renormalised over the common tokens (Timor et al., arXiv 2502.05202)."""
        mapped = logits.new_full((len(logits), self._width), -torch.inf)
        mapped[:, self._common.to(logits.device)] = logits[:, self._twins.to(logits.device)]
        return mapped
