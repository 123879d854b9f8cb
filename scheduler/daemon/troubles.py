"""What goes wrong with one job, kept from the others: logged, and tried again after growing pauses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from scheduler.errors import BrokerUnavailable
from storage.errors import StoreUnavailable
from storage.retry import Backoff

log = logging.getLogger(__name__)

OUT_OF_REACH = (BrokerUnavailable, StoreUnavailable)
"""What comes of a broker or database that is down, restarting, read-only or full: the trouble of all jobs."""


class Troubles:
    """Remembers which jobs an action failed for, and since when. For one action, used from one thread at a time."""

    def __init__(self) -> None:
        self._pauses: dict[str, Backoff] = {}
        self._until: dict[str, float] = {}

    def apart(self, job_id: str, action: Callable[[], object]) -> None:
        """Run the action unless it failed for this job a moment ago. Raises only `OUT_OF_REACH`."""
        if monotonic() < self._until.get(job_id, 0.0):
            return
        try:
            action()
        except OUT_OF_REACH:
            raise
        except Exception:
            wait = self._pauses.setdefault(job_id, Backoff()).next()
            self._until[job_id] = monotonic() + wait
            log.exception("job %s: an error that nobody foresaw; trying again in %.1f s", job_id, wait)
        else:
            self._pauses.pop(job_id, None)
            self._until.pop(job_id, None)
