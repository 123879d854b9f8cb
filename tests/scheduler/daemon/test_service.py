from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from scheduler import lifecycle
from scheduler.daemon.service import Scheduler
from storage.errors import StoreUnavailable
from storage.records import ChunkMessage, Job, JobState, Result, RowInHand, RowStatus
from storage.store.reaping import under_suspicion
from storage.store.store import Store
from tests.support.records import claim_next
from tests.support.services.proxy import Proxy
from tests.support.services.queues import broker_queue
from tests.support.submissions import MemoryPublisher, submitted, work_off, write_prompts

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def broker() -> MemoryPublisher:
    return MemoryPublisher()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(f"sqlite:///{tmp_path / 'store.db'}")


@pytest.fixture
def scheduler(store: Store, broker: MemoryPublisher) -> Scheduler:
    return Scheduler(store, broker, window=3, poll_seconds=0.01, lost_seconds=0.05)


def new_job(store: Store, tmp_path: Path, rows: int = 20, **fields: object) -> Job:
    name = str(fields.pop("name", "night"))
    path = write_prompts(tmp_path / name / "prompts.parquet", rows)
    return submitted(store, path, name=name, chunk_rows=fields.pop("chunk_rows", 2), **fields).job


async def work(store: Store, broker: MemoryPublisher, take: Callable[[int], bool] = lambda number: True) -> None:
    """A worker that forgets the messages for whose number `take` says no."""
    number = 0
    while True:
        await anyio.sleep(0.005)
        while broker.messages:
            message = broker.messages.popleft()
            number += 1
            if take(number):
                await anyio.to_thread.run_sync(work_off, store, message)


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await anyio.sleep(0.01)


