"""The scheduler's loops: dispatch, recover, finish. One task group; cancelling `run` ends all of it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn, TypeVar

from anyio import TASK_STATUS_IGNORED, CancelScope, create_task_group, sleep, to_thread
from anyio.abc import TaskStatus

from scheduler.daemon.dispatch import Dispatcher
from scheduler.daemon.publisher import CeleryPublisher, Publisher
from scheduler.daemon.recovery import reap
from scheduler.daemon.troubles import OUT_OF_REACH, Troubles
from scheduler.finishing import finish_if_done
from storage.records import Job
from storage.retry import Backoff, complain
from storage.store.store import Store

log = logging.getLogger(__name__)

T = TypeVar("T")

BUSY_SHARE = 0.1
"""Part of the usual pause after a round that published something: a fast worker empties the window quickly."""


class Scheduler:
    """Feeds workers with the chunks of one job or of all jobs, and sees jobs through to their end.

    Any number of schedulers may run on one store: every statement that changes a chunk is conditional, and a chunk that
    two of them publish is still claimed once. A broker or database that goes away only delays: the scheduler waits and
    tries again. So does an error that nobody foresaw: it is logged, with the job that it came from where it came from
    one, and the other jobs and loops go on meanwhile.

    `window`: chunks that wait on the broker for a worker, over all jobs; a finished worker finds the next one there.
    `poll_seconds`: pause between looks at the store. `lost_seconds`: a chunk whose message has been neither waiting nor
    claimed for this long is published again.
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
        self._finishing, self._reaping = Troubles(), Troubles()

    async def run(self, job_id: str, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> Job:
        """Serve one job until it is terminal; returns it. Raises what keeps it from being looked at."""
        return await self._serve(job_id, partial(self._until_terminal, job_id), task_status)

    async def serve(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Serve all jobs until cancelled."""
        await self._serve(None, partial(self._repeat, self._finish_all), task_status)

    async def _serve(self, job_id: str | None, until: Callable[[], Awaitable[T]], ready: TaskStatus[None]) -> T:
        dispatcher = Dispatcher(
            self._store, self._publisher, job_id=job_id, window=self._window, lost_seconds=self._lost_seconds
        )
        try:
            async with create_task_group() as loops:
                loops.start_soon(self._repeat, dispatcher.step)
                loops.start_soon(self._repeat, self._reap)
                ready.started()
                result = await until()
                loops.cancel_scope.cancel()
            return result
        except ExceptionGroup as group:
            raise _first(group) from group
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

    async def _until_terminal(self, job_id: str) -> Job:
        while not (job := await self._patiently(partial(self._finish, job_id))).state.terminal:
            await sleep(self._poll_seconds)
        return job

    async def _patiently(self, action: Callable[[], T]) -> T:
        """What a blocking action returns; while broker or database are away it is tried again, with growing pauses."""
        backoff = Backoff()
        while True:
            try:
                return await to_thread.run_sync(action)
            except OUT_OF_REACH as error:
                complain(log, f"{error}; trying again")
                await sleep(backoff.next())

    def _finish(self, job_id: str) -> Job:
        job = self._store.jobs.get(job_id)
        return job if job.state.terminal else finish_if_done(self._store, job)

    def _finish_all(self) -> bool:
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


def _first(error: BaseException) -> BaseException:
    """One error out of a group: the loops share nothing that would make a second one interesting."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
