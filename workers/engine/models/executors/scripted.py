"""A model without weights: the next token is a hash of everything before it.

It keeps its running hash in the KV cache, one number per slot, and each row reads only its parent's slot. So a wrong
slot, a stale draft or a bad block table changes its tokens, as it would a real model's. The byte vocabulary makes
whole pipelines run in milliseconds.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from workers.engine.api.errors import InvalidConfig
from workers.engine.attention.interface import write_hidden
from workers.engine.models.executor import LoadedModel, ModelOutput
from workers.engine.models.facts import ModelFacts, ModelReport
from workers.engine.models.skipping import NOTHING, SkipSet
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.text.tokenizer import ByteTokenizer

PREFIX = "scripted:"
HIDDEN = 8
"""Width of its hidden states: six bits of the state each, other ones for every layer."""


@dataclass(frozen=True, slots=True)
class Script:
    """Options after "scripted:", as key=value pairs separated by commas."""

    vocab: int = 257
    seed: int = 0
    order: int = 0
    """0: the next token depends on the whole prefix; k: on the last k tokens only, which makes text repeat."""
    eos_every: int = 64
    """EOS comes about once in so many tokens; 0: never."""
    layers: int = 1
    """Layers that a skip set may name. Each skipped sublayer disturbs the logits a little."""
    sharpness: float = 4.0
    """Standard deviation of the logits: how peaked the next-token distribution is."""
    delay_ms: float = 0.0
    """Time that a pass takes, to make runs long enough to be interrupted."""
    crash_on: str = ""
    """Kill the process when this text is fed: a poison row."""
    fail_on: str = ""
    """Raise from the pass when this text is fed: an engine failure."""
    max_len: int = 4096

    @classmethod
    def parse(cls, target: str) -> Script:
        """Read "scripted:key=value,..."; raises `InvalidConfig` for an unknown key or a bad value."""
        defaults = cls()
        kinds = {f.name: type(getattr(defaults, f.name)) for f in fields(cls)}
        values: dict[str, int | float | str] = {}
        for pair in filter(None, target.removeprefix(PREFIX).split(",")):
            name, _, text = pair.partition("=")
            if name not in kinds:
                raise InvalidConfig(f"scripted model: unknown option {name!r}; known: {', '.join(kinds)}")
            try:
                values[name] = kinds[name](text)
            except ValueError as error:
                raise InvalidConfig(f"scripted model: {name}={text!r} is not a {kinds[name].__name__}") from error
        return cls(**values)  # type: ignore[arg-type]


class ScriptedExecutor:
    """`Executor` over a `Script`."""

    weight_bytes = 0

    def __init__(self, script: Script) -> None:
        if script.vocab < 257:
            raise InvalidConfig(f"scripted model: vocab must be at least 257, got {script.vocab}")
        self.script = script
        # float64 holds the 52-bit hashes exactly.
        shape = CacheShape.uniform(
            max(1, script.layers), 1, max(1, script.order), torch.float64, torch.device("cpu"), HIDDEN
        )
        self.facts = ModelFacts(shape, script.vocab, script.max_len, type(self).__name__, skips=True)
        rng = np.random.default_rng(script.seed)
        self._columns = rng.integers(1, 2**63, size=script.vocab, dtype=np.uint64) | np.uint64(1)

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        return self.forward_skipping(batch, cache, NOTHING)

    def forward_skipping(self, batch: Batch, cache: KVCache, skip: SkipSet) -> ModelOutput:
        if self.script.delay_ms:
            time.sleep(self.script.delay_ms / 1000)
        self._obey_markers(batch)
        states = self._advance(batch, cache, approximate=len(skip) > 0)
        for layer in cache.hidden:
            write_hidden(torch.from_numpy(_hidden(states, layer)), layer, batch, cache)
        states = states[batch.logits_rows.numpy()]
        return ModelOutput(torch.from_numpy(self._logits(states) + self._disturbance(states, skip)))

    def _disturbance(self, states: NDArray[np.uint64], skip: SkipSet) -> NDArray[np.float32]:
        """[R, V]: noise of each skipped sublayer's own, a tenth as large as the logits, which depends on the state."""
        noise = np.zeros((len(states), self.facts.vocab_size), np.float32)
        salts = [*(2 * layer + 1 for layer in skip.attention), *(2 * layer + 2 for layer in skip.mlp)]
        for salt in sorted(salts):
            with np.errstate(over="ignore"):
                salted = states * np.uint64(2 * salt + 1)
            noise += 0.1 * np.clip(self._logits(salted), -5 * self.script.sharpness, 5 * self.script.sharpness)
        return noise

    def _advance(self, batch: Batch, cache: KVCache, *, approximate: bool) -> NDArray[np.uint64]:
        """Write each row's state into its slot, reading its parent's; returns [T] uint64 hashes.

        What an approximate pass writes is marked; a real model's would be wrong, and an exact pass must not read it.
        """
        memory, marks = cache.keys[0].numpy()[:, 0, :], cache.values[0].numpy()[:, 0, 0]
        states = np.zeros(batch.input_ids.shape[0], dtype=np.uint64)
        slots, tokens = batch.slots.tolist(), batch.input_ids.tolist()
        for row, (parent, token) in enumerate(zip(_parent_slots(batch), tokens, strict=True)):
            if parent is not None and marks[parent] and not approximate:
                raise RuntimeError(f"slot {parent} was written by a pass that skips sublayers, and is read as exact")
            marks[slots[row]] = approximate
            states[row] = self._step(memory, parent, slots[row], token)
        return states

    def _step(self, memory: NDArray[np.float64], parent: int | None, slot: int, token: int) -> int:
        if self.script.order:
            if parent is None:
                memory[slot] = -1.0
            else:
                memory[slot] = np.roll(memory[parent], -1)
            memory[slot, -1] = token
            state = 0
            for value in memory[slot].tolist():
                state = _mix(state, int(value), self.script.seed)
        else:
            before = 0 if parent is None else int(memory[parent, 0])
            state = _mix(before, token, self.script.seed)
            memory[slot, 0] = state
        return state

    def _logits(self, states: NDArray[np.uint64]) -> NDArray[np.float32]:
        """[R] hashes -> [R, V] float32: roughly normal numbers, EOS raised to win once in `eos_every`."""
        with np.errstate(over="ignore"):
            mixed = (states[:, None] ^ self._columns[None, :]) * self._columns[None, :]
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
        halves = (mixed & np.uint64(0xFFFFFFFF)).astype(np.float64) + (mixed >> np.uint64(32)).astype(np.float64)
        logits: NDArray[np.float32] = ((halves / 2**32 - 1.0) * (6**0.5 * self.script.sharpness)).astype(np.float32)
        logits[:, ByteTokenizer.EOS] = -30.0
        if self.script.eos_every:
            ends = (states >> np.uint64(7)) % np.uint64(self.script.eos_every) == 0
            logits[ends, ByteTokenizer.EOS] = 30.0
        return logits

    def _obey_markers(self, batch: Batch) -> None:
        if not (self.script.crash_on or self.script.fail_on):
            return
        fed = bytes(t for t in batch.input_ids.tolist() if t < 256).decode(errors="replace")
        if self.script.crash_on and self.script.crash_on in fed:
            os._exit(139)
        if self.script.fail_on and self.script.fail_on in fed:
            raise RuntimeError(f"scripted failure: the batch holds {self.script.fail_on!r}")


