"""`nightdraft` in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from runner.cli import app

TARGET = "scripted:eos_every=8"


class Cli:
    """Runs `nightdraft` in this process, in a directory and on a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = f"sqlite:///{folder / 'jobs.db'}"
        self._runner = CliRunner()

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        """Run a command and check its exit code."""
        result = self._runner.invoke(app, list(arguments), env={"NIGHTDRAFT_STORE": self.store, "COLUMNS": "200"})
        assert result.exit_code == code, (
            f"{arguments}: exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
        )
        return result

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run a command with --json and read what it prints on stdout."""
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def run(self, path: Path, *arguments: str, target: str = TARGET, code: int = 0) -> Any:
        """`nightdraft run` on the scripted model."""
        return self.json("run", str(path), "--target", target, "--max-tokens", "16", *arguments, code=code)
