"""Reading the rows of a chunk from Parquet."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.files.parquet import read_metadata
from storage.records import Chunk, InputFile
from storage.spec import InputSpec
from workers.errors import UnreadableInput
from workers.rows.read import Row, read_chunk

PROMPTS = InputSpec(("x",), prompt_column="prompt", id_column="id", sampling_column="sampling_params")


def write(path: Path, columns: dict[str, Any], row_group_size: int = 100) -> InputFile:
    table = pa.table(columns)
    pq.write_table(table, path, row_group_size=row_group_size)
    return read_metadata(str(path)).as_input_file(0, first_row=1000)


def read(file: InputFile, spec: InputSpec = PROMPTS, *, first: int = 0, num_rows: int | None = None) -> list[Row]:
    count = file.num_rows - first if num_rows is None else num_rows
    chunk = Chunk(1, "job", 0, 0, file.first_row + first, first, count)
    return [row for rows in read_chunk(file, chunk, spec) for row in rows]


def test_rows_of_a_chunk_have_their_place_in_the_dataset(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", {"prompt": [f"p{i}" for i in range(500)], "id": range(500)})
    rows = read(file, first=90, num_rows=220)
    assert [row.index for row in rows] == list(range(1090, 1310))
    assert [row.text for row in rows] == [f"p{i}" for i in range(90, 310)]
    assert rows[0].row_id == "90"


def test_every_other_column_is_carried(tmp_path: Path) -> None:
    columns = {
        "prompt": ["a", "b"],
        "id": ["x", None],
        "sampling_params": [{"top_k": 1}, None],
        "category": ["math", None],
        "score": [0.5, None],
        "day": [dt.date(2026, 1, 2), None],
        "image": pa.array([b"\x00\x01", None]),
    }
    first, second = read(write(tmp_path / "x.parquet", columns))
    assert first.carried == {"category": "math", "score": 0.5, "day": dt.date(2026, 1, 2)}
    assert second.carried == {"category": None, "score": None, "day": None}
    assert (first.sampling, second.sampling) == ({"top_k": 1}, None)
    assert (first.row_id, second.row_id) == ("x", None)


def test_the_speculation_column_is_read_where_the_job_names_one(tmp_path: Path) -> None:
    file = write(tmp_path / "x.parquet", {"prompt": ["a", "b"], "speculation": ["ngram", None]})
    named = InputSpec(paths=("x",), prompt_column="prompt", speculation_column="speculation")
    assert [(row.speculation, row.carried) for row in read(file, named)] == [("ngram", {}), (None, {})]
    unnamed = InputSpec(paths=("x",), prompt_column="prompt")
    assert [(row.speculation, row.carried["speculation"]) for row in read(file, unnamed)] == [
        (None, "ngram"),
        (None, None),
    ]


def test_the_sampling_column_can_have_another_name(tmp_path: Path) -> None:
    spec = InputSpec(paths=("x",), prompt_column="prompt", sampling_column="how")
    file = write(tmp_path / "x.parquet", {"prompt": ["a"], "how": ['{"top_k": 1}'], "sampling_params": ["kept"]})
    (row,) = read(file, spec)
    assert row.sampling == '{"top_k": 1}'
    assert row.carried == {"sampling_params": "kept"}


def test_messages_arrive_as_lists_of_structs(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "hi"}], [], None]
    file = write(tmp_path / "x.parquet", {"messages": messages})
    rows = read(file, InputSpec(paths=("x",), messages_column="messages"))
    assert [row.text for row in rows] == messages


def test_text_that_is_not_utf8_is_a_problem_of_its_own_row(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 3, pa.array([b"ok", b"a\xed\xa0\x80", b"fine"], pa.binary()).buffers())
    file = write(tmp_path / "x.parquet", {"prompt": broken, "note": broken})
    first, second, third = read(file, InputSpec(paths=("x",), prompt_column="prompt"))
    assert (first.text, third.text) == ("ok", "fine")
    assert second.problem is not None
    assert second.problem.code == "invalid_text"
    assert second.carried == {"note": None}


@pytest.mark.parametrize("damage", ["gone", "cut off", "another column", "shorter", "written again"])
def test_input_that_is_not_what_was_submitted_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.parquet"
    file = write(path, {"prompt": ["a", "b", "c"]})
    if damage == "gone":
        path.unlink()
    elif damage == "cut off":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "another column":
        write(path, {"text": ["a", "b", "c"]})
    elif damage == "shorter":
        write(path, {"prompt": ["a"]})
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(UnreadableInput, match=r"x\.parquet"):
        read(file)


def test_short_lists_are_carried_however_large_the_dictionary_that_they_take_values_from(tmp_path: Path) -> None:
    labels = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([f"label {n}" for n in range(2000)]))
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), labels)
    first, second = read(write(tmp_path / "x.parquet", {"prompt": ["a", "b"], "labels": lists}))
    assert (first.carried, second.carried) == ({"labels": ["label 0"]}, {"labels": ["label 1"]})
