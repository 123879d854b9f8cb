"""A disk that can be filled."""

from __future__ import annotations

import shutil
from pathlib import Path


class SmallDisk:
    """A file system of a few megabytes, of which all but a little is taken by a filler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def leave(self, free: int) -> None:
        """Grow or shrink the filler so that so many bytes are free."""
        self._filler.unlink(missing_ok=True)
        self._filler.write_bytes(bytes(max(shutil.disk_usage(self.folder).free - free, 0)))

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path != self._filler)
