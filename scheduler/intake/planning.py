"""From Parquet metadata to chunks: contiguous row ranges of one file, without reading a single row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from scheduler.errors import InvalidJob
from scheduler.intake.dataset import Dataset
from storage.records import Chunk

CHUNK_ROWS = 256
"""Rows of a chunk unless the dataset is small or huge."""
MIN_CHUNK_ROWS = 16
SMALL_JOB_CHUNKS = 8
"""A small dataset is cut into about this many chunks, so that several workers share it."""
MAX_CHUNKS = 4096
"""A huge dataset is cut into about this many chunks: bookkeeping stays small whatever its size."""
MAX_CHUNKS_PER_ROW_GROUP = 1024
"""Reaching a chunk means skipping the rows of its row group before it, so a large row group gets larger chunks."""


def default_chunk_rows(dataset: Dataset) -> int:
    """Rows per chunk when the job does not say."""
    small = max(MIN_CHUNK_ROWS, -(-dataset.num_rows // SMALL_JOB_CHUNKS))
    largest_group = max(chain.from_iterable(file.row_groups for file in dataset.files), default=0)
    huge = max(-(-dataset.num_rows // MAX_CHUNKS), -(-largest_group // MAX_CHUNKS_PER_ROW_GROUP))
    return max(min(CHUNK_ROWS, small), huge)


def plan_chunks(dataset: Dataset, chunk_rows: int | None = None) -> Iterator[Chunk]:
    """Chunks of at most `chunk_rows` rows that cover the first `dataset.num_rows` rows in order, none empty.

    A chunk never crosses a file. It holds whole row groups where they fit, else equal parts of one row group. `id` and
    `job_id` are left for the submission to fill. Raises `InvalidJob`.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise InvalidJob(f"chunk_rows must be at least 1, got {chunk_rows}")
    return _chunks(dataset, chunk_rows or default_chunk_rows(dataset))


def _chunks(dataset: Dataset, size: int) -> Iterator[Chunk]:
    index = 0
    for file in dataset.files:
        for file_row, length in _ranges(file.row_groups, size):
            start_row = file.first_row + file_row
            num_rows = min(length, dataset.num_rows - start_row)
            if num_rows <= 0:
                return
            yield Chunk(0, "", index, file.index, start_row, file_row, num_rows)
            index += 1


def _ranges(row_groups: tuple[int, ...], size: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each range: neighbouring row groups together while they fit, a large one cut evenly."""
    start = length = 0
    for group in row_groups:
        if length and length + group > size:
            yield start, length
            start, length = start + length, 0
        if group > size:
            yield from _cut(start, group, size)
            start += group
        else:
            length += group
    if length:
        yield start, length


def _cut(start: int, rows: int, size: int) -> Iterator[tuple[int, int]]:
    parts = -(-rows // size)
    for part in range(parts):
        first, end = rows * part // parts, rows * (part + 1) // parts
        yield start + first, end - first