async def test_a_job_is_served_to_its_end(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    job = new_job(store, tmp_path)
    async with anyio.create_task_group() as group:
        group.start_soon(work, store, broker)
        finished = await scheduler.run(job.id)
        group.cancel_scope.cancel()
    assert finished.state is JobState.COMPLETED
    assert store.jobs.progress(job.id).counts.num_ok == 20
    assert broker.closed


async def test_lost_messages_only_delay(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    job = new_job(store, tmp_path)
    async with anyio.create_task_group() as group:
        group.start_soon(work, store, broker, lambda number: number % 2 == 0)
        finished = await scheduler.run(job.id)
        group.cancel_scope.cancel()
    assert finished.state is JobState.COMPLETED
    assert store.jobs.progress(job.id).counts.num_ok == 20


async def test_a_broker_that_is_away_only_delays(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = new_job(store, tmp_path)
    broker.down = True
    async with anyio.create_task_group() as group:
        group.start_soon(work, store, broker)
        group.start_soon(scheduler.serve)
        await until(lambda: "trying again" in caplog.text)
        broker.down = False
        await until(lambda: store.jobs.get(job.id).state.terminal)
        group.cancel_scope.cancel()
    assert store.jobs.get(job.id).state is JobState.COMPLETED


async def test_a_database_that_is_away_only_delays(
    store: Store,
    broker: MemoryPublisher,
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = new_job(store, tmp_path)

    def away(*arguments: object) -> None:
        raise StoreUnavailable("the database system is starting up")

    async with anyio.create_task_group() as group:
        with monkeypatch.context() as patch:
            for room, name in ((store.chunks, "pending"), (store.reaper, "reap"), (store.jobs, "unfinished")):
                patch.setattr(room, name, away)
            await group.start(scheduler.serve)
            await until(lambda: "the database system is starting up; trying again" in caplog.text)
        group.start_soon(work, store, broker)
        await until(lambda: store.jobs.get(job.id).state is JobState.COMPLETED)
        group.cancel_scope.cancel()


async def test_dead_workers_lose_their_chunks_to_others(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    job = new_job(store, tmp_path)
    dead = claim_next(store, "dead", 0.01, job.id)
    assert dead is not None
    async with anyio.create_task_group() as group:
        group.start_soon(work, store, broker)
        finished = await scheduler.run(job.id)
        group.cancel_scope.cancel()
    assert finished.state is JobState.COMPLETED
    assert store.chunks.of_job(job.id)[0].attempts == 1


async def test_a_poison_row_is_recorded_and_the_rest_goes_on(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    job = new_job(store, tmp_path, rows=8, chunk_rows=8, max_attempts=2)
    poison = 5

    def work_or_die() -> None:
        message = broker.messages.popleft()
        chunk = store.chunks.claim(message, "mortal", 0.2)
        if chunk is None or not under_suspicion(chunk.attempts, 2):
            return
        if (poison, 0) in store.results.recorded(chunk):
            rest = [row for row in range(8) if row != poison]
            store.results.write(chunk.lease, [Result(row, 0, RowStatus.OK, output_text="x") for row in rest])
            assert store.chunks.finish(chunk.lease)
        else:
            store.chunks.take_in_hand(chunk.lease, RowInHand(poison))

    async def mortal_worker() -> None:
        while True:
            await anyio.sleep(0.005)
            while broker.messages:
                await anyio.to_thread.run_sync(work_or_die)

    async with anyio.create_task_group() as group:
        group.start_soon(mortal_worker)
        finished = await scheduler.run(job.id)
        group.cancel_scope.cancel()
    assert finished.state is JobState.COMPLETED
    assert [(error.row_index, error.error_code) for error in store.results.errors(job.id)] == [
        (poison, "worker_crashed")
    ]
    assert store.jobs.progress(job.id).counts.num_ok == 7


async def test_a_daemon_serves_all_jobs_and_ends_when_cancelled(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    jobs = [new_job(store, tmp_path, name=name) for name in ("a", "b")]
    async with anyio.create_task_group() as group:
        group.start_soon(work, store, broker)
        await group.start(scheduler.serve)
        jobs.append(new_job(store, tmp_path, name="later"))
        await until(lambda: all(store.jobs.get(job.id).state is JobState.COMPLETED for job in jobs))
        group.cancel_scope.cancel()
    assert broker.closed


async def test_a_cancelled_job_ends(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    job = new_job(store, tmp_path)
    async with anyio.create_task_group() as group:

        async def cancel_when_dispatched() -> None:
            await until(lambda: bool(broker.messages))
            await anyio.to_thread.run_sync(lifecycle.cancel, store, job.id)

        group.start_soon(cancel_when_dispatched)
        assert (await scheduler.run(job.id)).state is JobState.CANCELLED


async def test_a_hopeless_job_is_stopped(
    store: Store, broker: MemoryPublisher, scheduler: Scheduler, tmp_path: Path
) -> None:
    job = new_job(store, tmp_path, rows=4000, chunk_rows=200, max_error_rate=0.01)
    async with anyio.create_task_group() as group:

        async def work_badly() -> None:
            while True:
                await anyio.sleep(0.005)
                while broker.messages:
                    message = broker.messages.popleft()
                    await anyio.to_thread.run_sync(lambda: work_off(store, message, errors=200))  # noqa: B023

        group.start_soon(work_badly)
        finished = await scheduler.run(job.id)
        group.cancel_scope.cancel()
    assert (finished.state, finished.error_code) == (JobState.FAILED, "max_error_rate")
    assert store.jobs.progress(job.id).counts.num_errors < 4000


async def test_an_unexpected_error_is_logged_with_its_job_and_the_others_go_on(
    store: Store,
    broker: MemoryPublisher,
    scheduler: Scheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = (new_job(store, tmp_path, name=name) for name in ("bad", "good"))
    dead = [claim_next(store, "dead", 0.0, job.id) for job in (bad, good)]
    rooms: dict[str, object] = {"is_settled": store.jobs, "reap": store.reaper, "pending": store.chunks}
    broken = set(rooms)

    def break_for_the_bad_job(name: str) -> None:
        real = getattr(rooms[name], name)

        def call(*arguments: object, **named: object) -> object:
            if name in broken and (bad.id in (*arguments, *named.values()) or name == "pending"):
                raise RuntimeError(f"a bug in {name}")
            return real(*arguments, **named)

        monkeypatch.setattr(rooms[name], name, call)

    for name in tuple(broken):
        break_for_the_bad_job(name)
    async with anyio.create_task_group() as group:
        await group.start(scheduler.serve)
        await until(lambda: "a bug in pending" in caplog.text)
        broken.remove("pending")
        group.start_soon(work, store, broker)
        await until(lambda: store.jobs.get(good.id).state is JobState.COMPLETED)
        told = [record.getMessage() for record in caplog.records if record.exc_info]
        assert sum(bad.id in text for text in told) >= 2, told
        assert not any(good.id in text for text in told)
        assert len(told) < 20, "with growing pauses"
        broken.clear()
        await until(lambda: store.jobs.get(bad.id).state is JobState.COMPLETED)
        group.cancel_scope.cancel()
    assert all(dead)
    assert broker.closed


def test_a_window_without_a_chunk_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="window must be at least 1"):
        Scheduler(store, MemoryPublisher(), window=0)


@pytest.mark.service
@pytest.mark.parametrize("server", ["redis_url", "rabbitmq_url"])
async def test_a_real_broker_that_forgets_everything_only_delays(
    store: Store, tmp_path: Path, server: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    server_url = request.getfixturevalue(server)
    job = new_job(store, tmp_path)
    with broker_queue(server_url) as queue, Proxy(server_url) as network:
        scheduler = Scheduler(store, f"{network.url}?queue={queue.name}", poll_seconds=0.01, lost_seconds=0.2)

        def work_on(limit: int) -> None:
            for _ in range(limit):
                message = queue.get()
                if message is not None:
                    work_off(store, ChunkMessage(**message.payload[1]))
                    message.ack()

        async with anyio.create_task_group() as group:
            await group.start(scheduler.serve)
            await until(lambda: store.chunks.count_dispatched() == 10)
            await anyio.to_thread.run_sync(work_on, 3)
            network.cut()
            queue.purge()
            await until(lambda: "trying again" in caplog.text)
            network.mend()
            while not store.jobs.get(job.id).state.terminal:
                await anyio.to_thread.run_sync(work_on, 1)
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
    assert store.jobs.get(job.id).state is JobState.COMPLETED
    assert store.jobs.progress(job.id).counts.num_ok == 20
