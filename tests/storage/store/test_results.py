from __future__ import annotations

import dataclasses
import random
from enum import StrEnum

import pytest

from storage.errors import InvalidResult, LeaseLost
from storage.records import Acceptance, Job, Lease, Result, RowStatus
from storage.sql.encoding import storable
from storage.store.store import Store
from tests.support.records import LEASE, add_job, answer, claim, failure, pairs


def test_results_come_back_as_they_were_written(store: Store) -> None:
    job = add_job(store, num_rows=3, num_samples=2)
    chunk = claim(store, job)
    full = answer(
        0,
        output_text="näïve 日本 🎉 \t\n'\"\\ %s",
        output_token_ids=(1, 2, 2**31 - 1),
        stop_reason="näïve\n",
        row_id="row/0",
        carried={"ü": "é", "list": [1, None, {"a": 0.1}], "n": None, "big": 2**53, "f": 0.1 + 0.2, "b": True},
        seed=2**64 - 1,
        logprobs=[{"token_id": 1, "logprob": -0.25, "top": [[1, -0.25]]}],
        queue_seconds=0.125,
        first_token_seconds=0.25,
        total_seconds=1.5,
        draft_seconds=0.0625,
        verify_seconds=1e-9,
        num_preemptions=2,
    )
    others = [answer(0, 1, seed=-(2**63)), answer(1, acceptance=None), failure(1, 1), answer(2), answer(2, 1)]
    batch = [full, *others]
    assert store.results.write(chunk.lease, list(reversed(batch))) == 6
    assert list(store.results.iterate(job.id)) == batch
    assert list(store.results.iterate(job.id, page=1)) == batch
    assert store.results.errors(job.id) == [failure(1, 1)]


def test_enum_texts_are_stored_as_their_values(store: Store) -> None:
    class Reason(StrEnum):
        LENGTH = "length"

    job = add_job(store, num_rows=1)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0, finish_reason=Reason.LENGTH)])
    assert [r.finish_reason for r in store.results.iterate(job.id)] == ["length"]


def test_a_zombie_writer_is_refused(store: Store) -> None:
    job = add_job(store)
    zombie = claim(store, job)
    store.chunks.release(zombie.lease)
    current = claim(store, job, "other")
    assert current.id == zombie.id
    with pytest.raises(LeaseLost, match=f"chunk {zombie.id} no longer runs under epoch {zombie.epoch}"):
        store.results.write(zombie.lease, [answer(0)])
    assert store.results.recorded(current) == set()
    assert store.results.write(current.lease, [answer(0)]) == 1
    assert not store.chunks.finish(zombie.lease)


def test_a_finished_or_unclaimed_chunk_takes_no_results(store: Store) -> None:
    job = add_job(store, num_rows=2, chunk_rows=1)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0)])
    store.chunks.finish(chunk.lease)
    with pytest.raises(LeaseLost):
        store.results.write(chunk.lease, [answer(0)])
    [waiting] = store.chunks.pending()
    with pytest.raises(LeaseLost):
        store.results.write(waiting.lease, [answer(1)])


def test_the_first_success_wins(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    first = answer(0)
    assert store.results.write(chunk.lease, [first]) == 1
    second = answer(0, output_text="another", num_output_tokens=99, acceptance=None)
    assert store.results.write(chunk.lease, [second, failure(0), answer(1), answer(1, output_text="late")]) == 1
    assert list(store.results.iterate(job.id)) == [first, answer(1)]
    assert _counters(store, job) == _recount(store, job)


def test_a_success_replaces_an_error_and_never_the_reverse(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [failure(0), failure(1), answer(2)])
    assert store.results.write(chunk.lease, [answer(0), failure(1, code="later"), failure(2)]) == 1
    assert list(store.results.iterate(job.id)) == [answer(0), failure(1), answer(2)]
    assert _counters(store, job) == _recount(store, job)


@pytest.mark.parametrize("seed", range(3))
def test_counters_stay_exact_whatever_is_written_twice(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    job = add_job(store, num_rows=12, chunk_rows=12, num_samples=2)
    chunk = claim(store, job)
    for _ in range(25):
        chosen = rng.choices(pairs(chunk, 2), k=rng.randint(1, 8))
        batch = [failure(*p) if rng.random() < 0.4 else answer(*p) for p in chosen]
        before = {(r.row_index, r.sample): r for r in store.results.iterate(job.id)}
        written = store.results.write(chunk.lease, batch)
        after = {(r.row_index, r.sample): r for r in store.results.iterate(job.id)}
        assert written == sum(after[key] != before.get(key) for key in after)
        assert all(after[key].status is RowStatus.OK for key, r in before.items() if r.status is RowStatus.OK)
        assert _counters(store, job) == _recount(store, job)
        if rng.random() < 0.2:
            store.chunks.release(chunk.lease)
            chunk = claim(store, job)


@pytest.mark.parametrize(
    ("row", "sample"), [(4, 0), (11, 0), (5, 2), (5, -1)], ids=["before", "after", "sample", "negative"]
)
def test_a_result_outside_the_chunk_is_refused(store: Store, row: int, sample: int) -> None:
    job = add_job(store, num_rows=15, num_samples=2)
    claim(store, job)
    chunk = claim(store, job)
    with pytest.raises(ValueError, match="not in chunk"):
        store.results.write(chunk.lease, [answer(5), failure(row, sample)])
    assert list(store.results.iterate(job.id)) == []


def test_nothing_to_write_writes_nothing(store: Store) -> None:
    assert store.results.write(Lease(1, 1), []) == 0


@pytest.mark.parametrize("text", ["a\x00b", "\x00", "half \ud83d pair \udc00", "\x00\ud800 日本"])
def test_a_character_that_no_database_holds_costs_no_record(store: Store, text: str) -> None:
    job = add_job(store, num_rows=2)
    chunk = claim(store, job)
    odd = answer(0, output_text=text, row_id=text, carried={text: [text, {"x": text}]}, logprobs=[{"token": text}])
    assert store.results.write(chunk.lease, [odd, failure(1, message=text)]) == 2
    first, second = store.results.iterate(job.id)
    # The output keeps its NUL characters; everywhere else, and for halves of pairs, U+FFFD stands in.
    assert first.output_text == "".join("�" if "\ud800" <= c <= "\udfff" else c for c in text)
    clean = storable(text)
    assert (first.row_id, first.carried) == (clean, {clean: [clean, {"x": clean}]})
    assert first.logprobs == [{"token": clean}]
    assert second.error_message == clean


def test_numbers_that_are_not_finite_become_null(store: Store) -> None:
    job = add_job(store, num_rows=1)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0, carried={"a": float("nan"), "b": [float("inf"), 1.5]})])
    assert next(store.results.iterate(job.id)).carried == {"a": None, "b": [None, 1.5]}


