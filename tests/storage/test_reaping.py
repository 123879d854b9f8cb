from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import LeaseLost
from storage.records import ChunkState, Job, JobState, RowStatus
from storage.store import Store
from tests.storage.helpers import LEASE, add_job, answer, claim, failure, pairs, work


def future() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


def test_a_live_lease_is_left_alone(store: Store) -> None:
    claim(store, add_job(store))
    reaped = store.reap()
    assert (reaped.released, reaped.split, reaped.poisoned) == ([], [], [])


def test_an_expired_chunk_goes_out_again(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    [released] = store.reap(future(), 3).released
    assert (released.id, released.state, released.epoch, released.attempts, released.worker_id) == (
        chunk.id, ChunkState.PENDING, chunk.epoch + 1, 1, None,
    )  # fmt: skip
    assert not store.heartbeat(chunk.id, chunk.epoch, LEASE).alive
    with pytest.raises(LeaseLost):
        store.write_results(chunk.id, chunk.epoch, [answer(0)])
    assert claim(store, job).id == chunk.id


def test_one_job_alone_can_be_reaped(store: Store) -> None:
    mine, other = add_job(store, "mine"), add_job(store, "other")
    chunks = {job.id: claim(store, job).id for job in (other, mine)}
    assert [chunk.id for chunk in store.reap(future(), job_id=mine.id).released] == [chunks[mine.id]]
    assert [chunk.id for chunk in store.reap(future()).released] == [chunks[other.id]]


def test_the_lease_of_a_dead_worker_ends_at_once(store: Store) -> None:
    job = add_job(store)
    dead, alive = claim(store, job, "dead"), claim(store, job, "alive")
    assert store.expire_leases("dead") == 1
    assert [chunk.id for chunk in store.reap().released] == [dead.id]
    assert store.heartbeat(alive.id, alive.epoch, LEASE).alive


def test_what_was_recorded_before_the_crash_stays(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.write_results(chunk.id, chunk.epoch, [answer(0), answer(3)])
    store.reap(future(), 3)
    assert store.recorded(claim(store, job)) == {(0, 0), (3, 0)}


def test_the_job_s_own_limit_counts(store: Store) -> None:
    job = add_job(store, spec={"max_attempts": 1})
    claim(store, job)
    assert store.reap(future(), 3).released == []


def test_a_chunk_that_kills_its_worker_is_split_at_its_unfinished_rows(store: Store) -> None:
    job = add_job(store, num_rows=12, chunk_rows=12, spec={"max_attempts": 1})
    chunk = claim(store, job)
    store.write_results(chunk.id, chunk.epoch, [answer(r) for r in (0, 1, 2, 3, 4, 5, 6, 11)])
    parts = store.reap(future()).split
    assert [(part.start_row, part.file_row, part.num_rows) for part in parts] == [(0, 0, 9), (9, 9, 3)]
    assert parts[0].id == chunk.id
    assert parts[1].index == 1
    assert all(part.state is ChunkState.PENDING for part in parts)
    assert store.progress(job.id).num_ok == 8
    assert {pair for part in parts for pair in store.recorded(part)} == {(r, 0) for r in (0, 1, 2, 3, 4, 5, 6, 11)}


@pytest.mark.parametrize(("poison", "num_rows"), [((5,), 8), ((0,), 7), ((6,), 7), ((2, 5), 9), ((0,), 1)])
@pytest.mark.parametrize("recorded_before", [False, True])
def test_a_poison_row_ends_alone_and_recorded(
    store: Store, poison: tuple[int, ...], num_rows: int, recorded_before: bool
) -> None:
    """Rows are worked on in order; a poison row kills its worker, what came before it is recorded or lost with it."""
    job = add_job(store, num_rows=num_rows, chunk_rows=num_rows, spec={"max_attempts": 2})
    crashes = 0
    while (chunk := store.claim_next("worker", LEASE, job.id)) is not None:
        done = store.recorded(chunk)
        todo = [row for row, sample in pairs(chunk) if (row, sample) not in done]
        hit = next((row for row in todo if row in poison), None)
        if hit is None:
            store.write_results(chunk.id, chunk.epoch, [answer(row) for row in todo])
            assert store.finish(chunk.id, chunk.epoch)
            continue
        if recorded_before:
            store.write_results(chunk.id, chunk.epoch, [answer(row) for row in todo if row < hit])
        crashes += 1
        store.reap(future())
    done_job = store.finalize_if_done(job.id)
    assert done_job is not None
    assert done_job.state is JobState.COMPLETED
    found = list(store.iter_results(job.id))
    assert [r.row_index for r in found] == list(range(num_rows))
    assert [r.row_index for r in found if r.status is RowStatus.ERROR] == list(poison)
    assert {r.error_code for r in found if r.status is RowStatus.ERROR} == {"worker_crashed"}
    assert crashes <= 2 * len(poison) + 2 + 4 * len(poison)
    _check_partition(store, job)


def test_the_poison_is_reported(store: Store) -> None:
    job = add_job(store, num_rows=1, num_samples=3, spec={"max_attempts": 1})
    chunk = claim(store, job)
    store.write_results(chunk.id, chunk.epoch, [answer(0, 1)])
    [row] = store.reap(future()).poisoned
    assert (row.job_id, row.row_index) == (job.id, 0)
    assert [r.status.value for r in store.iter_results(job.id)] == ["error", "ok", "error"]
    assert store.reap(future()).poisoned == []
    assert store.progress(job.id).chunks[ChunkState.DONE] == 1


def test_a_complete_chunk_whose_worker_died_is_done(store: Store) -> None:
    job = add_job(store, num_rows=5, spec={"max_attempts": 1})
    chunk = claim(store, job)
    store.write_results(chunk.id, chunk.epoch, [answer(*pair) for pair in pairs(chunk)])
    reaped = store.reap(future())
    assert (reaped.released, reaped.split, reaped.poisoned) == ([], [], [])
    assert store.progress(job.id).chunks[ChunkState.DONE] == 1


def test_errors_of_a_split_chunk_are_retried_where_they_are(store: Store) -> None:
    job = add_job(store, num_rows=8, chunk_rows=8, spec={"max_attempts": 1})
    chunk = claim(store, job)
    store.write_results(chunk.id, chunk.epoch, [failure(7), failure(0), answer(1)])
    store.reap(future())
    work(store, job)
    assert store.progress(job.id).num_errors == 2
    assert store.retry_failed(job.id) == 2
    work(store, job)
    assert store.progress(job.id).num_errors == 0
    assert store.progress(job.id).num_ok == 8


def test_a_retry_survives_a_split(store: Store) -> None:
    job = add_job(store, num_rows=8, chunk_rows=8, spec={"max_attempts": 1})
    work(store, job, bad_rows=(1, 6, 7))
    store.retry_failed(job.id)
    claim(store, job)
    parts = store.reap(future()).split
    assert [sorted(store.recorded(part)) for part in parts] == [
        [(0, 0), (2, 0), (3, 0), (4, 0), (5, 0)], [],
    ]  # fmt: skip
    work(store, job)
    assert store.progress(job.id).num_ok == 8


def test_expired_chunks_of_a_stopped_job_are_cancelled(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.cancel_job(job.id)
    assert store.reap(future()).cancelled == [chunk.id]
    ended = store.finalize_if_done(job.id)
    assert ended is not None
    assert ended.state is JobState.CANCELLED


@pytest.mark.parametrize("seed", range(4))
def test_random_crashes_lose_no_row_and_double_none(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    job = add_job(store, num_rows=23, chunk_rows=7, num_samples=2, spec={"max_attempts": 2})
    while (chunk := store.claim_next("worker", LEASE, job.id)) is not None:
        todo = sorted(set(pairs(chunk, 2)) - store.recorded(chunk))
        if rng.random() < 0.3:
            store.write_results(chunk.id, chunk.epoch, [answer(*p) for p in todo if rng.random() < 0.6])
            store.reap(future())
        elif rng.random() < 0.2:
            store.release(chunk.id, chunk.epoch)
        else:
            store.write_results(chunk.id, chunk.epoch, [answer(*p) for p in todo])
            assert store.finish(chunk.id, chunk.epoch)
    assert store.finalize_if_done(job.id) is not None
    found = [(r.row_index, r.sample) for r in store.iter_results(job.id)]
    assert found == [(row, sample) for row in range(23) for sample in range(2)]
    progress = store.progress(job.id)
    assert progress.num_ok + progress.num_errors == 46
    _check_partition(store, job)


def _check_partition(store: Store, job: Job) -> None:
    covered = 0
    for chunk in store.list_chunks(job.id):
        assert (chunk.start_row, chunk.file_row) == (covered, covered)
        covered += chunk.num_rows
    assert covered == job.num_rows
