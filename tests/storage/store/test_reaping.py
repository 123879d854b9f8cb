from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import LeaseLost
from storage.records import Chunk, ChunkState, Job, JobState, RowInHand, RowStatus
from storage.store.reaping import under_suspicion
from storage.store.store import Store
from tests.support.records import LEASE, add_job, answer, claim, claim_next, pairs, work


def future() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


def test_a_live_lease_is_left_alone(store: Store) -> None:
    claim(store, add_job(store))
    reaped = store.reaper.reap()
    assert (reaped.released, reaped.suspected, reaped.poisoned) == ([], [], [])


def test_an_expired_chunk_goes_out_again(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    [released] = store.reaper.reap(future()).released
    assert (released.id, released.state, released.epoch, released.attempts, released.worker_id) == (
        chunk.id, ChunkState.PENDING, chunk.epoch + 1, 1, None,
    )  # fmt: skip
    assert not store.chunks.heartbeat(chunk.lease, LEASE).alive
    with pytest.raises(LeaseLost):
        store.results.write(chunk.lease, [answer(0)])
    assert claim(store, job).id == chunk.id


def test_one_job_alone_can_be_reaped(store: Store) -> None:
    mine, other = add_job(store, "mine"), add_job(store, "other")
    chunks = {job.id: claim(store, job).id for job in (other, mine)}
    assert [chunk.id for chunk in store.reaper.reap(future(), job_id=mine.id).released] == [chunks[mine.id]]
    assert [chunk.id for chunk in store.reaper.reap(future()).released] == [chunks[other.id]]


def test_the_lease_of_a_dead_worker_ends_at_once(store: Store) -> None:
    job = add_job(store)
    dead, alive = claim(store, job, "dead"), claim(store, job, "alive")
    assert store.chunks.expire_leases("dead") == 1
    assert [chunk.id for chunk in store.reaper.reap().released] == [dead.id]
    assert store.chunks.heartbeat(alive.lease, LEASE).alive


def test_what_was_recorded_before_the_crash_stays(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0), answer(3)])
    store.reaper.reap(future())
    assert store.results.recorded(claim(store, job)) == {(0, 0), (3, 0)}


@pytest.mark.parametrize(("limit", "deaths"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_the_job_s_own_limit_says_when_a_chunk_is_under_suspicion(store: Store, limit: int, deaths: int) -> None:
    job = add_job(store, spec={"max_attempts": limit})
    suspected = []
    while not suspected:
        chunk = claim(store, job)
        assert not under_suspicion(chunk.attempts, limit)
        suspected = store.reaper.reap(future()).suspected
    assert [(part.id, part.attempts) for part in suspected] == [(chunk.id, deaths)]
    assert under_suspicion(deaths, limit)


class Mortal:
    """A worker that poison rows kill, as soon as they are in its hands. It answers rows in order; `deaths` counts."""

    def __init__(self, store: Store, job: Job, poison: Sequence[int], *, recorded_before: bool) -> None:
        self.store, self.job, self.poison = store, job, poison
        self.limit = job.spec.max_attempts
        self.recorded_before = recorded_before
        self.deaths = 0

    def work(self) -> None:
        while (chunk := claim_next(self.store, "worker", LEASE, self.job.id)) is not None:
            done = self.store.results.recorded(chunk)
            todo = [row for row, sample in pairs(chunk) if (row, sample) not in done]
            if self.lives_through(chunk, todo):
                assert self.store.chunks.finish(chunk.lease)
            else:
                self.deaths += 1
                self.store.reaper.reap(future())

    def lives_through(self, chunk: Chunk, todo: Sequence[int]) -> bool:
        if under_suspicion(chunk.attempts, self.limit):
            for row in todo:
                self.store.chunks.take_in_hand(chunk.lease, RowInHand(row, f"id {row}", {"n": row}))
                if row in self.poison:
                    return False
                self.store.results.write(chunk.lease, [answer(row)])
            return True
        hit = next((row for row in todo if row in self.poison), None)
        if hit is None or self.recorded_before:
            self.store.results.write(chunk.lease, [answer(row) for row in todo if hit is None or row < hit])
        return hit is None


@pytest.mark.parametrize(("poison", "num_rows"), [((5,), 8), ((0,), 7), ((6,), 7), ((2, 5), 9), ((0,), 1)])
@pytest.mark.parametrize("recorded_before", [False, True])
@pytest.mark.parametrize("limit", [1, 3])
def test_a_row_that_kills_is_named_by_the_death_after_the_one_that_makes_suspicious(
    store: Store, poison: tuple[int, ...], num_rows: int, recorded_before: bool, limit: int
) -> None:
    job = add_job(store, num_rows=num_rows, chunk_rows=num_rows, spec={"max_attempts": limit})
    worker = Mortal(store, job, poison, recorded_before=recorded_before)
    worker.work()
    assert worker.deaths == max(limit - 1, 1) + len(poison)
    done_job = store.jobs.finalize_if_done(job.id)
    assert done_job is not None
    assert done_job.state is JobState.COMPLETED
    found = list(store.results.iterate(job.id))
    assert [r.row_index for r in found] == list(range(num_rows))
    errors = [r for r in found if r.status is RowStatus.ERROR]
    assert [(r.row_index, r.error_code, r.row_id, r.carried) for r in errors] == [
        (row, "worker_crashed", f"id {row}", {"n": row}) for row in poison
    ]
    assert store.jobs.progress(job.id).counts.num_errors == len(poison)
    _check_partition(store, job)


def test_only_the_samples_without_a_record_are_given_up(store: Store) -> None:
    job = add_job(store, num_rows=1, num_samples=3, spec={"max_attempts": 1})
    claim(store, job)
    store.reaper.reap(future())
    chunk = claim(store, job)
    store.chunks.take_in_hand(chunk.lease, RowInHand(0))
    store.results.write(chunk.lease, [answer(0, 1)])
    [row] = store.reaper.reap(future()).poisoned
    assert (row.job_id, row.row_index) == (job.id, 0)
    assert [r.status.value for r in store.results.iterate(job.id)] == ["error", "ok", "error"]
    assert store.reaper.reap(future()).poisoned == []
    assert store.jobs.progress(job.id).chunks[ChunkState.DONE] == 1


def test_a_death_between_two_rows_blames_neither(store: Store) -> None:
    job = add_job(store, num_rows=3, spec={"max_attempts": 2})
    claim(store, job)
    store.reaper.reap(future())
    for row in range(2):
        chunk = claim(store, job)
        assert chunk.attempts == 1
        store.chunks.take_in_hand(chunk.lease, RowInHand(row))
        store.results.write(chunk.lease, [answer(row)])
        reaped = store.reaper.reap(future())
        assert (reaped.poisoned, [part.attempts for part in reaped.suspected]) == ([], [1])


def test_a_row_is_taken_in_hand_under_the_lease_alone(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.chunks.release(chunk.lease)
    with pytest.raises(LeaseLost):
        store.chunks.take_in_hand(chunk.lease, RowInHand(0))


def test_workers_that_die_before_they_have_a_row_in_their_hands_end_the_job(store: Store) -> None:
    """Too little memory for the model, say: no row is to blame, and no number of deaths would bring the job on."""
    job = add_job(store, num_rows=8, chunk_rows=4, spec={"max_attempts": 3})
    deaths = 0
    while claim_next(store, "worker", LEASE, job.id) is not None:
        deaths += 1
        reaped = store.reaper.reap(future())
    assert (reaped.failed, deaths) == ([job.id], 5)
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.error_code) == (JobState.FAILED, "worker_crashed")
    assert "5 workers died or went silent over rows 0 to 3" in str(failed.error_message)
    assert store.jobs.progress(job.id).counts.num_errors == 0
    store.jobs.resume(job.id)
    work(store, job)
    assert store.jobs.progress(job.id).counts.num_ok == 8


def test_a_complete_chunk_whose_worker_died_is_done(store: Store) -> None:
    job = add_job(store, num_rows=5, spec={"max_attempts": 1})
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(*pair) for pair in pairs(chunk)])
    reaped = store.reaper.reap(future())
    assert (reaped.released, reaped.suspected, reaped.poisoned) == ([], [], [])
    assert store.jobs.progress(job.id).chunks[ChunkState.DONE] == 1


