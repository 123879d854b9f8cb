"""Models that recite a text, each in the tokens of its own vocabulary: drafts of another vocabulary can be right."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workers.engine.models.executor import LoadedModel
from workers.engine.models.executors.scripted import Script, ScriptedExecutor
from workers.engine.models.facts import ModelReport
from workers.engine.text.tokenizer import HuggingFaceTokenizer

TEXT = (
    "The night shift drafts what the morning will check. A small model writes ahead, word by word, and the large one "
    "reads along: what it would have written itself it keeps, and at the first word that differs it takes over. "
    "Nobody sees the difference, for there is none; only the lamps go out earlier. Überall dasselbe Maß, naïve or not. "
)
OTHER = "Zebras quiz vexed jocks; 0123456789 pages of proofs lie unread. Morning will check the small model. "


def byte_level(text: str, size: int) -> HuggingFaceTokenizer:
    """GPT-2's kind: spaces are "Ġ"."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    return HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"),
        frozenset((0,)),
    )


def sentencepiece(text: str, size: int) -> HuggingFaceTokenizer:
    """Llama's kind: spaces are "▁", one of them in front of every text, and unknown letters are bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([text] * 3, trainers.BpeTrainer(vocab_size=size - 258, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    return HuggingFaceTokenizer(fast, frozenset((1,)))


class Recital(ScriptedExecutor):
    """Finds its last few tokens in the text and goes on with what follows there, in the longest tokens that fit."""

    def __init__(self, pieces: list[bytes | str | None], text: str, *, padding: int, seed: int) -> None:
        super().__init__(Script(vocab=len(pieces) + padding, order=6, sharpness=1.0, eos_every=0, seed=seed))
        self._text = text.encode() * 2
        self._bytes = [piece if isinstance(piece, bytes) else b"" for piece in pieces]

    def _step(self, memory: NDArray[np.float64], parent: int | None, slot: int, token: int) -> int:
        state = super()._step(memory, parent, slot, token)
        recent = b"".join(self._bytes[int(t)] for t in memory[slot] if 0 <= t < len(self._bytes))[-8:]
        found = self._text.find(recent) if recent else -1
        # The lowest bits say where in the text the sequence is; the rest is as before.
        place = 0 if found < 0 else found + len(recent)
        return (state & ~0xFFF) | place

    def _logits(self, states: NDArray[np.uint64]) -> NDArray[np.float32]:
        logits = super()._logits(states)
        for row, state in zip(logits, states.tolist(), strict=True):
            rest = self._text[state & 0xFFF :]
            for token, piece in enumerate(self._bytes):
                if piece and rest.startswith(piece):
                    row[token] += 4.0 + 3.0 * len(piece)
        return logits


def reciting(
    tokenizer: HuggingFaceTokenizer, text: str = TEXT, *, padding: int = 0, seed: int = 0, name: str = "recital"
) -> LoadedModel:
    executor = Recital(tokenizer.pieces(), text, padding=padding, seed=seed)
    return LoadedModel(executor, tokenizer, name, name, ModelReport(vocabulary=name))
