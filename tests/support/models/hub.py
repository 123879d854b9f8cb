"""A model hub on this machine, as far as downloads need one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest


@contextmanager
def serve_hub(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A hub that has one model, someone/some-model; yields the paths that it was asked for, whole files and headers."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, model, asked))
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    COMMIT = "0" * 40

    def __init__(self, model: Path, asked: list[str], *arguments: Any) -> None:
        self._model, self._asked = model, asked
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        ranged = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self._asked.append(f"{self.path} {ranged[0]}" if ranged else self.path)
        _, _, name = self.path.partition(f"/resolve/{self.COMMIT}/")
        if name:
            if not (self._model / name).is_file():
                return self._missing()
            body = (self._model / name).read_bytes()
            if ranged:
                body = body[int(ranged[1]) : int(ranged[2]) + 1]
        else:
            files = [path for path in self._model.rglob("*") if path.is_file()]
            names = [(str(path.relative_to(self._model)), path.stat().st_size) for path in files]
            tree = [{"type": "file", "path": name, "size": size, "oid": name} for name, size in names]
            siblings = [{"rfilename": name} for name, _ in names]
            about = {"id": "someone/some-model", "sha": self.COMMIT, "siblings": siblings}
            body = json.dumps(tree if "/tree/" in self.path else about).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body)}"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        return body

    def _missing(self) -> bytes:
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return b""

    def log_message(self, *arguments: Any) -> None:
        pass
