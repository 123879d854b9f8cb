"""Where input files are: local paths, globs, directories, and URLs of any fsspec or pyarrow file system."""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.implementations.arrow import ArrowFSWrapper

from storage.errors import InputNotFound

SUFFIXES = (".parquet", ".parq", ".pq")


def list_files(paths: Sequence[str]) -> list[str]:
    """The Parquet files under these paths: files, globs and directories (all levels down), local or URLs.

    Each path's files are sorted by name; a file that is named twice comes once. Local files come as absolute paths.
    Names that begin with "_" or "." inside a directory are left out. Raises `InputNotFound`, naming the path.
    """
    found: dict[str, None] = {}
    for path in paths:
        matches = _remote_files(path) if is_url(path) else _local_files(path)
        found.update(dict.fromkeys(matches))
    return list(found)


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


def _local_files(path: str) -> list[str]:
    place = Path(path).expanduser()
    if place.is_file():
        return [str(place.absolute())]
    if place.is_dir():
        inside = sorted(file for file in place.rglob("*") if file.is_file() and _is_data(file.relative_to(place)))
        if inside:
            return [str(file.absolute()) for file in inside]
        raise InputNotFound(f"the directory {path} holds no {', '.join(SUFFIXES)} file")
    if glob.has_magic(path):
        # Path.glob has no absolute patterns.
        matches = sorted(name for name in glob.glob(str(place), recursive=True) if Path(name).is_file())  # noqa: PTH207
        if matches:
            return [str(Path(name).absolute()) for name in matches]
        raise InputNotFound(f"no file matches {path}")
    raise InputNotFound(f"there is no file or directory {path}{_near(place)}")


def _near(place: Path) -> str:
    names = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, names, n=1)
    return f"; did you mean {place.parent / near[0]}?" if near else ""


def _is_data(relative: Path) -> bool:
    return relative.suffix in SUFFIXES and not any(part.startswith(("_", ".")) for part in relative.parts)


def _remote_files(url: str) -> list[str]:
    filesystem, inner = _filesystem(url)
    if glob.has_magic(inner):
        matches = sorted(filesystem.glob(inner))
    elif filesystem.isdir(inner):
        root = inner.rstrip("/") + "/"
        matches = sorted(name for name in filesystem.find(inner) if _is_data(Path(name.removeprefix(root))))
    else:
        matches = [inner] if filesystem.exists(inner) else []
    if not matches:
        raise InputNotFound(f"no Parquet file under {url}")
    scheme = url.split("://", 1)[0]
    return [
        name if is_url(name) else f"{scheme}://{name.lstrip('/') if scheme != 'file' else name}" for name in matches
    ]
