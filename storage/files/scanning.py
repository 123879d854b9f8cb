"""Reading rows of Parquet files in bounded memory, past damaged places."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import InputChanged, NotParquet
from storage.files.locations import arrow_filesystem, is_url, stat
from storage.files.parquet import BUFFER, open_parquet

IDLE_READERS = 6
"""Open files kept between calls, so that chunks read in order do not decode a row group from its start each time."""
BATCH_BYTES = 64 << 20
"""Decoded bytes that a batch holds at most, where what the file says about its columns allows to tell."""
CAREFUL_ROWS = 8
"""Rows of a batch in a row group that is too large to tell: long values may stand side by side anywhere in it."""

_DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_INT32_FIELD = 0x15
_HEADER_START = 16


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Rows of which at least one column cannot be decoded: their page, or one before it in their row group, is broken.

    What a reader decodes of a row group it decodes from the group's start, so that a damaged page takes the rest of its
    column in that row group with it; all of it, if values are missing.
    """

    rows: pa.RecordBatch
    """The rows as far as they can be read: null in the columns that cannot."""
    columns: tuple[str, ...]
    reason: str


def read_rows(
    path: str, file_row: int, num_rows: int, columns: Sequence[str] | None = None, batch_rows: int = 64
) -> Iterator[pa.RecordBatch | Unreadable]:
    """Rows `file_row` to `file_row + num_rows - 1` of a file, in order, at most `batch_rows` at a time.

    The columns come as asked for; None reads all. Batches have fewer rows where rows are large, so that memory is
    bounded by a few pages and `BATCH_BYTES`, or a single row. A read that starts where an earlier one ended goes on
    from there. Rows that are damaged come as `Unreadable`, the others of the file as they are. Raises `InputNotFound`,
    `NotParquet` when the file itself cannot be read, and `InputChanged` when it has fewer rows.
    """
    key = (path, *stat(path), None if columns is None else tuple(columns), batch_rows)
    reader = _pool.take(key, file_row) or _open_reader(path, columns, batch_rows, file_row)
    try:
        yield from reader.read(file_row, num_rows)
    except (pa.ArrowException, OSError) as error:
        reader.close()
        raise NotParquet(f"{path} cannot be read at row {reader.position}: {error}") from error
    except BaseException:
        reader.close()
        raise
    _pool.put(key, reader)


def _open_reader(path: str, columns: Sequence[str] | None, batch_rows: int, file_row: int) -> _Reader:
    try:
        return _Reader(path, columns, batch_rows, file_row)
    except pa.ArrowException as error:
        raise NotParquet(f"{path} cannot be read: {error}") from error


class _Reader:
    """An open file and the place up to which its rows were taken."""

    def __init__(self, path: str, columns: Sequence[str] | None, batch_rows: int, file_row: int) -> None:
        self.path = path
        self.file = open_parquet(path)
        self.columns = list(self.file.schema_arrow.names if columns is None else columns)
        self.batch_rows = batch_rows
        self.group, self.position = self._group_of(file_row)
        self.batches: Iterator[pa.RecordBatch | Unreadable] = iter(())
        self.rest: pa.RecordBatch | Unreadable | None = None

    def read(self, file_row: int, num_rows: int) -> Iterator[pa.RecordBatch | Unreadable]:
        end = file_row + num_rows
        while self.position < end:
            batch = self._next(end)
            length = _num_rows(batch)
            skipped = max(file_row - self.position, 0)
            kept = min(length, end - self.position)
            self.rest = _slice(batch, kept, length) if kept < length else None
            self.position += kept
            if skipped < kept:
                yield _slice(batch, skipped, kept)

    def close(self) -> None:
        self.file.close()

    def _next(self, end: int) -> pa.RecordBatch | Unreadable:
        if self.rest is not None:
            return self.rest
        while (batch := next(self.batches, None)) is None:
            if self.group == self.file.metadata.num_row_groups:
                raise InputChanged(f"{self.path} has {self.position} rows, rows up to {end} were planned: it changed")
            self.batches = self._of_group(self.group)
            self.group += 1
        return batch

    def _of_group(self, group: int) -> Iterator[pa.RecordBatch | Unreadable]:
        """All rows of a row group; from the first batch that cannot be decoded on, column by column."""
        metadata = self.file.metadata.row_group(group)
        size, read = 1, 0
        try:
            size = _batch_rows(self.path, metadata, self.batch_rows)
            for batch in self.file.iter_batches(size, row_groups=[group], columns=self.columns, use_threads=False):
                if read + batch.num_rows > metadata.num_rows:
                    break
                # Asking for "a" also gives a column named "a.b".
                yield batch.select(self.columns)
                read += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            if not _is_damage(self.path, error):
                raise
        if read < metadata.num_rows:
            yield from _salvage(self.path, self.file, group, self.columns, size, read)

    def _group_of(self, file_row: int) -> tuple[int, int]:
        """The row group that holds a row, and its first row."""
        metadata = self.file.metadata
        group, start = 0, 0
        while group < metadata.num_row_groups and start + metadata.row_group(group).num_rows <= file_row:
            start += metadata.row_group(group).num_rows
            group += 1
        return group, start


