"""Taking chunks back from workers that fell silent."""

from __future__ import annotations

import logging

from storage.reaping import Reaped
from storage.store import Store

log = logging.getLogger(__name__)


def reap(store: Store) -> Reaped:
    """Reap what has expired, of all jobs, and say in the log what became of it."""
    reaped = store.reap()
    for chunk in reaped.released:
        log.warning(
            "chunk %d of job %s: its lease ran out (%d so far); it goes out again",
            chunk.id,
            chunk.job_id,
            chunk.attempts,
        )
    if reaped.split:
        log.warning(
            "chunks that kill their worker were split: %s",
            ", ".join(f"{c.id} ({c.num_rows} rows)" for c in reaped.split),
        )
    for row in reaped.poisoned:
        log.error("row %d of job %s killed its worker again and again: recorded as an error", row.row_index, row.job_id)
    return reaped
