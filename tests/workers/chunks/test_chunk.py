"""A chunk from claim to done, and every way in which it can end before that."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.records import ChunkState, JobState, Result, RowStatus
from storage.store.store import Store
from tests.support.fake_engine import Script
from tests.support.jobs import claim, make_job, results, run_chunk, texts
from tests.support.waiting import wait_until
from workers.chunks.chunk import ChunkStatus, process_chunk
from workers.engine.api.errors import ModelNotFound
from workers.hosting.shared import EngineHosts

PROMPTS = [f"prompt {place}" for place in range(10)]


@pytest.fixture
def script() -> Script:
    return Script()


def test_every_row_is_recorded_and_the_chunk_is_done(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": PROMPTS, "category": ["a", "b"] * 5, "id": PROMPTS})
    outcome = run_chunk(store, job, script)
    assert (outcome.status, outcome.num_ok, outcome.num_errors) == (ChunkStatus.DONE, 10, 0)
    assert texts(store, job) == {row: text.upper() for row, text in enumerate(PROMPTS)}
    first = results(store, job)[1, 0]
    assert first.carried == {"category": "b", "id": "prompt 1"}
    assert first.acceptance is not None
    assert first.acceptance.num_output_tokens == first.num_output_tokens == len("prompt 1")
    assert first.output_token_ids is None
    assert store.jobs.finalize_if_done(job.id).state is JobState.COMPLETED  # type: ignore[union-attr]


def test_every_sample_of_a_row_is_recorded(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": ["a", None]}, num_samples=3, keep_token_ids=True)
    assert run_chunk(store, job, script).num_errors == 3
    found = results(store, job)
    assert sorted(found) == [(row, sample) for row in range(2) for sample in range(3)]
    assert len({found[0, sample].seed for sample in range(3)}) == 3
    assert {found[1, sample].error_code for sample in range(3)} == {"null_prompt"}
    assert found[0, 0].output_token_ids == (ord("A"),)


def test_bad_rows_and_refused_requests_are_errors_beside_the_others(
    store: Store, tmp_path: Path, script: Script
) -> None:
    prompts = ["good", None, "nul \x00", "", "REFUSE this", "UNTOKENISABLE", "better"]
    columns = {"prompt": prompts, "sampling_params": [None] * 6 + ['{"temperature": -1}']}
    section = {"prompt_column": "prompt", "sampling_column": "sampling_params"}
    job = make_job(store, tmp_path, columns, input_section=section)
    outcome = run_chunk(store, job, script)
    assert (outcome.status, outcome.num_ok, outcome.num_errors) == (ChunkStatus.DONE, 1, 6)
    codes = {row: result.error_code for (row, _), result in results(store, job).items()}
    assert codes == {
        0: None,
        1: "null_prompt",
        2: "invalid_text",
        3: "empty_prompt",
        4: "prompt_too_long",
        5: "preparation_failed",
        6: "invalid_params",
    }


def test_what_is_recorded_is_not_generated_again(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one", "HOLD", "three"]})
    stop = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run_chunk, store, job, script, stop=stop)
        wait_until(lambda: len(results(store, job)) == 2)
        stop.set()
        assert running.result().status is ChunkStatus.RELEASED
    script.hold = "nothing"
    script.requests.clear()
    assert run_chunk(store, job, script).status is ChunkStatus.DONE
    assert [request.id[-2] for request in script.requests] == [1]  # type: ignore[index]
    assert texts(store, job) == {0: "ONE", 1: "HOLD", 2: "THREE"}


def test_a_chunk_whose_rows_are_all_recorded_needs_no_engine(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    crashed = claim(store, job)
    store.results.write(crashed.lease, [Result(0, 0, RowStatus.OK, output_text="ONE")])
    store.chunks.release(crashed.lease)
    script.load_error = RuntimeError("an engine was asked for")
    assert run_chunk(store, job, script).status is ChunkStatus.DONE


def test_a_stop_records_what_finished_and_releases_without_an_attempt(
    store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one", "HOLD"]})
    stop = threading.Event()
    running = pool.submit(run_chunk, store, job, script, stop=stop)
    wait_until(lambda: len(script.requests) == 2)
    stop.set()
    assert running.result().status is ChunkStatus.RELEASED
    assert texts(store, job) == {0: "ONE"}
    (chunk,) = store.chunks.of_job(job.id)
    assert (chunk.state, chunk.attempts) == (ChunkState.PENDING, 0)


def test_a_stop_ends_the_wait_for_an_engine(store: Store, tmp_path: Path, script: Script) -> None:
    script.load_seconds = 0.3
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    stop = threading.Event()
    stop.set()
    assert run_chunk(store, job, script, stop=stop).status is ChunkStatus.RELEASED
    assert script.requests == []


def test_a_cancelled_job_keeps_what_finished(
    store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one", "HOLD"]}, lease_seconds=1.0)
    running = pool.submit(run_chunk, store, job, script)
    wait_until(lambda: len(script.requests) == 2)
    assert store.jobs.cancel(job.id) is JobState.CANCELLING
    assert running.result().status is ChunkStatus.CANCELLED
    assert texts(store, job) == {0: "ONE"}
    assert store.jobs.finalize_if_done(job.id).state is JobState.CANCELLED  # type: ignore[union-attr]


def test_a_lost_lease_ends_quietly_and_writes_nothing(
    store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["HOLD"]}, lease_seconds=1.0)
    chunk = claim(store, job)
    running = pool.submit(run_chunk, store, job, script, chunk=chunk)
    wait_until(lambda: len(script.requests) == 1)
    store.chunks.release(chunk.lease)
    assert running.result().status is ChunkStatus.LOST
    assert results(store, job) == {}


def test_a_zombies_results_are_refused(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    stale = claim(store, job)
    store.chunks.release(stale.lease)
    current = claim(store, job)
    assert run_chunk(store, job, script, chunk=stale).status is ChunkStatus.LOST
    assert results(store, job) == {}
    assert run_chunk(store, job, script, chunk=current).status is ChunkStatus.DONE


def test_heartbeats_keep_a_lease_that_is_shorter_than_the_chunk(
    store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["HOLD"]}, lease_seconds=1.0)
    stop = threading.Event()
    running = pool.submit(run_chunk, store, job, script, stop=stop, chunk=claim(store, job, lease_seconds=1.0))
    time.sleep(1.2)
    reaped = store.reaper.reap()
    stop.set()
    assert not reaped.released
    assert running.result().status is ChunkStatus.RELEASED


def test_an_engine_failure_keeps_what_finished_and_counts_an_attempt(
    store: Store, tmp_path: Path, script: Script
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one", "FAIL", "three"]})
    outcome = run_chunk(store, job, script)
    assert outcome.status is ChunkStatus.FAILED
    assert "the device is gone" in str(outcome.error)
    assert texts(store, job) == {0: "ONE"}
    (chunk,) = store.reaper.reap().released
    assert (chunk.state, chunk.attempts) == (ChunkState.PENDING, 1)
    script.fail = "nothing"
    assert run_chunk(store, job, script).status is ChunkStatus.DONE


def test_a_model_that_does_not_exist_ends_the_job(store: Store, tmp_path: Path, script: Script) -> None:
    script.load_error = ModelNotFound("no model 'fake'")
    job = make_job(store, tmp_path, {"prompt": PROMPTS}, chunk_rows=5)
    assert run_chunk(store, job, script).status is ChunkStatus.JOB_FAILED
    job = store.jobs.get(job.id)
    assert (job.state, job.error_code) == (JobState.FAILED, "model_not_found")
    assert "no model 'fake'" in str(job.error_message)
    assert {chunk.state for chunk in store.chunks.of_job(job.id)} == {ChunkState.CANCELLED}


@pytest.mark.parametrize(
    ("section", "code", "says"),
    [
        ({"engine": {"target": "fake", "max_bach": 4}}, "invalid_spec", "did you mean 'max_batch'"),
        ({"sampling": {"temperature": -1}}, "invalid_spec", "temperature"),
        ({"input_section": {"paths": ["x"]}}, "invalid_spec", "prompt_column"),
    ],
)
def test_a_spec_that_cannot_run_ends_the_job(
    store: Store, tmp_path: Path, script: Script, section: dict[str, dict[str, object]], code: str, says: str
) -> None:
    job = make_job(store, tmp_path, {"prompt": PROMPTS}, **section)  # type: ignore[arg-type]
    assert run_chunk(store, job, script).status is ChunkStatus.JOB_FAILED
    job = store.jobs.get(job.id)
    assert (job.state, job.error_code) == (JobState.FAILED, code)
    assert says in str(job.error_message)


def test_input_that_changed_ends_the_job(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": PROMPTS})
    (tmp_path / "job.parquet").write_bytes(b"something else")
    assert run_chunk(store, job, script).status is ChunkStatus.JOB_FAILED
    job = store.jobs.get(job.id)
    assert (job.state, job.error_code) == (JobState.FAILED, "unreadable_input")
    assert "job.parquet" in str(job.error_message)


def test_a_retry_generates_the_errors_alone(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one", "REFUSE", None]})
    run_chunk(store, job, script)
    store.jobs.finalize_if_done(job.id)
    assert store.jobs.retry_failed(job.id) == 1
    script.refuse = "nothing"
    script.requests.clear()
    assert run_chunk(store, job, script).status is ChunkStatus.DONE
    assert len(script.requests) == 1
    assert {row: result.error_code for (row, _), result in results(store, job).items()} == {
        0: None,
        1: None,
        2: "null_prompt",
    }


def test_chunks_in_flight_share_one_engine(
    store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    job = make_job(store, tmp_path, {"prompt": [f"{place}" for place in range(300)]}, chunk_rows=50)
    hosts, stop = EngineHosts(script.factory), threading.Event()
    runs = [
        pool.submit(process_chunk, store, hosts, job, claim(store, job), worker_id="test", stop=stop) for _ in range(6)
    ]
    assert {run.result().status for run in runs} == {ChunkStatus.DONE}
    hosts.close()
    assert len(script.loaded) == 1
    assert texts(store, job) == {row: str(row) for row in range(300)}


def test_the_models_and_the_speculator_of_a_job_are_noted(store: Store, tmp_path: Path, script: Script) -> None:
    job = make_job(store, tmp_path, {"prompt": PROMPTS}, chunk_rows=5)
    run_chunk(store, job, script)
    run_chunk(store, job, script)
    (model,) = store.telemetry.models(job.id)
    assert (model["role"], model["name"], model["content_hash"]) == ("target", "fake", "0")
    (speculator,) = store.telemetry.speculators(job.id)
    assert speculator["method"] == "none"
