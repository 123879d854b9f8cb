"""Bringing a draft's KV cache up to what was emitted since it last drafted, in passes that are not too large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence


def catch_up(cache: KVCache, ends: Mapping[Sequence, int], budget: int) -> Iterator[list[Feed]]:
    """What to feed in each pass, at most `budget` tokens, until all that is missing below `ends` fits into one more.

    The token before each end is never fed here: it is left to the caller's next pass, which reads its output. The
    caller runs every pass, and commits it, before it asks for the next.
    """
    while True:
        behind = {seq: end for seq, end in ends.items() if end - cache.num_cached(seq) > 1}
        if sum(end - cache.num_cached(seq) for seq, end in behind.items()) <= budget:
            return
        feeds: list[Feed] = []
        room = budget
        for seq, end in behind.items():
            start = cache.num_cached(seq)
            stop = min(end - 1, start + room)
            if stop > start:
                cache.announce(seq, stop)
                feeds.append(Feed(seq, start, stop, logits=False))
                room -= stop - start
        yield feeds
