from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import InvalidJob
from scheduler.intake.dataset import Dataset
from scheduler.intake.planning import default_chunk_rows, plan_chunks
from storage.records import Chunk, InputFile
from storage.spec import InputSpec


def dataset(*row_groups: tuple[int, ...], limit: int | None = None) -> Dataset:
    files = []
    first_row = 0
    for index, groups in enumerate(row_groups):
        files.append(InputFile(index, f"{index}.parquet", 1, "1", "prompt: string", groups, first_row))
        first_row += sum(groups)
    num_rows = first_row if limit is None else min(first_row, limit)
    return Dataset(tuple(files), pa.schema([("prompt", pa.string())]), num_rows, InputSpec(("x",)))


def plan(data: Dataset, chunk_rows: int | None = None) -> list[Chunk]:
    return list(plan_chunks(data, chunk_rows))


def ranges(data: Dataset, chunk_rows: int | None = None) -> list[tuple[int, int, int]]:
    return [(chunk.file_index, chunk.file_row, chunk.num_rows) for chunk in plan(data, chunk_rows)]


@given(
    groups=st.lists(st.lists(st.integers(0, 40), max_size=6).map(tuple), max_size=4),
    chunk_rows=st.integers(1, 50),
    limit=st.none() | st.integers(0, 300),
)
def test_chunks_cover_every_row_once_in_order(
    groups: list[tuple[int, ...]], chunk_rows: int, limit: int | None
) -> None:
    data = dataset(*groups, limit=limit)
    covered = 0
    for index, chunk in enumerate(plan(data, chunk_rows)):
        file = data.files[chunk.file_index]
        assert chunk.index == index
        assert chunk.start_row == covered == file.first_row + chunk.file_row
        assert 1 <= chunk.num_rows <= chunk_rows
        assert chunk.file_row + chunk.num_rows <= file.num_rows
        covered += chunk.num_rows
    assert covered == data.num_rows


def test_small_row_groups_are_put_together_whole() -> None:
    assert ranges(dataset((10, 10, 10, 10, 10)), 25) == [(0, 0, 20), (0, 20, 20), (0, 40, 10)]


def test_a_large_row_group_is_cut_evenly_and_alone() -> None:
    assert ranges(dataset((4, 10, 3)), 6) == [(0, 0, 4), (0, 4, 5), (0, 9, 5), (0, 14, 3)]


def test_a_chunk_never_crosses_a_file() -> None:
    assert ranges(dataset((3,), (3,)), 100) == [(0, 0, 3), (1, 0, 3)]


def test_a_limit_cuts_the_last_chunk() -> None:
    assert ranges(dataset((10,), (10,), limit=13), 5) == [(0, 0, 5), (0, 5, 5), (1, 0, 3)]


def test_no_rows_make_no_chunks() -> None:
    assert plan(dataset()) == plan(dataset((0, 0))) == []


@pytest.mark.parametrize(
    ("row_groups", "chunk_rows"),
    [
        ((40,), 16),
        ((1000,), 125),
        ((100_000,), 256),
        ((65_536,) * 16, 256),
        ((1_000_000,), 977),
        ((131_072,) * 800, 25_600),
    ],
    ids=["tiny", "small", "middling", "a million in many groups", "a million in one group", "a hundred million"],
)
def test_default_size(row_groups: tuple[int, ...], chunk_rows: int) -> None:
    data = dataset(row_groups)
    assert default_chunk_rows(data) == chunk_rows
    assert len(plan(data)) <= 8192


def test_chunk_rows_below_one_are_refused() -> None:
    with pytest.raises(InvalidJob, match="chunk_rows must be at least 1, got 0"):
        plan_chunks(dataset((1,)), 0)
