"""Leases while the store is out of reach, and writes that outlast an outage."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from storage.errors import StoreUnavailable
from storage.retry import patiently
from storage.store.chunks import Heartbeat
from storage.store.room import Room
from storage.store.store import Store
from tests.support.fake_engine import Script
from tests.support.jobs import claim, make_job, run_chunk, texts
from workers.chunks.chunk import ChunkStatus
from workers.chunks.lease import LeaseKeeper

DOWN = StoreUnavailable("the database is starting up")


def outage(times: int, monkeypatch: pytest.MonkeyPatch, room: Room, method: str) -> list[str]:
    """Make a method of a room of the store fail so many times; returns the list in which every call is noted."""
    real, calls = getattr(room, method), []

    def failing(*args: object) -> object:
        calls.append(method)
        if len(calls) <= times:
            raise DOWN
        return real(*args)

    monkeypatch.setattr(room, method, failing)
    return calls


def test_a_lease_survives_an_outage_that_is_shorter(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = claim(store, make_job(store, tmp_path, {"prompt": ["one"]}))
    calls = outage(1, monkeypatch, store.chunks, "heartbeat")
    with LeaseKeeper(store, chunk.lease, 1.5) as lease:
        while len(calls) < 3:
            time.sleep(0.05)
        assert not lease.lost


def test_a_lease_is_lost_with_an_outage_that_is_longer(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = claim(store, make_job(store, tmp_path, {"prompt": ["one"]}))
    outage(10**6, monkeypatch, store.chunks, "heartbeat")
    with LeaseKeeper(store, chunk.lease, 0.3) as lease:
        while not lease.lost:
            time.sleep(0.05)


def test_a_lease_hears_that_the_job_is_being_cancelled(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = claim(store, make_job(store, tmp_path, {"prompt": ["one"]}))
    monkeypatch.setattr(store.chunks, "heartbeat", lambda *_: Heartbeat(alive=True, cancel_requested=True))
    with LeaseKeeper(store, chunk.lease, 0.1) as lease:
        while not lease.cancelled:
            time.sleep(0.02)
        assert not lease.lost


@pytest.mark.parametrize(("room", "method"), [("results", "recorded"), ("results", "write"), ("chunks", "finish")])
def test_a_chunk_outlasts_an_outage(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, method: str
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one", "two"]})
    outage(2, monkeypatch, getattr(store, room), method)
    assert run_chunk(store, job, Script()).status is ChunkStatus.DONE
    assert texts(store, job) == {0: "ONE", 1: "TWO"}


def test_patience_ends_when_it_is_told_to() -> None:
    def call() -> None:
        raise DOWN

    with pytest.raises(StoreUnavailable):
        patiently(call, lambda: True)
