"""Which process a worker is, and who may say that it has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from storage.processes import ProcessIdentity, has_ended, this_process
from storage.store.store import Store
from tests.support.records import add_job, claim

PROGRAM = (
    "import dataclasses, json, sys; from storage.processes import this_process;"
    "print(json.dumps(dataclasses.asdict(this_process())), flush=True); sys.stdin.read()"
)


def started() -> tuple[subprocess.Popen[str], ProcessIdentity]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, ProcessIdentity(**json.loads(process.stdout.readline()))


@pytest.mark.skipif(sys.platform != "linux", reason="PID namespaces are Linux's")
def test_a_process_is_known_by_kernel_namespace_number_and_start() -> None:
    me = this_process()
    assert None not in (me.boot_id, me.pid_namespace, me.start)
    assert not has_ended(me, me)
    child, identity = started()
    others = {
        "a later process has its number": (replace(identity, start="1"), True),
        "another machine, or the one before its restart": (replace(identity, boot_id="other"), False),
        "another container": (replace(identity, pid_namespace="pid:[1]"), False),
        "an older version did not say": (ProcessIdentity(identity.hostname, identity.pid), False),
    }
    assert {what: has_ended(other, me) for what, (other, _) in others.items()} == {
        what: ended for what, (_, ended) in others.items()
    }
    assert not has_ended(identity, me)
    child.kill()
    while not has_ended(identity, me):  # a zombie until it is collected
        assert child.returncode is None
    child.communicate()
    assert has_ended(identity, me)


def test_the_leases_of_dead_neighbours_end_and_others_are_left(store: Store) -> None:
    me, job = this_process(), add_job(store, num_rows=20)
    dead, elsewhere = replace(me, start="1"), replace(me, start="1", pid_namespace="pid:[1]")
    for name, process in (("me", me), ("dead", dead), ("elsewhere", elsewhere)):
        store.telemetry.worker_seen(name, process)
    chunks = {name: claim(store, job, name).id for name in ("me", "dead", "elsewhere", "unknown")}
    assert store.reaper.expire_dead_workers() == 1
    assert [chunk.id for chunk in store.reaper.reap().released] == [chunks["dead"]]
    assert {worker.worker_id for worker in store.telemetry.workers()} == {"me", "elsewhere"}


def test_who_works_on_a_job(store: Store) -> None:
    job, other = add_job(store), add_job(store, "other")
    assert store.telemetry.activity(job.id).nobody
    store.telemetry.worker_seen("run of other", this_process(), other.id)
    assert store.telemetry.activity(job.id).nobody
    store.telemetry.worker_seen("run", this_process(), job.id)
    assert store.telemetry.activity(job.id).num_workers == 1
    store.telemetry.worker_seen("worker", this_process())
    assert store.telemetry.activity(job.id).num_workers == 2
    chunk = claim(store, job)
    assert store.telemetry.activity(job.id).num_chunks == 1
    store.chunks.expire_leases("worker")
    assert store.telemetry.activity(job.id).num_chunks == 0
    assert chunk.job_id == job.id
