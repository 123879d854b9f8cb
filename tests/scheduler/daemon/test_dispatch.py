from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.daemon.dispatch import Dispatcher
from scheduler.errors import BrokerUnavailable
from storage.records import ChunkState
from storage.store.store import Store
from tests.support.records import IN_FLIGHT
from tests.support.submissions import MemoryPublisher, submitted, work_off, write_prompts


@pytest.fixture
def job_id(store: Store, tmp_path: Path) -> str:
    """Ten chunks of one row."""
    return submitted(store, write_prompts(tmp_path / "prompts.parquet", 10), chunk_rows=1).job.id


@pytest.fixture
def broker() -> MemoryPublisher:
    return MemoryPublisher()


def dispatcher(
    store: Store, broker: MemoryPublisher, *, job_id: str | None = None, window: int = 4, lost_seconds: float = 3600.0
) -> Dispatcher:
    return Dispatcher(store, broker, job_id=job_id, window=window, lost_seconds=lost_seconds)


def states(store: Store, job_id: str) -> dict[ChunkState, int]:
    return {state: count for state, count in store.jobs.progress(job_id).chunks.items() if count}


def test_no_more_than_the_window_is_dispatched(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    fill = dispatcher(store, broker).step
    assert (fill(), fill()) == (True, False)
    assert states(store, job_id) == {ChunkState.PENDING: 6, ChunkState.DISPATCHED: 4}
    work_off(store, broker.messages.popleft())
    assert fill()
    assert [message.chunk_id for message in broker.messages] == [chunk.id for chunk in store.chunks.of_job(job_id)[1:5]]


def test_a_claimed_chunk_makes_room(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    fill = dispatcher(store, broker).step
    fill()
    first = broker.messages.popleft()
    assert store.chunks.claim(first, "worker-1", 60.0)
    assert fill()
    assert states(store, job_id) == {ChunkState.PENDING: 5, ChunkState.DISPATCHED: 4, ChunkState.RUNNING: 1}


def test_one_job_only(store: Store, job_id: str, broker: MemoryPublisher, tmp_path: Path) -> None:
    other = submitted(store, write_prompts(tmp_path / "other.parquet", 2), name="other", chunk_rows=1).job
    dispatcher(store, broker, job_id=other.id).step()
    assert [message.job_id for message in broker.messages] == [other.id] * 2


def test_a_publish_that_fails_leaves_the_rest_pending(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    broker.fail_after = 2
    with pytest.raises(BrokerUnavailable):
        dispatcher(store, broker).step()
    assert states(store, job_id) == {ChunkState.PENDING: 8, ChunkState.DISPATCHED: 2}
    broker.fail_after = None
    dispatcher(store, broker).step()
    assert states(store, job_id)[ChunkState.DISPATCHED] == 4


def test_two_schedulers_and_duplicates_do_no_harm(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    dispatcher(store, broker).step()
    broker.messages.extend(list(broker.messages))
    outcomes = [work_off(store, message) for message in broker.messages]
    assert outcomes == [True] * 4 + [False] * 4
    assert store.jobs.progress(job_id).counts.num_ok == 4


def test_lost_messages_are_published_again(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    dispatcher(store, broker, lost_seconds=0).step()
    broker.messages.clear()
    again = dispatcher(store, broker, lost_seconds=0)
    assert again.requeue_lost() == 4
    again.step()
    assert len(broker.messages) == 4
    assert all(work_off(store, message) for message in broker.messages)


def test_messages_that_wait_for_a_worker_are_not_lost(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    fill = dispatcher(store, broker, lost_seconds=0)
    fill.step()
    assert fill.requeue_lost() == 0
    for _ in range(5):
        fill.step()
    assert broker.published == 4


def test_what_was_dispatched_lately_is_not_lost_yet(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    fill = dispatcher(store, broker, lost_seconds=3600)
    fill.step()
    broker.messages.clear()
    assert fill.requeue_lost() == 0


def test_a_late_message_and_its_replacement_run_the_chunk_once(
    store: Store, job_id: str, broker: MemoryPublisher
) -> None:
    fill = dispatcher(store, broker, lost_seconds=0)
    fill.step()
    late = list(broker.messages)
    broker.messages.clear()
    fill.requeue_lost()
    fill.step()
    assert [work_off(store, message) for message in [*late, *broker.messages]] == [True] * 4 + [False] * 4


def test_a_cancelled_job_is_not_dispatched(store: Store, job_id: str, broker: MemoryPublisher) -> None:
    dispatcher(store, broker).step()
    store.jobs.cancel(job_id)
    assert not dispatcher(store, broker).step()
    assert not any(work_off(store, message) for message in broker.messages)
    assert store.chunks.of_job(job_id, IN_FLIGHT) == []


def test_messages_that_do_not_last_leave_their_chunks_to_others(store: Store, job_id: str) -> None:
    local = MemoryPublisher(lasting=False)
    fill = dispatcher(store, local, job_id=job_id).step
    assert (fill(), len(local.messages)) == (True, 4)
    assert states(store, job_id) == {ChunkState.PENDING: 10}
    assert work_off(store, local.messages.popleft())
    fill()
    assert [chunk.id for chunk in store.chunks.of_job(job_id)[1:5]] == [message.chunk_id for message in local.messages]


def test_what_a_broker_was_given_is_free_for_a_run_in_one_process(
    store: Store, job_id: str, broker: MemoryPublisher
) -> None:
    dispatcher(store, broker).step()
    local = MemoryPublisher(lasting=False)
    dispatcher(store, local, job_id=job_id, window=6).step()
    assert [message.chunk_id for message in local.messages][:4] == [message.chunk_id for message in broker.messages]
    assert work_off(store, local.messages[0])
    assert not work_off(store, broker.messages[0])