def test_a_row_that_was_given_up_can_be_tried_again(store: Store) -> None:
    job = add_job(store, num_rows=4, spec={"max_attempts": 1})
    Mortal(store, job, (2,), recorded_before=False).work()
    store.jobs.finalize_if_done(job.id)
    assert store.jobs.retry_failed(job.id) == 1
    work(store, job)
    progress = store.jobs.progress(job.id)
    assert (progress.counts.num_ok, progress.counts.num_errors) == (4, 0)


def test_a_retry_that_kills_again_ends_with_the_new_error(store: Store) -> None:
    job = add_job(store, num_rows=8, chunk_rows=8, spec={"max_attempts": 1})
    work(store, job, bad_rows=(1, 6, 7))
    store.jobs.retry_failed(job.id)
    Mortal(store, job, (6,), recorded_before=True).work()
    assert [(r.row_index, r.error_code) for r in store.results.errors(job.id)] == [(6, "worker_crashed")]
    assert store.jobs.progress(job.id).counts.num_ok == 7


def test_expired_chunks_of_a_stopped_job_are_cancelled(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.jobs.cancel(job.id)
    assert store.reaper.reap(future()).cancelled == [chunk.id]
    ended = store.jobs.finalize_if_done(job.id)
    assert ended is not None
    assert ended.state is JobState.CANCELLED


@pytest.mark.parametrize("seed", range(4))
def test_random_crashes_lose_no_row_and_double_none(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    job = add_job(store, num_rows=23, chunk_rows=7, num_samples=2, spec={"max_attempts": 2})
    while (chunk := claim_next(store, "worker", LEASE, job.id)) is not None:
        todo = sorted(set(pairs(chunk, 2)) - store.results.recorded(chunk))
        if todo and rng.random() < 0.3:
            if under_suspicion(chunk.attempts, 2):
                store.chunks.take_in_hand(chunk.lease, RowInHand(rng.choice(todo)[0]))
            store.results.write(chunk.lease, [answer(*p) for p in todo if rng.random() < 0.6])
            store.reaper.reap(future())
        elif rng.random() < 0.2:
            store.chunks.release(chunk.lease)
        else:
            store.results.write(chunk.lease, [answer(*p) for p in todo])
            assert store.chunks.finish(chunk.lease)
    assert store.jobs.finalize_if_done(job.id) is not None
    found = [(r.row_index, r.sample) for r in store.results.iterate(job.id)]
    assert found == [(row, sample) for row in range(23) for sample in range(2)]
    progress = store.jobs.progress(job.id)
    assert progress.counts.num_ok + progress.counts.num_errors == 46
    _check_partition(store, job)


def _check_partition(store: Store, job: Job) -> None:
    covered = 0
    for chunk in store.chunks.of_job(job.id):
        assert (chunk.start_row, chunk.file_row) == (covered, covered)
        covered += chunk.num_rows
    assert covered == job.num_rows
