"""The scheduler: dispatch, recover, finish; for all jobs until it is cancelled, or for one until that ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from time import monotonic
from typing import NoReturn, TypeVar

from anyio import (
    TASK_STATUS_IGNORED,
    CancelScope,
    Event,
    create_task_group,
    from_thread,
    move_on_after,
    sleep,
    to_thread,
)
from anyio.abc import TaskStatus
from anyio.lowlevel import EventLoopToken, current_token

from scheduler.daemon.dispatch import Dispatcher
from scheduler.daemon.publisher import CeleryPublisher, Publisher
from scheduler.daemon.recovery import reap
from scheduler.errors import BrokerUnavailable
from scheduler.finishing import finish_if_done
from storage.errors import StoreUnavailable
from storage.records import Job
from storage.retry import Backoff, complain
from storage.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

OUT_OF_REACH = (BrokerUnavailable, StoreUnavailable)
"""What comes of a broker or database that is down, restarting, read-only or full: the trouble of all jobs."""
BUSY_SHARE = 0.1
"""Part of the usual pause after a round that published something: a fast worker empties the window quickly."""
LONGEST_PAUSE = 30
"""Between two tries to reach what is away, in usual pauses."""


class Scheduler:
    """Feeds workers with the chunks of one job or of all jobs, and sees jobs through to their end.

    Any number of schedulers may run on one store: every statement that changes a chunk is conditional, and a chunk that
    two of them publish is still claimed once. A broker or database that goes away only delays: the scheduler waits and
    tries again.

    `window`: chunks that wait for a worker, over all jobs; a finished worker finds the next one there. `poll_seconds`:
    pause between looks at the store. `lost_seconds`: a chunk whose message has been neither waiting nor claimed for
    this long is published again.
    """

    def __init__(
        self,
        store: Store,
        broker: str | Publisher,
        *,
        window: int = 64,
        poll_seconds: float = 0.5,
        lost_seconds: float = 30.0,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 chunk, got {window}")
        self._store = store
        self._publisher = CeleryPublisher(broker) if isinstance(broker, str) else broker
        self._window = window
        self._poll_seconds = poll_seconds
        self._lost_seconds = lost_seconds
        self._finishing, self._reaping = _Troubles(), _Troubles()
        self._reap_at = 0.0
        self.looked = False
        """Whether `run` has seen to its job once: what dead workers held of it is taken back."""
        self._awake: Event | None = None
        self._token: EventLoopToken | None = None

    async def run(self, job_id: str, *, outage_seconds: float = inf) -> Job:
        """Serve one job until it is terminal; returns it. Raises what keeps it from being served, and what is out of
        reach for longer than `outage_seconds`."""
        dispatcher = self._dispatcher(job_id)
        self._awake, self._token = Event(), current_token()
        async with self._open():
            while not (
                job := await self._patiently(partial(self._look, dispatcher, job_id), outage_seconds)
            ).state.terminal:
                with move_on_after(self._poll_seconds):
                    await self._awake.wait()
                self._awake = Event()
        return job

    def wake(self) -> None:
        """Have `run` look at the job now instead of after its pause: a chunk has ended. For other threads."""
        if self._token is not None:
            from_thread.run_sync(self._end_pause, token=self._token)

    def _end_pause(self) -> None:
        if self._awake is not None:
            self._awake.set()

    def _look(self, dispatcher: Dispatcher, job_id: str) -> Job:
        """All that there is to do for one job now; returns it as it stands."""
        if monotonic() >= self._reap_at:  # not each time that a chunk has ended: nobody dies so often
            self._store.reaper.expire_dead_workers()
            reap(self._store, job_id)
            self._reap_at = monotonic() + self._poll_seconds
        job = self._store.jobs.get(job_id)
        if not job.state.terminal:
            job = finish_if_done(self._store, job)
        if not job.state.terminal:
            dispatcher.step()
        self.looked = True
        return job

    async def serve(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Serve all jobs until cancelled. An error that nobody foresaw is logged, with the job that it came from where
        it came from one, and the other jobs and loops go on meanwhile."""
        dispatcher = self._dispatcher(None)
        async with self._open(), create_task_group() as loops:
            for action in (dispatcher.step, self._reap, self._finish):
                loops.start_soon(self._repeat, action)
            task_status.started()

    def _dispatcher(self, job_id: str | None) -> Dispatcher:
        return Dispatcher(
            self._store, self._publisher, job_id=job_id, window=self._window, lost_seconds=self._lost_seconds
        )

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Closes the publisher in the end."""
        try:
            yield
        finally:
            with CancelScope(shield=True):
                await to_thread.run_sync(self._publisher.close)

    async def _repeat(self, action: Callable[[], bool]) -> NoReturn:
        """Run a blocking action again and again, sooner when it says that it had something to do, later when it fails
        in a way that nobody foresaw."""
        backoff = Backoff()
        while True:
            try:
                busy = await self._patiently(action)
            except Exception:
                wait = backoff.next()
                log.exception("an error that nobody foresaw; this loop goes on in %.1f s", wait)
                await sleep(wait)
            else:
                backoff = Backoff()
                await sleep(self._poll_seconds * (BUSY_SHARE if busy else 1))

    async def _patiently(self, action: Callable[[], T], outage_seconds: float = inf) -> T:
        """What a blocking action returns; while broker or database are away it is tried again, with growing pauses."""
        backoff = Backoff(self._poll_seconds, LONGEST_PAUSE * self._poll_seconds)
        away_since: float | None = None
        while True:
            try:
                return await to_thread.run_sync(action)
            except OUT_OF_REACH as error:
                away_since = monotonic() if away_since is None else away_since
                if monotonic() - away_since >= outage_seconds:
                    raise
                complain(log, f"{error}; trying again")
                await sleep(backoff.next())

    def _finish(self) -> bool:
        for job_id in self._store.jobs.unfinished():
            self._finishing.apart(job_id, partial(self._finish_one, job_id))
        return False

    def _finish_one(self, job_id: str) -> None:
        finished = finish_if_done(self._store, self._store.jobs.get(job_id))
        if finished.state.terminal:
            log.info("job %s is %s", finished.name, finished.state)

    def _reap(self) -> bool:
        self._store.reaper.expire_dead_workers()
        for job_id in self._store.reaper.expired_jobs():
            self._reaping.apart(job_id, partial(reap, self._store, job_id))
        return False


class _Troubles:
    """Keeps what goes wrong with one job from the others: it is logged, and tried again after growing pauses.

    For one action, used from one thread at a time.
    """

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
