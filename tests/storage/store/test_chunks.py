from __future__ import annotations

import dataclasses

import pytest

from storage.errors import ChunkIncomplete
from storage.records import ChunkState, JobState
from storage.store.store import Store
from tests.storage.helpers import IN_FLIGHT, LEASE, add_job, answer, claim, pairs


def test_dispatch_claim_finish(store: Store) -> None:
    job = add_job(store, num_rows=4, chunk_rows=4)
    [waiting] = store.pending_chunks()
    assert store.mark_dispatched([waiting.id]) == 1
    assert store.pending_chunks() == []
    assert len(store.list_chunks(job.id, IN_FLIGHT)) == 1
    chunk = store.claim(waiting.id, waiting.epoch, "worker", LEASE)
    assert chunk is not None
    assert (chunk.state, chunk.epoch, chunk.worker_id) == (ChunkState.RUNNING, waiting.epoch + 1, "worker")
    assert chunk.lease_until is not None
    assert store.get_job(job.id).state is JobState.IN_PROGRESS
    assert len(store.list_chunks(job.id, IN_FLIGHT)) == 1
    store.write_results(chunk.id, chunk.epoch, [answer(*pair) for pair in pairs(chunk)])
    assert store.finish(chunk.id, chunk.epoch)
    assert store.list_chunks(job.id, IN_FLIGHT) == []


def test_a_message_claims_once(store: Store) -> None:
    add_job(store)
    waiting = store.pending_chunks()[0]
    assert store.claim(waiting.id, waiting.epoch, "a", LEASE) is not None
    assert store.claim(waiting.id, waiting.epoch, "b", LEASE) is None


def test_a_stale_message_claims_nothing(store: Store) -> None:
    job = add_job(store)
    waiting = store.pending_chunks()[0]
    chunk = claim(store, job)
    assert chunk.id == waiting.id
    store.release(chunk.id, chunk.epoch)
    assert store.claim(waiting.id, waiting.epoch, "worker", LEASE) is None
    [again] = [c for c in store.pending_chunks() if c.id == waiting.id]
    assert store.claim(again.id, again.epoch, "worker", LEASE) is not None
    assert store.claim(10**9, 0, "worker", LEASE) is None


def test_a_release_does_not_count_as_an_attempt(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.release(chunk.id, chunk.epoch)
    again = claim(store, job)
    assert (again.id, again.attempts, again.epoch) == (chunk.id, 0, chunk.epoch + 2)
    store.release(chunk.id, chunk.epoch)  # of the first claim: too late, so without effect
    assert store.heartbeat(again.id, again.epoch, LEASE).alive


def test_a_heartbeat_extends_the_lease_of_its_epoch_only(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    assert store.heartbeat(chunk.id, chunk.epoch, 3600).alive
    [now] = store.list_chunks(job.id, [ChunkState.RUNNING])
    assert now.lease_until is not None
    assert chunk.lease_until is not None
    assert now.lease_until > chunk.lease_until
    beat = store.heartbeat(chunk.id, chunk.epoch - 1, LEASE)
    assert (beat.alive, beat.cancel_requested) == (False, False)


def test_a_chunk_is_done_only_when_every_sample_has_a_record(store: Store) -> None:
    job = add_job(store, num_rows=3, chunk_rows=3, num_samples=2)
    chunk = claim(store, job)
    todo = pairs(chunk, 2)
    store.write_results(chunk.id, chunk.epoch, [answer(*pair) for pair in todo[:-1]])
    with pytest.raises(ChunkIncomplete, match=r"1 of its 6"):
        store.finish(chunk.id, chunk.epoch)
    store.write_results(chunk.id, chunk.epoch, [answer(*todo[-1])])
    assert not store.finish(chunk.id, chunk.epoch - 1)
    assert store.finish(chunk.id, chunk.epoch)
    assert store.finish(chunk.id, chunk.epoch)


def test_lost_messages_are_published_again(store: Store) -> None:
    add_job(store)
    first = store.pending_chunks()[0]
    store.mark_dispatched([first.id])
    assert store.requeue_stale_dispatched(3600) == 0
    assert store.requeue_stale_dispatched(0) == 1
    assert store.pending_chunks()[0] == first
    assert store.mark_dispatched([first.id, first.id]) == 1


def test_a_late_message_may_still_claim_a_requeued_chunk(store: Store) -> None:
    add_job(store)
    first = store.pending_chunks()[0]
    store.mark_dispatched([first.id])
    store.requeue_stale_dispatched(0)
    store.mark_dispatched([first.id])
    assert store.claim(first.id, first.epoch, "a", LEASE) is not None
    assert store.claim(first.id, first.epoch, "b", LEASE) is None


def test_claim_next_takes_dispatched_chunks_as_well(store: Store) -> None:
    job = add_job(store, num_rows=2, chunk_rows=1)
    first = store.pending_chunks()[0]
    store.mark_dispatched([first.id])
    assert claim(store, job).id == first.id
    assert store.claim(first.id, first.epoch, "late", LEASE) is None
    assert claim(store, job).id != first.id
    assert store.claim_next("worker", LEASE) is None


def test_claim_next_serves_jobs_in_order_or_the_one_named(store: Store) -> None:
    first, second = add_job(store, "first", num_rows=1), add_job(store, "second", num_rows=1)
    got = store.claim_next("worker", LEASE, second.id)
    assert got is not None
    assert got.job_id == second.id
    got = store.claim_next("worker", LEASE)
    assert got is not None
    assert got.job_id == first.id


def test_pending_chunks_come_oldest_first_within_the_limit(store: Store) -> None:
    first = add_job(store, "first", num_rows=3, chunk_rows=1)
    second = add_job(store, "second", num_rows=3, chunk_rows=1)
    assert [(c.job_id, c.index) for c in store.pending_chunks(limit=4)] == [
        (first.id, 0), (first.id, 1), (first.id, 2), (second.id, 0),
    ]  # fmt: skip
    assert [c.job_id for c in store.pending_chunks(second.id, limit=2)] == [second.id] * 2


def test_many_chunks_are_dispatched_at_once(store: Store) -> None:
    add_job(store, num_rows=1200, chunk_rows=1)
    waiting = store.pending_chunks(limit=2000)
    assert store.mark_dispatched([chunk.id for chunk in waiting]) == 1200


def test_a_claimed_chunk_equals_the_stored_one(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    [stored] = store.list_chunks(job.id, [ChunkState.RUNNING])
    assert dataclasses.asdict(stored) == dataclasses.asdict(chunk)
