"""The one engine of a process, shared by its chunks and replaced when a job needs another or when it broke."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage.retry import LOOK_SECONDS
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import EngineError
from workers.errors import GaveUp, LoadFailed
from workers.hosting.host import EngineHost
from workers.hosting.interface import EngineFactory, real_engine
from workers.line import Line

log = logging.getLogger(__name__)


class EngineHosts:
    """Hands out the process's engine. Chunks of one engine section share it; a chunk with another section waits until
    they are through, and those that come after it wait behind it, so that nobody starves."""

    def __init__(self, factory: EngineFactory = real_engine) -> None:
        self.before_stop: Callable[[EngineHost], None] = lambda host: None
        """Called with every engine that was loaded, before it is stopped or replaced, a broken one too."""
        self._factory = factory
        self._line = Line()
        self._slot: _Slot | None = None

    @contextmanager
    def use(self, config: EngineConfig, give_up: Callable[[], bool]) -> Iterator[EngineHost]:
        """A running engine of this configuration, for as long as the block runs.

        Raises the `EngineError` of loading the engine, `LoadFailed` for whatever else that raised, and `GaveUp` as soon
        as `give_up()` is true while waiting; a load that has begun goes on for those who come later.
        """
        slot = self._line.wait(lambda: self._join(config), give_up, "another engine was still in use")
        try:
            while not slot.ready.wait(LOOK_SECONDS):
                if give_up():
                    raise GaveUp("the engine was still loading")
            if slot.error is not None:
                raise slot.error
            yield slot.host
        finally:
            with self._line.changing():
                slot.users -= 1

    @property
    def running(self) -> EngineHost | None:
        """The engine, when one is loaded and works."""
        slot = self._slot
        return slot.host if slot is not None and slot.usable and slot.ready.is_set() else None

    @property
    def failed_loads(self) -> int:
        """Loads of the engine that was asked for last which failed one after another, the last one among them."""
        slot = self._slot
        return slot.tries if slot is not None and isinstance(slot.error, LoadFailed) else 0

    def close(self) -> None:
        """Stop the engine. Nobody may use it any more."""
        with self._line.changing():
            slot, self._slot = self._slot, None
        if slot is not None:
            slot.stop(self.before_stop)

    def _join(self, config: EngineConfig) -> _Slot | None:
        """A place at an engine of this configuration; None while another one is in use."""
        slot = self._slot
        if slot is None or not slot.usable or slot.host.config != config:
            if slot is not None and slot.users:
                return None
            slot = self._slot = _Slot(EngineHost(config, factory=self._factory), slot, self.before_stop)
        slot.users += 1
        return slot


class _Slot:
    """An engine host with the threads that use it. Loads in a thread of its own, so that waiting can be given up."""

    def __init__(self, host: EngineHost, replaces: _Slot | None, before_stop: Callable[[EngineHost], None]) -> None:
        self.host = host
        self.users = 0
        self.ready = threading.Event()
        self.error: Exception | None = None
        self.tries = 1
        if replaces is not None and isinstance(replaces.error, LoadFailed) and replaces.host.config == host.config:
            self.tries += replaces.tries
        threading.Thread(target=self._load, args=(replaces, before_stop), name="engine-load", daemon=True).start()

    @property
    def usable(self) -> bool:
        return self.error is None and not self.host.failed

    def stop(self, before_stop: Callable[[EngineHost], None]) -> None:
        self.ready.wait()
        if self.error is None:
            try:
                before_stop(self.host)
            finally:
                self.host.stop()

    def _load(self, replaces: _Slot | None, before_stop: Callable[[EngineHost], None]) -> None:
        try:
            if replaces is not None:
                _stop_replaced(replaces, before_stop)
            self.host.start()
        except EngineError as error:
            self.error = error
        except Exception as error:
            self.error = LoadFailed(" ".join(f"{type(error).__name__}: {error}".split()))
            self.error.__cause__ = error
        finally:
            self.ready.set()


def _stop_replaced(slot: _Slot, before_stop: Callable[[EngineHost], None]) -> None:
    """Free the old engine first: two may not fit into memory. One that broke may fail to stop; it is gone as well."""
    try:
        slot.stop(before_stop)
    except Exception:
        log.exception("the engine that is being replaced did not stop cleanly")
