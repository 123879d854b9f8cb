"""Where what can be made again is kept: compiled kernels, converted models."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path


def cache_directory() -> Path:
    """$NIGHTDRAFT_CACHE, else nightdraft/ in the user's cache directory. Delete it at any time."""
    if chosen := os.environ.get("NIGHTDRAFT_CACHE"):
        return Path(chosen).expanduser()
    return user_cache_path("nightdraft", appauthor=False)


def make_cache(folder: Path) -> None:
    """Make a folder in the cache. Raises `OSError`.

    The cache itself is for its owner alone, since others could put code into it; one that is there stays as it is.
    """
    root = cache_directory()
    if folder.is_relative_to(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            root.mkdir(0o700)
    folder.mkdir(parents=True, exist_ok=True)
