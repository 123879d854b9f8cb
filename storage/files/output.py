"""Writing files that may not fit: whatever goes wrong on the way is one sentence, with what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.errors import OutputFailed

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `OutputFailed` for what the block's writing to `path` fails with. Only put writing into the block."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(_sentence(path, error)) from error


def _sentence(path: Path, error: OSError) -> str:
    if error.errno not in _NO_SPACE:
        return f"{path} cannot be written: {error.strerror or error}"
    return (
        f"{path} cannot be written: no space is left ({_free(path.parent)} free in {path.parent}); free some, or name a"
        " file on another disk, and write it again: the results are in the store, and nothing of this file stays"
    )


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB"
    except OSError:
        return "nothing known to be"
