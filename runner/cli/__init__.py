"""The `nightdraft` command. Commands import what they need when they run, so that `--help` and `status` stay quick."""

from __future__ import annotations

from runner.cli.app import app, main

__all__ = ["app", "main"]
