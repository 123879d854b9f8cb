"""The synchronous engine: `EngineCore.step` is the algorithm, one phase per line."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import EngineError
from workers.engine.api.request import Completion, FinishReason, Request
from workers.engine.api.stats import EngineSnapshot, StepProfile
from workers.engine.batcher import Batcher, check_request
from workers.engine.completions import completion_of, failure
from workers.engine.controller import Controller, StepCost, make_controller
from workers.engine.kernels.cpu.runtime import working_clock
from workers.engine.models.executor import LoadedModel
from workers.engine.models.kv_memory import DraftMemory, KVPlan, log_plan, plan_kv
from workers.engine.models.loading.load import context_length, load_model
from workers.engine.speculators.mixed import MixedSpeculator
from workers.engine.speculators.speculator import Speculator, SpeculatorContext, make_speculators
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY
from workers.engine.text.detokenizer import StopScanner
from workers.engine.verifier import Verdict, Verifier, make_verifier

if TYPE_CHECKING:
    from collections.abc import Iterator


class EngineCore:
    """Continuous-batched speculative decoding over one target model. Not thread-safe: one thread calls it.

    `model` and `speculator` are for tests and for callers who load them themselves.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model: LoadedModel | None = None,
        make: Callable[[SpeculatorContext], Mapping[str, Speculator]] = make_speculators,
    ) -> None:
        self.model = model or load_model(config)
        facts = self.model.facts
        self.max_model_len = context_length(config, facts)
        self.cache = KVCache(facts.cache_shape, 0, config.block_size, prefix_reuse=config.prefix_reuse)
        self.speculator = MixedSpeculator(make(SpeculatorContext(config, self.model, self.cache)))
        self.config = config = replace(config, speculation=config.speculation.settled(self.speculator.depth))
        self._kv = self._allocate()
        self.controller: Controller = make_controller(config.speculation, self.speculator.max_nodes)
        self.verifier: Verifier = make_verifier(config.speculation)
        self.batcher = Batcher(
            self.cache,
            max_batch=config.max_batch,
            max_step_tokens=config.max_step_tokens,
            on_preempt=self.speculator.release,
        )
        self.profile = StepProfile()
        self._sequences: dict[Hashable, Sequence] = {}
        self._num_submitted = 0
        self._totals = EngineSnapshot()

    def _allocate(self) -> KVPlan:
        """Size every pool, now that it is known what the speculators keep for a token."""
        caches = self.speculator.caches
        keeps = [DraftMemory(self.speculator.hidden_layers), *(DraftMemory(cache=cache.shape) for cache in caches)]
        plan = plan_kv(self.config, self.model.facts, keeps)
        for cache in (self.cache, *caches):
            cache.resize(plan.num_blocks)
        self.cache.keep_hidden(self.speculator.hidden_layers)
        log_plan(plan)
        return plan

    # ------------------------------------------------------------- requests

    def add(self, request: Request) -> Completion | None:
        """Queue a request; returns its Completion at once when it can never run. Raises ValueError for an id in use."""
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is in flight already")
        try:
            seq = self._admit(request)
        except EngineError as error:
            return failure(request, error)
        self._sequences[request.id] = seq
        return None

    def _admit(self, request: Request) -> Sequence:
        check_request(request, self.config, self.model.facts, self._kv.capacity)
        seq = Sequence(request, self._num_submitted, self.model.tokenizer.eos_token_ids, self.max_model_len)
        if request.params.stop:
            seq.scanner = StopScanner(self.model.tokenizer, request.params.stop)
        self.batcher.submit(seq)
        self._num_submitted += 1
        return seq

    def abort(self, request_id: Hashable) -> Completion | None:
        """Stop a request where it is; returns what it has so far, or None when it is not in flight."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        seq.finish_reason = FinishReason.ABORT
        return self._retire(seq)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def is_decoding(self) -> bool:
        """Whether every request runs and has had its first token."""
        return len(self.batcher.running) == len(self._sequences) and all(
            seq.first_token is not None for seq in self.batcher.running
        )

    # ----------------------------------------------------------------- step

    def step(self) -> list[Completion]:
        """One target pass: every scheduled sequence advances. Returns the requests that finished in it."""
        started = working_clock()
        with self._timed("schedule"):
            feeds = self.batcher.schedule()
        with self._timed("draft"):
            feeds, lengths = self._with_trees(feeds)
        with self._timed("pack"):
            batch = Batch.pack(feeds, self.cache)
        with self._timed("forward"):
            output = self.model.executor.forward(batch, self.cache)
        with self._timed("verify"):
            emitting, offsets = _emitting(feeds, batch.logits_offsets)
            verdicts = self.verifier.verify(emitting, output.logits, offsets)
            self._count(emitting, verdicts)
        with self._timed("commit"):
            self._commit(feeds, verdicts)
            self._learn(emitting, verdicts)
        self._account(feeds, lengths, working_clock() - started)
        with self._timed("retire"):
            return self._retire_finished(verdicts)

    def _with_trees(self, feeds: list[Feed]) -> tuple[list[Feed], list[int]]:
        """Ask the speculator for trees where a sequence's last token is fed, as far as the pool has room; how long."""
        emitting = [feed for feed in feeds if feed.logits]
        if not emitting or self.speculator.max_nodes(1) == 0:
            return feeds, []
        seqs = [feed.seq for feed in emitting]
        lengths = self._affordable(seqs, self.controller.plan(seqs))
        if not any(lengths):
            return feeds, lengths
        trees = dict(zip(seqs, self.speculator.propose(seqs, lengths), strict=True))
        return [replace(feed, tree=trees.get(feed.seq, EMPTY)) if feed.logits else feed for feed in feeds], lengths

    def _affordable(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[int]:
        """Shorten drafts to what the pool can hold now: drafting never preempts anybody."""
        granted = []
        for seq, length in zip(seqs, lengths, strict=True):
            while not self.cache.reserve(seq, len(seq) + self.speculator.max_nodes(length)):
                length -= 1
            granted.append(length)
        return granted

    def _commit(self, feeds: Seq[Feed], verdicts: Seq[Verdict]) -> None:
        """Keep the KV of what was fed and of the accepted paths, forget the rest."""
        for feed in feeds:
            if not feed.logits:
                self.cache.commit(feed.seq, feed.end)
        self.cache.gather_paths([(v.seq, len(v.seq) - v.emitted, v.path) for v in verdicts if v.path])
        for verdict in verdicts:
            self.cache.commit(verdict.seq, len(verdict.seq) - 1)

    def _count(self, emitting: Seq[Feed], verdicts: Seq[Verdict]) -> None:
        """Add a step to the totals. A sequence that fails emits no bonus, so the pass is not counted as its step."""
        accepted = sum(len(verdict.path) for verdict in verdicts)
        self._totals = self._totals.plus(
            steps=sum(verdict.emitted for verdict in verdicts) - accepted,
            drafted=sum(len(feed.tree) for feed in emitting),
            accepted=accepted,
        )

    def _learn(self, emitting: Seq[Feed], verdicts: Seq[Verdict]) -> None:
        self.speculator.update(verdicts)
        for verdict in verdicts:
            self.controller.observe(verdict)

    def _retire_finished(self, verdicts: Seq[Verdict]) -> list[Completion]:
        now = time.monotonic()
        finished = []
        for verdict in verdicts:
            seq = verdict.seq
            if seq.first_token is None:
                seq.first_token = now
            if seq.finished:
                finished.append(self._retire(seq))
        return finished

    def _retire(self, seq: Sequence) -> Completion:
        self.batcher.retire(seq)
        self.speculator.release(seq)
        self.controller.release(seq)
        del self._sequences[seq.request.id]
        if seq.error is not None:
            return failure(seq.request, seq.error)
        self._totals = self._totals.plus(finished=1)
        return completion_of(seq, self.model.tokenizer, self.config.speculation.label(self.speculator.method_of(seq)))

    # ------------------------------------------------------------ reporting

    def report(self) -> dict[str, Any]:
        """What runs here, for the job's record; under `speculator` the options, and what files decided instead."""
        speculation, draft = self.config.speculation, self.speculator.draft
        return {
            "target": self.model.name,
            "content_hash": self.model.content_hash,
            "vocab_size": self.model.facts.vocab_size,
            "max_model_len": self.max_model_len,
            "kv_blocks": self.cache.num_blocks,
            "kv_bytes": self._kv.bytes,
            **asdict(self.model.report),
            "speculator": {**asdict(speculation), **self.speculator.details},
            "draft": None if draft is None else asdict(draft),
        }

    def snapshot(self) -> EngineSnapshot:
        """Load now, and totals up to the last step."""
        return replace(
            self._totals,
            running=len(self.batcher.running),
            waiting=len(self.batcher.waiting),
            kv_used=self.cache.num_used,
            kv_blocks=self.cache.num_blocks,
            preemptions=self.batcher.num_preemptions,
        )

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = working_clock()
        yield
        self.profile.add(part, working_clock() - started)

    def _account(self, feeds: Seq[Feed], lengths: Seq[int], seconds: float) -> None:
        """Charge each sequence its share of the step, by rows; tell the controller what drafts of `lengths` took."""
        rows = sum(feed.num_rows for feed in feeds)
        draft = self.profile.finish_step()
        logit_rows = sum(1 + len(feed.tree) for feed in feeds if feed.logits)
        drafting, levels = sum(map(bool, lengths)), max(lengths, default=0)
        self.controller.timed(StepCost(logit_rows, rows - logit_rows, drafting, levels, draft, seconds - draft))
        for feed in feeds:
            share = feed.num_rows / rows
            feed.seq.draft_seconds += draft * share
            feed.seq.verify_seconds += (seconds - draft) * share


def _emitting(feeds: Seq[Feed], offsets: Seq[int]) -> tuple[list[Feed], list[int]]:
    pairs = [(feed, offset) for feed, offset in zip(feeds, offsets, strict=True) if feed.logits]
    return [feed for feed, _ in pairs], [offset for _, offset in pairs]
