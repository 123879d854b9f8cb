"""`nightdraft doctor`: what this machine, the store and the broker look like, and what stands in the way."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runner.output.checks import Check, Level
from runner.stores import alive_workers, open_store
from scheduler.errors import BrokerUnavailable
from storage.errors import NoStore, StorageError
from storage.redaction import redacted
from storage.store.telemetry import ALIVE_SECONDS, WorkerInfo
from storage.wire import UnsupportedBroker

PACKAGES = ("torch", "transformers", "numba", "pyarrow", "sqlalchemy", "celery", "psycopg")
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")
LOW_DISK_BYTES = 2 * 2**30


def run_checks(store: str, broker: str | None) -> list[Check]:
    """Every check, in the order of the way that a job takes."""
    return [_python(), *_packages(), _cpu(), _attention(), _disk(store), *_store(store, broker), _broker(broker)]


def _python() -> Check:
    return Check(Level.OK, "python", f"{platform.python_version()} in {sys.prefix}")


def _packages() -> Iterator[Check]:
    found: list[str] = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Check(Level.BROKEN, f"package {name}", "not installed", f"pip install {name}")
    yield Check(Level.OK, "packages", ", ".join(found))


def _cpu() -> Check:
    import psutil

    flags = _cpu_flags()
    known = [flag for flag in CPU_FLAGS if flag in flags]
    memory = psutil.virtual_memory().available / 2**30
    found = f"{psutil.cpu_count()} cores, {memory:.1f} GiB free, {', '.join(known) or 'no known vector extension'}"
    if flags and not any(flag in flags for flag in BF16_FLAGS):
        return Check(Level.WARNING, "cpu", found, "bfloat16 is emulated here: --dtype float32 may be faster")
    return Check(Level.OK, "cpu", found)


def _cpu_flags() -> frozenset[str]:
    """Flags of the first core; empty where the system does not tell (not Linux on x86)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())


def _attention() -> Check:
    import torch

    from workers.engine.api.errors import EngineError
    from workers.engine.attention.interface import load_attention, resolve_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        name = resolve_attention("auto", device, torch.float32)
        load_attention(name)
    except (EngineError, ImportError) as error:
        return Check(Level.BROKEN, "attention", f"{device}: {error}", "reinstall with: pip install nightdraft")
    found = f"{name} on {device}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    if name != "numba" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return Check(
            Level.WARNING, "attention", found, "outputs are the same but for float noise: see docs/losslessness.md"
        )
    return Check(Level.OK, "attention", found)


def _disk(store: str) -> Check:
    folder = Path(store.removeprefix("sqlite:///")).expanduser().absolute().parent if _is_file(store) else Path.cwd()
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < LOW_DISK_BYTES:
        return Check(Level.WARNING, "disk", found, "make room: results, exports and converted models are written there")
    return Check(Level.OK, "disk", found)


def _is_file(store: str) -> bool:
    return "://" not in store or store.startswith("sqlite:///")


def _store(store: str, broker: str | None) -> list[Check]:
    """The store and the workers that it knows of; looking sets up none."""
    try:
        with open_store(store, create=False) as opened:
            return [Check(Level.OK, "store", opened.url), _workers(alive_workers(opened), broker)]
    except NoStore as error:
        return [Check(Level.OK, "store", str(error)), _workers([], broker)]
    except StorageError as error:
        return [Check(Level.BROKEN, "store", str(error), "see the message; --store or NIGHTDRAFT_STORE names another")]


def _workers(alive: list[WorkerInfo], broker: str | None) -> Check:
    if alive:
        return Check(Level.OK, "workers", ", ".join(f"{worker.hostname} (pid {worker.pid})" for worker in alive))
    if broker is None:
        return Check(Level.OK, "workers", "none; `nightdraft run` needs none")
    return Check(Level.WARNING, "workers", f"none seen in the last {ALIVE_SECONDS:g} s", "start one: nightdraft worker")


def _broker(broker: str | None) -> Check:
    if broker is None:
        return Check(Level.OK, "broker", "not set; `nightdraft run` needs none")
    from scheduler.daemon.publisher import CeleryPublisher

    try:
        publisher = CeleryPublisher(broker)
        try:
            waiting = publisher.waiting()
        finally:
            publisher.close()
    except UnsupportedBroker as error:
        return Check(Level.BROKEN, "broker", str(error), "--broker or NIGHTDRAFT_BROKER names another")
    except BrokerUnavailable as error:
        return Check(Level.BROKEN, "broker", str(error), "start it, or name another with --broker")
    return Check(Level.OK, "broker", f"{redacted(broker)}, {waiting} messages waiting")
