"""Where what can be made again is kept: compiled kernels, converted models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$NIGHTDRAFT_CACHE, else nightdraft/ in the user's cache directory. Delete it at any time."""
    if chosen := os.environ.get("NIGHTDRAFT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightdraft"
