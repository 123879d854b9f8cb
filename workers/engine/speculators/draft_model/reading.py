"""How a draft model reads a sequence and what is made of its drafts: as they are, mapped, or through their text.

A draft model with another vocabulary sees a sequence of its own, each token of the target said in the draft's tokens.
It grows with the target's and is never rewritten, so the draft's KV cache stays good. What a draft is worth depends
on all this; what is emitted never does.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import Model
from workers.engine.speculators.draft_model.vocabulary import MAPPED_FROM, SMALLEST_OVERLAP, VocabularyMap
from workers.engine.speculators.shared.drawing import DraftNoise, draft_noise_of
from workers.engine.speculators.shared.growth import TreeGrowth, extend_all
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import Verdict


class Reading(Protocol):
    """Between the target's tokens and the draft's."""

    @property
    def shape(self) -> TreeShape: ...
    @property
    def kind(self) -> str:
        """same, mapped or text."""
        ...

    @property
    def vocabulary(self) -> VocabularyMap | None:
        """None when there is only one."""
        ...

    def of(self, seq: Sequence) -> Sequence:
        """The sequence in the draft's tokens, up to date."""
        ...

    def grow(self, seq: Sequence, depth: int) -> TreeGrowth: ...
    def extend(self, growing: Seq[TreeGrowth], logits: torch.Tensor) -> None:
        """Add a level from the draft's logits."""
        ...

    def fed(self, growth: TreeGrowth) -> DraftTree:
        """The nodes that the draft has to feed, in its own tokens."""
        ...

    def proposal(self, seq: Sequence, growth: TreeGrowth, depth: int) -> DraftTree:
        """What becomes of a finished draft, in the target's tokens."""
        ...

    def stands(self, verdict: Verdict, growth: TreeGrowth) -> list[int]:
        """The path of fed nodes which the sequence has taken."""
        ...

    def release(self, seq: Sequence) -> Sequence | None:
        """Forget the sequence; returns it in the draft's tokens, if it ever was."""
        ...


@dataclass(frozen=True, slots=True)
class SameReading:
    """One vocabulary."""

    shape: TreeShape
    vocab_size: int
    noise: DraftNoise = DraftNoise.COUPLED

    @property
    def kind(self) -> str:
        return "same"

    @property
    def vocabulary(self) -> None:
        return None

    def of(self, seq: Sequence) -> Sequence:
        return seq

    def grow(self, seq: Sequence, depth: int) -> TreeGrowth:
        return TreeGrowth(seq, depth, self.shape, self.vocab_size, self.noise)

    def extend(self, growing: Seq[TreeGrowth], logits: torch.Tensor) -> None:
        extend_all(growing, logits)

    def fed(self, growth: TreeGrowth) -> DraftTree:
        return growth.expanded_tree()

    def proposal(self, seq: Sequence, growth: TreeGrowth, depth: int) -> DraftTree:
        return growth.tree()

    def stands(self, verdict: Verdict, growth: TreeGrowth) -> list[int]:
        return growth.expanded_path(verdict.path)

    def release(self, seq: Sequence) -> Sequence | None:
        return seq


class _Translated:
    """Keeps each sequence in the draft's tokens."""

    kind: str

    def __init__(self, vocabulary: VocabularyMap, draft: Model, shape: TreeShape) -> None:
        self.shape = shape
        self.vocabulary = vocabulary
        self._draft = draft
        self._reads: dict[Sequence, tuple[Sequence, int]] = {}
        """With how many of the target's tokens are in it."""

    def of(self, seq: Sequence) -> Sequence:
        read, done = self._reads.get(seq) or (self._begin(seq), 0)
        read.tokens.extend(token for said in map(self.vocabulary.to_draft, seq.tokens[done:]) for token in said)
        self._reads[seq] = read, len(seq)
        return read

    def _begin(self, seq: Sequence) -> Sequence:
        """Greedy, for drafts that are made apart from the target's tokens."""
        request = Request(seq.request.id, (), SamplingParams(temperature=0.0))
        return Sequence(request, seq.index, self._draft.tokenizer.eos_token_ids, self._draft.facts.max_model_len)

    def release(self, seq: Sequence) -> Sequence | None:
        read, _ = self._reads.pop(seq, (None, 0))
        return read