def _hidden(states: NDArray[np.uint64], layer: int) -> NDArray[np.float64]:
    """[T] hashes -> [T, HIDDEN] in [-1, 1): a feature from a wrong slot is a wrong feature."""
    with np.errstate(over="ignore"):
        mixed = states * np.uint64(2 * layer + 0x9E3779B97F4A7C15)
    bits = (mixed[:, None] >> (np.uint64(6) * np.arange(HIDDEN, dtype=np.uint64))) & np.uint64(63)
    return bits.astype(np.float64) / 32 - 1


def _mix(state: int, token: int, seed: int) -> int:
    value = (state * 0x9E3779B97F4A7C15 + (token + 1) * 0xC2B2AE3D27D4EB4F + seed * 0x165667B19E3779F9) & (2**64 - 1)
    value = ((value ^ (value >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return (value ^ (value >> 29)) >> 12


def _parent_slots(batch: Batch) -> list[int | None]:
    """Slot of the key that comes just before each row's own."""
    rows = batch.rows
    tables, size = rows.block_tables, rows.block_size
    parents: list[int | None] = []
    for row in range(batch.input_ids.shape[0]):
        begin, end = int(rows.tail_indptr[row]), int(rows.tail_indptr[row + 1])
        if end - begin >= 2:
            parents.append(int(rows.tail_slots[end - 2]))
            continue
        before = int(rows.prefix_lens[row]) - (1 if end > begin else 2)
        if before < 0:
            parents.append(None)
        else:
            parents.append(int(tables[rows.sequence[row], before // size]) * size + before % size)
    return parents


def load_scripted(target: str) -> LoadedModel:
    script = Script.parse(target)
    return LoadedModel(
        executor=ScriptedExecutor(script),
        tokenizer=ByteTokenizer(script.vocab),
        name=target,
        content_hash=blake2b(repr(script).encode(), digest_size=16).hexdigest(),
        report=ModelReport("scripted", ScriptedExecutor.__name__, vocabulary=f"bytes-{script.vocab}"),
    )
