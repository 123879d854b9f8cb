"""The one Celery task. Its name and keyword arguments are all that scheduler and workers share (`storage.wire`)."""

from __future__ import annotations

from celery import Celery
from celery.exceptions import Reject

from storage.records import ChunkMessage
from storage.wire import TASK_NAME
from workers.chunks.chunk import ChunkStatus
from workers.chunks.worker import Draining, Worker


def register(app: Celery, worker: Worker) -> None:
    """Make `app` process chunks with this worker."""

    def process_chunk(job_id: str, chunk_id: int, epoch: int) -> str:
        """Returns how the chunk ended, for the log."""
        try:
            outcome = worker.process(ChunkMessage(job_id, chunk_id, epoch))
            if outcome is not None and outcome.status is ChunkStatus.NOT_LOADED:
                worker.after_failed_load(job_id, outcome.error)
        except Draining as error:
            raise Reject("the worker is stopping", requeue=True) from error
        return "nothing to do" if outcome is None else outcome.status.value

    app.task(name=TASK_NAME, shared=False, acks_late=True, ignore_result=True)(process_chunk)