class MappedReading(_Translated):
    """Drafts from the tokens that both vocabularies have, with the target's own noise."""

    kind = "mapped"

    def __init__(
        self, vocabulary: VocabularyMap, draft: Model, shape: TreeShape, vocab_size: int, noise: DraftNoise
    ) -> None:
        super().__init__(vocabulary, draft, shape)
        self._vocab_size = vocab_size
        self._noise = noise

    def grow(self, seq: Sequence, depth: int) -> TreeGrowth:
        return TreeGrowth(seq, depth, self.shape, self._vocab_size, self._noise)

    def extend(self, growing: Seq[TreeGrowth], logits: torch.Tensor) -> None:
        extend_all(growing, self.vocabulary.to_target(logits))

    def fed(self, growth: TreeGrowth) -> DraftTree:
        """Common tokens are one token on either side, so the tree keeps its shape."""
        tree = growth.expanded_tree()
        return DraftTree(tuple(self.vocabulary.to_draft(token)[0] for token in tree.tokens), tree.parents)

    def proposal(self, seq: Sequence, growth: TreeGrowth, depth: int) -> DraftTree:
        return growth.tree()

    def stands(self, verdict: Verdict, growth: TreeGrowth) -> list[int]:
        return growth.expanded_path(verdict.path)


class TextReading(_Translated):
    """Drafts text, one greedy chain, and lets the target's tokenizer cut it into tokens (SLEM, arXiv 2502.05202)."""

    kind = "text"
    CONTEXT = 4
    """Tokens before the draft that are tokenised with it, so that it is cut as it would be in its place."""

    def __init__(self, vocabulary: VocabularyMap, draft: Model, tokenizer: TextTokenizer) -> None:
        super().__init__(vocabulary, draft, TreeShape())
        self._tokenizer = tokenizer
        self._draft_vocab = min(draft.facts.vocab_size, len(vocabulary.draft.pieces))

    def grow(self, seq: Sequence, depth: int) -> TreeGrowth:
        return TreeGrowth(self.of(seq), depth, self.shape, self._draft_vocab)

    def extend(self, growing: Seq[TreeGrowth], logits: torch.Tensor) -> None:
        extend_all(growing, logits[:, : self._draft_vocab])

    def fed(self, growth: TreeGrowth) -> DraftTree:
        return growth.expanded_tree()

    def proposal(self, seq: Sequence, growth: TreeGrowth, depth: int) -> DraftTree:
        tokens = []
        for token in self._cut(seq, self.vocabulary.draft.say(growth.tree().tokens))[:depth]:
            if seq.ends_with(token):
                break
            tokens.append(token)
        return DraftTree.chain(tokens)

    def _cut(self, seq: Sequence, text: bytes) -> list[int]:
        target = self.vocabulary.target
        before = target.say(seq.tokens[-self.CONTEXT :]).lstrip(bytes(range(0x80, 0xC0)))
        tokens = self._encode(before + text)
        # A tokenizer may begin every text with a space of its own.
        end = len(target.say(tokens)) - len(text)
        for index in range(len(tokens) + 1):
            if len(target.say(tokens[:index])) >= end:
                exact = len(target.say(tokens[:index])) == end
                return tokens[index:] if exact else self._encode(text)
        return []

    def _encode(self, text: bytes) -> list[int]:
        return self._tokenizer.encode_batch([text.decode(errors="ignore")], special_tokens=False)[0]

    def stands(self, verdict: Verdict, growth: TreeGrowth) -> list[int]:
        """As much of the fed chain as the target's tokens say again."""
        fed = growth.expanded_tree().tokens
        emitted = verdict.seq.tokens[-verdict.emitted :]
        said = [token for tokens in map(self.vocabulary.to_draft, emitted) for token in tokens]
        agreed = [one == other for one, other in zip(fed, said, strict=False)]
        return list(range(agreed.index(False) if False in agreed else len(agreed)))


def choose_reading(config: EngineConfig, target: Model, draft: Model) -> Reading:
    """What `config.speculation.vocabulary` asks for. Raises `InvalidConfig`, with the overlap, when the pair cannot."""
    speculation, wanted = config.speculation, config.speculation.vocabulary
    shape, noise, width = speculation.tree_shape, draft_noise_of(speculation), target.facts.vocab_size
    identical = draft.vocabulary == target.vocabulary
    if identical and draft.facts.vocab_size == width and wanted in ("auto", "same"):
        return SameReading(shape, width, noise)
    vocabulary = VocabularyMap(target, draft)
    pair = f"draft {draft.name} and target {target.name} have different vocabularies: {vocabulary.describe()}"
    if wanted == "same" and not identical:
        raise InvalidConfig(f"{pair}; set vocabulary to mapped or text")
    if wanted == "auto":
        wanted = "mapped" if vocabulary.overlap >= MAPPED_FROM else "text"
    if wanted == "text":
        if not vocabulary.draft.by_bytes or not vocabulary.target.by_bytes:
            raise InvalidConfig(f"{pair}, and one of them has no tokens that stand for text")
        if shape != TreeShape():
            raise InvalidConfig(f"{pair}; drafts through text are chains: drop the tree, or set vocabulary to mapped")
        return TextReading(vocabulary, draft, target.tokenizer)
    if vocabulary.overlap < SMALLEST_OVERLAP:
        raise InvalidConfig(f"{pair}, too few to draft from: set vocabulary to text")
    return MappedReading(vocabulary, draft, shape, width, noise)