@pytest.mark.parametrize(
    "wrong",
    [
        Acceptance(6, 3, 4, 2, 0),
        Acceptance(5, 3, 4, 2, 3),
    ],
    ids=["emitted", "drafted"],
)
def test_statistics_that_do_not_add_up_are_refused(store: Store, wrong: Acceptance) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    with pytest.raises(InvalidResult, match="acceptance"):
        store.results.write(chunk.lease, [answer(0, acceptance=wrong)])
    assert store.jobs.progress(job.id).counts.num_ok == 0


def test_errors_are_grouped_by_code(store: Store) -> None:
    job = add_job(store)
    for _ in range(2):
        chunk = claim(store, job)
        batch = [
            failure(0, code="null_prompt"), failure(3, code="prompt_too_long", message="9000 tokens"), answer(4),
            failure(5, code="prompt_too_long"), failure(6, code="prompt_too_long", message="8000 tokens"),
        ]  # fmt: skip
        store.results.write(chunk.lease, [r for r in batch if chunk.start_row <= r.row_index < chunk.start_row + 5])
    groups = store.results.error_groups(job.id)
    assert [(g.error_code, g.num_errors, g.first_row_index) for g in groups] == [
        ("prompt_too_long", 3, 3), ("null_prompt", 1, 0),
    ]  # fmt: skip
    assert groups[0].example_message == "9000 tokens", "that of the first row"
    assert [r.row_index for r in store.results.errors(job.id, limit=2)] == [0, 3]


def test_a_large_batch(store: Store) -> None:
    job = add_job(store, num_rows=3000, chunk_rows=3000)
    chunk = claim(store, job)
    assert store.results.write(chunk.lease, [answer(*p, output_text="x" * 5000) for p in pairs(chunk)]) == 3000
    assert store.chunks.finish(chunk.lease)
    assert store.jobs.progress(job.id).counts.num_ok == 3000
    assert [r.row_index for r in store.results.iterate(job.id)] == list(range(3000))


def test_recorded_is_the_chunk_s_own(store: Store) -> None:
    job = add_job(store)
    first, second = claim(store, job), claim(store, job)
    store.results.write(first.lease, [answer(4)])
    store.results.write(second.lease, [answer(5), failure(9)])
    assert store.results.recorded(first) == {(4, 0)}
    assert store.results.recorded(second) == {(5, 0), (9, 0)}
    assert store.chunks.heartbeat(first.lease, LEASE).alive


def _counters(store: Store, job: Job) -> dict[str, int]:
    return dataclasses.asdict(store.jobs.progress(job.id).counts)


def _recount(store: Store, job: Job) -> dict[str, int]:
    found = list(store.results.iterate(job.id))
    stats = [r.acceptance for r in found if r.acceptance]
    return {
        "num_ok": sum(r.status is RowStatus.OK for r in found),
        "num_errors": sum(r.status is RowStatus.ERROR for r in found),
        "num_output_tokens": sum(r.num_output_tokens or 0 for r in found),
        "num_spec_steps": sum(a.num_spec_steps for a in stats),
        "num_draft_tokens": sum(a.num_draft_tokens for a in stats),
        "num_accepted_draft_tokens": sum(a.num_accepted_draft_tokens for a in stats),
        "engine_microseconds": sum(round(1e6 * ((r.draft_seconds or 0) + (r.verify_seconds or 0))) for r in found),
    }


def test_an_error_needs_a_code(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    with pytest.raises(InvalidResult, match="error_code"):
        store.results.write(chunk.lease, [Result(0, 0, RowStatus.ERROR)])
