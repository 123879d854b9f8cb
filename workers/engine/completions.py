"""From a sequence to the completion that callers see."""

from __future__ import annotations

import time

from workers.engine.api.errors import EngineError
from workers.engine.api.request import Completion, FinishReason, Request, Timings, Tokenizer
from workers.engine.api.stats import AcceptanceStats
from workers.engine.state.sequence import Sequence


def completion_of(seq: Sequence, tokenizer: Tokenizer, method: str) -> Completion:
    """The completion of a finished or aborted sequence."""
    assert seq.finish_reason is not None
    output = seq.output
    return Completion(
        request_id=seq.request.id,
        sample=seq.request.sample,
        token_ids=tuple(output),
        text=tokenizer.decode(output) if seq.stopped_text is None else seq.stopped_text,
        finish_reason=seq.finish_reason,
        num_prompt_tokens=seq.num_prompt,
        stats=seq.stats,
        timings=_timings(seq),
        method=method,
        logprobs=None if seq.params.logprobs is None else tuple(seq.logprobs),
        num_preemptions=seq.num_preemptions,
        stop_reason=seq.stop_reason,
    )


def failure(request: Request, error: EngineError) -> Completion:
    """The completion of a request that cannot run."""
    return Completion(
        request_id=request.id,
        sample=request.sample,
        token_ids=(),
        text="",
        finish_reason=FinishReason.ERROR,
        num_prompt_tokens=len(request.prompt_token_ids) if isinstance(request.prompt_token_ids, list | tuple) else 0,
        stats=AcceptanceStats(),
        timings=Timings(),
        method="",
        error_code=error.code,
        error_message=str(error),
    )


def _timings(seq: Sequence) -> Timings:
    now = time.monotonic()
    return Timings(
        queue=(seq.admitted or now) - seq.submitted,
        first_token=(seq.first_token or now) - seq.submitted,
        total=now - seq.submitted,
        draft=seq.draft_seconds,
        verify=seq.verify_seconds,
    )
