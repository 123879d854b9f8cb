"""Several processes on one store: no double claim, no lost or doubled row, no "database is locked"."""

from __future__ import annotations

import multiprocessing
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from storage.errors import LeaseLost, StoreUnavailable
from storage.records import ChunkState, JobState
from storage.store.store import Store
from tests.support.records import LEASE, add_job, answer, claim, claim_next, pairs

PROCESSES = 3


def test_processes_share_the_chunks_of_a_job(store: Store) -> None:
    job = add_job(store, num_rows=600, chunk_rows=10)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        claimed = pool.starmap(_work_all, [(store.url, job.id, f"worker-{n}") for n in range(PROCESSES)])
    ids = [chunk_id for part in claimed for chunk_id in part]
    assert len(ids) == len(set(ids)) == 60
    progress = store.jobs.progress(job.id)
    assert (progress.counts.num_ok, progress.chunks[ChunkState.DONE]) == (600, 60)
    assert [r.row_index for r in store.results.iterate(job.id)] == list(range(600))
    ended = store.jobs.finalize_if_done(job.id)
    assert ended is not None
    assert ended.state is JobState.COMPLETED


def test_duplicate_messages_race_for_one_claim(store: Store) -> None:
    job = add_job(store, num_rows=40, chunk_rows=1)
    messages = [chunk.message for chunk in store.chunks.pending(job.id, 100)]
    got: list[int] = []

    def receive(worker: str) -> None:
        got.extend(each.chunk_id for each in messages if store.chunks.claim(each, worker, LEASE) is not None)

    _in_threads([lambda n=n: receive(f"worker-{n}") for n in range(4)])
    assert sorted(got) == [message.chunk_id for message in messages]


def test_writers_race_with_the_reaper(store: Store) -> None:
    """Whoever loses is told so; every row has one record in the end and the counters agree."""
    job = add_job(store, num_rows=60, chunk_rows=20, spec={"max_attempts": 100})
    lost: list[int] = []

    def work(worker: str) -> None:
        while (chunk := claim_next(store, worker, 0.0, job.id)) is not None:
            try:
                for pair in sorted(set(pairs(chunk)) - store.results.recorded(chunk)):
                    store.results.write(chunk.lease, [answer(*pair)])
                store.chunks.finish(chunk.lease)
            except LeaseLost:
                lost.append(chunk.id)

    def reap() -> None:
        for _ in range(15):
            store.reaper.reap()

    _in_threads([lambda n=n: work(f"worker-{n}") for n in range(3)] + [reap])
    store.reaper.reap()
    work("last")
    assert [r.row_index for r in store.results.iterate(job.id)] == list(range(60))
    assert store.jobs.progress(job.id).counts.num_ok == 60


def test_cancel_races_with_claims_and_releases(store: Store) -> None:
    """No chunk of a cancelled job is left waiting, whatever the order."""
    for round_ in range(6):
        job = add_job(store, f"job-{round_}", num_rows=8, chunk_rows=1)

        def work(job_id: str = job.id) -> None:
            while (chunk := claim_next(store, "worker", LEASE, job_id)) is not None:
                store.chunks.release(chunk.lease)
                if store.jobs.get(job_id).state is not JobState.IN_PROGRESS:
                    return

        _in_threads([work, work, lambda job_id=job.id: store.jobs.cancel(job_id)])
        ended = store.jobs.finalize_if_done(job.id)
        assert ended is not None
        assert ended.state is JobState.CANCELLED
        assert {chunk.state for chunk in store.chunks.of_job(job.id)} == {ChunkState.CANCELLED}


def test_progress_is_read_while_others_write(store: Store) -> None:
    job = add_job(store, num_rows=100, chunk_rows=100)
    chunk = claim(store, job)
    seen: list[int] = []

    def write() -> None:
        for pair in pairs(chunk):
            store.results.write(chunk.lease, [answer(*pair)])

    def poll() -> None:
        while not seen or seen[-1] < 100:
            seen.append(store.jobs.progress(job.id).counts.num_ok)

    _in_threads([write, poll])
    assert seen == sorted(seen)


@pytest.mark.service
def test_a_lost_connection_is_replaced(postgres_url: str) -> None:
    with Store.open(postgres_url) as store:
        job = add_job(store, num_rows=4)
        chunk = claim(store, job)
        for pair in pairs(chunk):
            with psycopg.connect(postgres_url, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            assert store.results.write(chunk.lease, [answer(*pair)]) == 1
        assert store.jobs.progress(job.id).counts.num_ok == 4


def test_a_store_that_stays_away_is_named() -> None:
    with Store("postgresql://someone:secret@127.0.0.1:1/nothing", patience=0.2) as store:
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/nothing does not answer") as caught:
            store.jobs.newest()
        assert "secret" not in str(caught.value)


def test_a_busy_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with Store.open(f"sqlite:///{path}") as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waiting = threading.Thread(target=add_job, args=(store,))
        waiting.start()
        assert store.jobs.newest() == []
        other.execute("COMMIT")
        waiting.join()
        assert len(store.jobs.newest()) == 1


def _work_all(url: str, job_id: str, worker: str) -> list[int]:
    claimed = []
    with Store.open(url) as store:
        while (chunk := claim_next(store, worker, LEASE, job_id)) is not None:
            claimed.append(chunk.id)
            todo = pairs(chunk)
            for start in range(0, len(todo), 4):
                store.results.write(chunk.lease, [answer(*pair) for pair in todo[start : start + 4]])
            store.chunks.heartbeat(chunk.lease, LEASE)
            assert store.chunks.finish(chunk.lease)
    return claimed


def _in_threads(tasks: list) -> None:  # type: ignore[type-arg]
    errors: list[BaseException] = []

    def run(task) -> None:  # type: ignore[no-untyped-def]
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
