"""A network that can be cut: a TCP proxy in front of a broker."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Proxy:
    """Forwards a local port to a server until `cut`; `mend` lets new connections through again."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or (6379 if parts.scheme == "redis" else 5672))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = True
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        port = self._listener.getsockname()[1]
        credentials = f"{parts.username}:{parts.password}@" if parts.username else ""
        self.url = f"{parts.scheme}://{credentials}127.0.0.1:{port}{parts.path}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            self._open = False
            pairs, self._pairs = self._pairs, []
        for one in pairs:
            _close(one)

    def mend(self) -> None:
        with self._lock:
            self._open = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._open:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                self._pairs += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _close(sink)


def _close(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
