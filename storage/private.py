"""Files that hold prompts and answers: made for their owner alone, unless somebody asks for more.

Only what is made here has these permissions; what is there already keeps its own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO, Any

from storage.errors import UnusableOutput

VARIABLE = "NIGHTDRAFT_FILE_MODE"
"""Environment variable with the permissions of new files, in octal digits; the umask is taken off them."""
DEFAULT_MODE = 0o600


def file_mode() -> int:
    """Permissions of a new file. Raises `UnusableOutput` for a variable that is no such number."""
    text = os.environ.get(VARIABLE)
    if not text:
        return DEFAULT_MODE
    if not re.fullmatch(r"(0o?)?[0-7]{3}", text) or int(text[-3:], 8) & 0o600 != 0o600:
        raise UnusableOutput(
            f"{VARIABLE}={text}: give three octal digits that let the owner read and write, as in 0640"
        )
    return int(text[-3:], 8)


def make_file(path: Path) -> None:
    """An empty file, if there is none."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, file_mode()))


def open_file(path: Path, mode: str, **options: Any) -> IO[Any]:
    """`path.open(mode)` for writing; a file that is new is made for its owner alone."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, file_mode()), **options)


def make_folder(folder: Path) -> None:
    """A folder, if there is none, and those above it; new ones can be entered by those who may read files in them."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    mode = file_mode()
    for new in reversed(missing):
        new.mkdir(mode | (mode & 0o444) >> 2, exist_ok=True)
    folder.mkdir(exist_ok=True)