def _batch_rows(path: str, group: Any, most: int) -> int:
    """Rows of a row group that are decoded together, at most `most`, so that they stay below `BATCH_BYTES`.

    A column takes no more memory than its pages do, except that each row may repeat the longest value of a dictionary.
    """
    columns = [group.column(place) for place in range(group.num_columns)]
    pages = sum(column.total_uncompressed_size for column in columns)
    with_dictionary = [column for column in columns if not _DICTIONARY.isdisjoint(column.encodings)]
    repeated = sum(column.total_uncompressed_size * _per_row(column, group) for column in with_dictionary)
    if pages + most * repeated <= BATCH_BYTES:
        return most
    rows = BATCH_BYTES // max(_dictionary_bytes(path, group, with_dictionary), 1)
    if pages > BATCH_BYTES:
        rows = min(rows, CAREFUL_ROWS, BATCH_BYTES * max(group.num_rows, 1) // pages)
    return int(min(max(rows, 1), most))


def _per_row(column: Any, group: Any) -> int:
    """Values of a column in a row, on average: one, or those of a list."""
    return max(-(-int(column.num_values) // max(int(group.num_rows), 1)), 1)


def _dictionary_bytes(path: str, group: Any, columns: Sequence[Any]) -> int:
    """Bytes that a row takes if all its values are the longest of their column's dictionary, at most."""
    filesystem, inner = arrow_filesystem(path)
    total = 0
    with filesystem.open_input_file(inner) as source:
        for column in columns:
            found = None
            if column.has_dictionary_page:
                found = _page_bytes(source.read_at(_HEADER_START, column.dictionary_page_offset))
            total += (found or column.total_uncompressed_size) * _per_row(column, group)
    return total


def _page_bytes(header: bytes) -> int | None:
    """The decompressed size that a page header begins with, after the kind of page: Thrift's compact protocol, two
    32-bit fields in a row, each a tag (0x15) and a zigzag number of 7 bits a byte."""
    numbers: list[int] = []
    place = 0
    while len(numbers) < 2:
        if place >= len(header) or header[place] != _INT32_FIELD:
            return None
        number = shift = 0
        more = True
        while more and (place := place + 1) < len(header):
            number |= (header[place] & 0x7F) << shift
            shift += 7
            more = bool(header[place] & 0x80)
        numbers.append(number >> 1)
        place += 1
    return numbers[1]


def _is_damage(path: str, error: Exception) -> bool:
    """Whether the bytes of the file are wrong, rather than out of reach at the moment."""
    if isinstance(error, pa.ArrowException):
        return True
    # Arrow reports what it cannot decode as a plain OSError; a local disk reports a bad sector as EIO.
    return type(error) is OSError and error.errno in ((None,) if is_url(path) else (None, errno.EIO))


def _salvage(
    path: str, file: pq.ParquetFile, group: int, names: Sequence[str], size: int, skipped: int
) -> Iterator[pa.RecordBatch | Unreadable]:
    """The rows of a damaged row group from row `skipped` of it on, at most `size` at a time."""
    columns = [_Column(path, file, group, name, size) for name in names]
    first = 0
    try:
        for parts in zip(*(column.parts() for column in columns), strict=True):
            rows = pa.RecordBatch.from_arrays(list(parts), names=list(names))
            end = first + rows.num_rows
            inner = {skipped, *(column.broken_at for column in columns)}
            edges = [first, *sorted(edge for edge in inner if first < edge < end), end]
            for start, stop in pairwise(edges):
                if start >= skipped:
                    yield _told(columns, rows.slice(start - first, stop - start), start)
            first = end
    finally:
        for column in columns:
            column.close()


def _told(columns: Sequence[_Column], rows: pa.RecordBatch, start: int) -> pa.RecordBatch | Unreadable:
    broken = [column for column in columns if column.broken_at <= start]
    if not broken:
        return rows
    return Unreadable(rows, tuple(column.name for column in broken), broken[0].reason)


class _Column:
    """One column of a row group, read by itself as far as that goes."""

    def __init__(self, path: str, file: pq.ParquetFile, group: int, name: str, size: int) -> None:
        self.name = name
        self._path = path
        self._group = group
        self._size = size
        self._kind = file.schema_arrow.field(name).type
        self._num_rows = file.metadata.row_group(group).num_rows
        self.broken_at = self._num_rows
        """The first row of the group that cannot be read."""
        self.reason = ""
        self._file = open_parquet(path)
        self._require_all_rows()

    def close(self) -> None:
        self._file.close()

    def parts(self) -> Iterator[pa.Array]:
        """The values in parts of `size` rows; null from the first one that cannot be decoded on."""
        held: list[pa.Array] = []
        for piece in self._pieces():
            held.append(piece)
            if sum(map(len, held)) >= self._size:
                whole = pa.concat_arrays(held)
                yield whole.slice(0, self._size)
                held = [whole.slice(self._size)]
        if sum(map(len, held)):
            yield pa.concat_arrays(held)

    def _pieces(self) -> Iterator[pa.Array]:
        """The values in pieces of at most `size` rows."""
        start = 0
        if not self.broken_at:
            yield from self._nulls(0)
            return
        try:
            for piece in self._decoded(self._size):
                yield piece
                start += len(piece)
        except (pa.ArrowException, OSError) as error:
            self._require_damage(error)
            yield from self._single_rows(start)

    def _single_rows(self, start: int) -> Iterator[pa.Array]:
        """The values from row `start` on, one by one as long as they can be decoded."""
        done = start
        try:
            for row, value in enumerate(self._decoded(1)):
                if row >= start:
                    yield value
                    done += 1
        except (pa.ArrowException, OSError) as error:
            self._require_damage(error)
            self.broken_at, self.reason = done, " ".join(str(error).split())
            yield from self._nulls(done)

    def _nulls(self, start: int) -> Iterator[pa.Array]:
        for first in range(start, self._num_rows, self._size):
            yield pa.nulls(min(self._size, self._num_rows - first), self._kind)

    def _require_all_rows(self) -> None:
        """Give the whole column up if it has another number of values than there are rows: nobody knows whose are
        missing."""
        count = 0
        try:
            count = sum(map(len, self._decoded(self._size)))
        except (pa.ArrowException, OSError) as error:
            self._require_damage(error)  # where that is comes to light while the rows are read
            return
        if count != self._num_rows:
            self.broken_at, self.reason = 0, f"its pages hold {count} of {self._num_rows} values"

    def _decoded(self, size: int) -> Iterator[pa.Array]:
        for batch in self._file.iter_batches(size, row_groups=[self._group], columns=[self.name], use_threads=False):
            yield batch.column(self.name)

    def _require_damage(self, error: Exception) -> None:
        """Raise the error again if it is one of reaching the file: its bytes have to arrive to be called broken."""
        if not _is_damage(self._path, error):
            raise error
        if is_url(self._path):
            self._read_raw()

    def _read_raw(self) -> None:
        group = self._file.metadata.row_group(self._group)
        filesystem, inner = arrow_filesystem(self._path)
        with filesystem.open_input_file(inner) as source:
            for place in range(group.num_columns):
                column = group.column(place)
                if column.path_in_schema.split(".")[0] == self.name.split(".")[0]:
                    start = column.dictionary_page_offset or column.data_page_offset
                    for offset in range(start, start + column.total_compressed_size, BUFFER):
                        source.read_at(min(BUFFER, start + column.total_compressed_size - offset), offset)


def _num_rows(batch: pa.RecordBatch | Unreadable) -> int:
    return int((batch.rows if isinstance(batch, Unreadable) else batch).num_rows)


def _slice(batch: pa.RecordBatch | Unreadable, start: int, end: int) -> pa.RecordBatch | Unreadable:
    if isinstance(batch, Unreadable):
        return Unreadable(batch.rows.slice(start, end - start), batch.columns, batch.reason)
    return batch.slice(start, end - start)


class _ReaderPool:
    """Readers that nobody uses at the moment, the longest unused first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[Any, ...], _Reader]] = []

    def take(self, key: tuple[Any, ...], file_row: int) -> _Reader | None:
        """The idle reader of that file that has the least to skip."""
        with self._lock:
            fitting = [entry for entry in self._idle if entry[0] == key and entry[1].position <= file_row]
            if not fitting:
                return None
            best = max(fitting, key=lambda entry: entry[1].position)
            self._idle.remove(best)
            return best[1]

    def put(self, key: tuple[Any, ...], reader: _Reader) -> None:
        with self._lock:
            self._idle.append((key, reader))
            dropped = [] if len(self._idle) <= IDLE_READERS else [self._idle.pop(0)]
        for _, old in dropped:
            old.close()


_pool = _ReaderPool()
