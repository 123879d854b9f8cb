from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from storage.errors import ChunkIncomplete
from storage.records import ChunkState, JobState, Lease
from storage.store.store import Store
from tests.support.records import IN_FLIGHT, LEASE, add_job, answer, claim, pairs


def test_dispatch_claim_finish(store: Store) -> None:
    job = add_job(store, num_rows=4, chunk_rows=4)
    [waiting] = store.chunks.pending()
    assert store.chunks.mark_dispatched([waiting.id]) == 1
    assert store.chunks.pending() == []
    assert len(store.chunks.of_job(job.id, IN_FLIGHT)) == 1
    chunk = store.chunks.claim(waiting.message, "worker", LEASE)
    assert chunk is not None
    assert (chunk.state, chunk.epoch, chunk.worker_id) == (ChunkState.RUNNING, waiting.epoch + 1, "worker")
    assert chunk.lease_until is not None
    assert store.jobs.get(job.id).state is JobState.IN_PROGRESS
    assert len(store.chunks.of_job(job.id, IN_FLIGHT)) == 1
    store.results.write(chunk.lease, [answer(*pair) for pair in pairs(chunk)])
    assert store.chunks.finish(chunk.lease)
    assert store.chunks.of_job(job.id, IN_FLIGHT) == []


def test_a_message_claims_once(store: Store) -> None:
    add_job(store)
    waiting = store.chunks.pending()[0]
    assert store.chunks.claim(waiting.message, "a", LEASE) is not None
    assert store.chunks.claim(waiting.message, "b", LEASE) is None


def test_a_stale_message_claims_nothing(store: Store) -> None:
    job = add_job(store)
    waiting = store.chunks.pending()[0]
    chunk = claim(store, job)
    assert chunk.id == waiting.id
    store.chunks.release(chunk.lease)
    assert store.chunks.claim(waiting.message, "worker", LEASE) is None
    [again] = [c for c in store.chunks.pending() if c.id == waiting.id]
    assert store.chunks.claim(replace(again.message, chunk_id=10**9), "worker", LEASE) is None
    assert store.chunks.claim(replace(again.message, job_id="another"), "worker", LEASE) is None
    assert store.chunks.claim(again.message, "worker", LEASE) is not None


def test_a_release_does_not_count_as_an_attempt(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.chunks.release(chunk.lease)
    again = claim(store, job)
    assert (again.id, again.attempts, again.epoch) == (chunk.id, 0, chunk.epoch + 2)
    store.chunks.release(chunk.lease)  # of the first claim: too late, so without effect
    assert store.chunks.heartbeat(again.lease, LEASE).alive


def test_a_heartbeat_extends_the_lease_of_its_epoch_only(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    assert store.chunks.heartbeat(chunk.lease, 3600).alive
    [now] = store.chunks.of_job(job.id, [ChunkState.RUNNING])
    assert now.lease_until is not None
    assert chunk.lease_until is not None
    assert now.lease_until > chunk.lease_until
    beat = store.chunks.heartbeat(Lease(chunk.id, chunk.epoch - 1), LEASE)
    assert (beat.alive, beat.cancel_requested) == (False, False)


def test_a_chunk_is_done_only_when_every_sample_has_a_record(store: Store) -> None:
    job = add_job(store, num_rows=3, chunk_rows=3, num_samples=2)
    chunk = claim(store, job)
    todo = pairs(chunk, 2)
    store.results.write(chunk.lease, [answer(*pair) for pair in todo[:-1]])
    with pytest.raises(ChunkIncomplete, match=r"1 of its 6"):
        store.chunks.finish(chunk.lease)
    store.results.write(chunk.lease, [answer(*todo[-1])])
    assert not store.chunks.finish(Lease(chunk.id, chunk.epoch - 1))
    assert store.chunks.finish(chunk.lease)
    assert store.chunks.finish(chunk.lease)


def test_lost_messages_are_published_again(store: Store) -> None:
    add_job(store)
    first = store.chunks.pending()[0]
    store.chunks.mark_dispatched([first.id])
    assert store.chunks.requeue_stale(3600) == 0
    assert store.chunks.requeue_stale(0) == 1
    assert store.chunks.pending()[0] == first
    assert store.chunks.mark_dispatched([first.id, first.id]) == 1


def test_a_late_message_may_still_claim_a_requeued_chunk(store: Store) -> None:
    add_job(store)
    first = store.chunks.pending()[0]
    store.chunks.mark_dispatched([first.id])
    store.chunks.requeue_stale(0)
    store.chunks.mark_dispatched([first.id])
    assert store.chunks.claim(first.message, "a", LEASE) is not None
    assert store.chunks.claim(first.message, "b", LEASE) is None


def test_dispatched_chunks_wait_as_well_for_whoever_claims_them(store: Store) -> None:
    job = add_job(store, num_rows=2, chunk_rows=1)
    first, second = store.chunks.pending()
    store.chunks.mark_dispatched([first.id])
    assert [chunk.id for chunk in store.chunks.pending()] == [second.id]
    assert [chunk.id for chunk in store.chunks.pending(job.id, or_dispatched=True)] == [first.id, second.id]
    assert claim(store, job).id == first.id
    assert [chunk.id for chunk in store.chunks.pending(job.id, or_dispatched=True)] == [second.id]


def test_pending_chunks_come_oldest_first_within_the_limit(store: Store) -> None:
    first = add_job(store, "first", num_rows=3, chunk_rows=1)
    second = add_job(store, "second", num_rows=3, chunk_rows=1)
    assert [(c.job_id, c.index) for c in store.chunks.pending(limit=4)] == [
        (first.id, 0), (first.id, 1), (first.id, 2), (second.id, 0),
    ]  # fmt: skip
    assert [c.job_id for c in store.chunks.pending(second.id, limit=2)] == [second.id] * 2


def test_many_chunks_are_dispatched_at_once(store: Store) -> None:
    add_job(store, num_rows=1200, chunk_rows=1)
    waiting = store.chunks.pending(limit=2000)
    assert store.chunks.mark_dispatched([chunk.id for chunk in waiting]) == 1200


def test_a_claimed_chunk_equals_the_stored_one(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    [stored] = store.chunks.of_job(job.id, [ChunkState.RUNNING])
    assert dataclasses.asdict(stored) == dataclasses.asdict(chunk)
