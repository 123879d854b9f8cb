"""Where input files are: local paths, globs, directories, and URLs of any fsspec or pyarrow file system."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.implementations.arrow import ArrowFSWrapper

from storage.errors import InputNotFound
from storage.files.conversion import remedy
from storage.suggest import nearest

SUFFIXES = (".parquet", ".parq", ".pq")
"""In any case: X.PARQUET as well."""
_PARTITION = re.compile(r"([A-Za-z_]\w*)=(.*)")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """An input file, and what the folders that it lies in say of its rows."""

    path: str
    partitions: dict[str, str | None] = field(default_factory=dict)
    """Folders named key=value (Hive's way) below the directory, or the fixed part of the glob, that was named."""


@dataclass(frozen=True, slots=True)
class Listing:
    files: tuple[ListedFile, ...]
    skipped: tuple[str, ...]
    """Files of the directories that are not read: no Parquet by their name, or hidden."""


def list_files(paths: Sequence[str]) -> list[str]:
    """The paths of `find_files`."""
    return [file.path for file in find_files(paths).files]


def find_files(paths: Sequence[str]) -> Listing:
    """The Parquet files under these paths: files, globs and directories (all levels down), local or URLs.

    Each path's files are sorted by name; a file that is named twice comes once. Local files come as absolute paths.
    Names that begin with "_" or "." inside a directory are left out. Raises `InputNotFound`, naming the path.
    """
    found: dict[str, ListedFile] = {}
    skipped: dict[str, None] = {}
    for path in paths:
        names, root, others = _remote_files(path) if is_url(path) else _local_files(path)
        for name in names:
            found.setdefault(name, ListedFile(name, _partitions(name, root)))
        skipped.update(dict.fromkeys(others))
    return Listing(tuple(found.values()), tuple(name for name in skipped if name not in found))


_Matches = tuple[list[str], str | None, list[str]]
"""Files that are read, the folder below which folders may be partitions (None: there are none), and files left out."""


def _partitions(path: str, root: str | None) -> dict[str, str | None]:
    if root is None or not path.startswith(root):
        return {}
    pairs = (_PARTITION.fullmatch(folder) for folder in path[len(root) :].split("/")[:-1])
    values = {match[1]: unquote(match[2]) for match in pairs if match is not None}
    return {key: None if value == _HIVE_NULL else value for key, value in values.items()}


def stat(path: str) -> tuple[int, str]:
    """Size in bytes, and what changes when the file does: mtime in nanoseconds, or the object's etag."""
    if not is_url(path):
        try:
            info = Path(path).stat()
        except OSError as error:
            raise InputNotFound(f"cannot read {path}: {error.strerror}") from error
        return info.st_size, str(info.st_mtime_ns)
    filesystem, inner = _filesystem(path)
    try:
        info = filesystem.info(inner)
    except FileNotFoundError as error:
        raise InputNotFound(f"there is no file {path}") from error
    version = next((info[key] for key in ("ETag", "etag", "mtime", "LastModified", "created") if info.get(key)), "")
    return int(info["size"]), str(version)


def shown_versions(path: str, was: str, now: str) -> tuple[str, str]:
    """Two versions of a file, as `stat` gives them, for a reader: times in UTC, with as many digits of the second as
    tell them apart; an etag as it is."""
    times = _nanoseconds(path, was), _nanoseconds(path, now)
    if times[0] is None or times[1] is None:
        return was, now
    texts = [(_utc(times[0], digits), _utc(times[1], digits)) for digits in (0, 3, 6, 9)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[0])


def _nanoseconds(path: str, version: str) -> int | None:
    """The time that a version is: fsspec gives it in seconds, with a fraction; None for an etag."""
    if not is_url(path):
        return int(version)
    return int(Decimal(version) * 10**9) if re.fullmatch(r"\d+\.\d+", version) else None


def _utc(nanoseconds: int, digits: int) -> str:
    """`2025-01-02 03:04:05.123 UTC`, cut off after so many digits of the second."""
    seconds, fraction = divmod(nanoseconds, 10**9)
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    return f"{time:%Y-%m-%d %H:%M:%S}" + (f".{fraction:09}"[: digits + 1] if digits else "") + " UTC"


def shown_size(num_bytes: int) -> str:
    """`1,234 bytes`: exact, since two sizes may differ by one."""
    return f"{num_bytes:,} bytes"


def arrow_filesystem(path: str) -> tuple[pafs.FileSystem, str]:
    """The pyarrow file system of a path or URL, and the path in it."""
    if not is_url(path):
        return pafs.LocalFileSystem(), path
    filesystem, inner = _filesystem(path)
    return pafs.PyFileSystem(_handler(filesystem)), inner


def _handler(filesystem: Any) -> Any:
    # pyarrow's annotations take the class for abstract.
    handler: Any = pafs.FSSpecHandler
    return handler(filesystem)


@lru_cache(maxsize=64)
def _filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it; pyarrow's own where fsspec lacks the driver."""
    try:
        filesystem, inner = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        try:
            arrow, inner = pafs.FileSystem.from_uri(url)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as second:
            raise InputNotFound(f"cannot open {url}: {error}; {second}") from error
        filesystem = ArrowFSWrapper(arrow)
    return filesystem, inner


def is_url(path: str) -> bool:
    return "://" in path


def _local_files(path: str) -> _Matches:
    place = Path(path).expanduser()
    if place.is_file():
        return [str(place.absolute())], None, []
    if place.is_dir():
        entries = sorted(file for file in place.rglob("*") if file.is_file())
        inside = [str(file.absolute()) for file in entries if _is_data(file.relative_to(place))]
        others = [str(file.absolute()) for file in entries if not _is_data(file.relative_to(place))]
        if inside:
            return inside, str(place.absolute()), others
        near = next((advice for other in others if (advice := remedy(other))), "")
        raise InputNotFound(f"the directory {path} holds no {', '.join(SUFFIXES)} file{near}")
    if glob.has_magic(path):
        # Path.glob has no absolute patterns.
        matches = sorted(name for name in glob.glob(str(place), recursive=True) if Path(name).is_file())  # noqa: PTH207
        if matches:
            return [str(Path(name).absolute()) for name in matches], _fixed_part(str(place.absolute())), []
        raise InputNotFound(f"no file matches {path}")
    raise InputNotFound(f"there is no file or directory {path}{_near(place)}")


def _fixed_part(pattern: str) -> str:
    """The folders of a glob up to the first that has a wildcard."""
    return "/".join(takewhile(lambda folder: not glob.has_magic(folder), pattern.split("/")[:-1]))


def _near(place: Path) -> str:
    names = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = nearest(place.name, names)
    return f"; did you mean {place.parent / near}?" if near else ""


def _is_data(relative: Path) -> bool:
    return relative.suffix.lower() in SUFFIXES and not any(part.startswith(("_", ".")) for part in relative.parts)


def _remote_files(url: str) -> _Matches:
    filesystem, inner = _filesystem(url)
    root: str | None = None
    others: list[str] = []
    if glob.has_magic(inner):
        matches = sorted(filesystem.glob(inner))
        root = _fixed_part(inner)
    elif filesystem.isdir(inner):
        root = inner.rstrip("/")
        names = sorted(filesystem.find(inner))
        matches = [name for name in names if _is_data(Path(name.removeprefix(f"{root}/")))]
        others = [name for name in names if not _is_data(Path(name.removeprefix(f"{root}/")))]
    else:
        matches = [inner] if filesystem.exists(inner) else []
    if not matches:
        raise InputNotFound(f"no Parquet file under {url}")
    scheme = url.split("://", 1)[0]
    return (
        [_with_scheme(name, scheme) for name in matches],
        None if root is None else _with_scheme(root, scheme),
        [_with_scheme(name, scheme) for name in others],
    )


def _with_scheme(name: str, scheme: str) -> str:
    return name if is_url(name) else f"{scheme}://{name.lstrip('/') if scheme != 'file' else name}"
