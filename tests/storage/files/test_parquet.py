from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputChanged, InputNotFound, NotParquet
from storage.files import parquet, scanning
from storage.files.changes import require_unchanged
from storage.files.locations import list_files, shown_versions


def write(path: Path, num_rows: int, *, first: int = 0, group: int = 10, **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = range(first, first + num_rows)
    table = pa.table({"id": pa.array(ids, pa.int64()), "prompt": [f"prompt {i}" for i in ids], **columns})
    pq.write_table(table, path, row_group_size=group)
    return str(path)


def ids_of(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.column("id").to_pylist()]


def test_files_directories_and_globs(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path / name, 1) for name in ("a.parquet", "b.parquet", "deep/er/c.parquet"))
    write(tmp_path / "_temporary/d.parquet", 1)
    write(tmp_path / ".hidden.parquet", 1)
    (tmp_path / "readme.txt").write_text("no")
    assert list_files([str(tmp_path)]) == [a, b, c]
    assert list_files([b, str(tmp_path / "*.parquet")]) == [b, a]
    assert list_files([str(tmp_path / "**" / "c.parquet")]) == [c]


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = write(tmp_path / "a.parquet", 1)
    monkeypatch.chdir(tmp_path)
    assert list_files(["a.parquet"]) == list_files(["."]) == [a]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prompt.parquet", r"did you mean .*prompts\.parquet"),
        ("*.pq", "no file matches"),
        ("empty", "holds no"),
        ("x", "x"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "prompts.parquet", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputNotFound, match=message):
        list_files([str(tmp_path / name)])


def test_remote_files_through_fsspec() -> None:
    memory = fsspec.filesystem("memory")
    for name in ("/parquet-tests/b.parquet", "/parquet-tests/a.parquet", "/parquet-tests/_x/c.parquet"):
        with memory.open(name, "wb") as file:
            pq.write_table(pa.table({"id": [1, 2, 3]}), file)
    urls = ["memory://parquet-tests/a.parquet", "memory://parquet-tests/b.parquet"]
    assert list_files(["memory://parquet-tests"]) == list_files(["memory://parquet-tests/*.parquet"]) == urls
    assert list_files([urls[1]]) == [urls[1]]
    metadata = parquet.read_metadata(urls[0])
    assert (metadata.num_rows, metadata.schema.names) == (3, ["id"])
    assert ids_of(scanning.read_rows(urls[0], 1, 2)) == [2, 3]
    require_unchanged(metadata.as_input_file(0, 0))
    with pytest.raises(InputNotFound, match="memory://parquet-tests/none"):
        list_files(["memory://parquet-tests/none.parquet"])
    with pytest.raises(InputNotFound, match="memory://parquet-tests/none"):
        parquet.read_metadata("memory://parquet-tests/none.parquet")


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(InputNotFound, match="nonsense://x"):
        list_files(["nonsense://x/y.parquet"])


def test_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 25)
    metadata = parquet.read_metadata(path)
    assert (metadata.row_groups, metadata.num_rows, metadata.size) == ((10, 10, 5), 25, Path(path).stat().st_size)
    file = metadata.as_input_file(3, 100)
    assert (file.index, file.first_row, file.num_rows, file.schema) == (3, 100, 25, "id: int64\nprompt: string")


def test_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 0)
    assert parquet.read_metadata(path).num_rows == 0
    assert list(scanning.read_rows(path, 0, 0)) == []


@pytest.mark.parametrize("content", [b"", b"PAR1", b"id,prompt\n1,hello\n" * 10])
def test_what_is_not_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(NotParquet, match=r"a\.parquet"):
        parquet.read_metadata(str(path))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 100)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NotParquet, match="cut off"):
        parquet.read_metadata(path)


@pytest.mark.parametrize("batch_rows", [1, 3, 64])
def test_any_range_in_any_order(tmp_path: Path, batch_rows: int) -> None:
    path = write(tmp_path / "a.parquet", 47)
    ranges = [(0, 47), (0, 0), (12, 9), (21, 4), (25, 22), (46, 1), (5, 1), (9, 2), (30, 10), (40, 7), (0, 10)]
    for start, rows in ranges:
        batches = list(scanning.read_rows(path, start, rows, batch_rows=batch_rows))
        assert ids_of(batches) == list(range(start, start + rows))
        assert all(0 < batch.num_rows <= batch_rows for batch in batches)


def test_columns_are_chosen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 3, **{"a": [1, 2, 3], "a.b": [4, 5, 6], "s": [{"x": 1}] * 3})
    assert next(scanning.read_rows(path, 0, 3, ["a"])).to_pydict() == {"a": [1, 2, 3]}
    assert next(scanning.read_rows(path, 0, 3, ["a.b"])).to_pydict() == {"a.b": [4, 5, 6]}
    assert next(scanning.read_rows(path, 0, 3, ["s", "id"])).schema.names == ["s", "id"]


def test_a_reader_left_in_the_middle_harms_nobody(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 30)
    left = scanning.read_rows(path, 0, 30, batch_rows=4)
    next(left)
    left.close()
    assert ids_of(scanning.read_rows(path, 4, 26, batch_rows=4)) == list(range(4, 30))


def test_threads_read_side_by_side(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 400, group=400)
    got: dict[int, list[int]] = {}

    def read(start: int) -> None:
        for chunk in range(start, 400, 80):
            got[chunk] = ids_of(scanning.read_rows(path, chunk, 20, batch_rows=8))

    threads = [threading.Thread(target=read, args=(start,)) for start in (0, 20, 40, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [i for chunk in sorted(got) for i in got[chunk]] == list(range(400))


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 20)
    assert ids_of(scanning.read_rows(path, 0, 5)) == list(range(5))
    write(tmp_path / "a.parquet", 20, first=100)
    assert ids_of(scanning.read_rows(path, 5, 5)) == list(range(105, 110))


def test_a_range_past_the_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 5)
    with pytest.raises(InputChanged, match=r"a\.parquet has 5 rows"):
        list(scanning.read_rows(path, 3, 3))


def test_nested_messages(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": f"hello {i}"}] * (i % 3) for i in range(30)]
    path = write(tmp_path / "a.parquet", 30, messages=messages)
    read = [row for batch in scanning.read_rows(path, 7, 20, ["messages"]) for row in batch.to_pylist()]
    assert [row["messages"] for row in read] == messages[7:27]


@pytest.mark.parametrize(
    ("path", "was", "now", "shown"),
    [
        ("a", "0", "86400000000000", ("1970-01-01 00:00:00 UTC", "1970-01-02 00:00:00 UTC")),
        ("a", "1500000000", "1999000000", ("1970-01-01 00:00:01.500 UTC", "1970-01-01 00:00:01.999 UTC")),
        ("a", "1000001000", "1000002000", ("1970-01-01 00:00:01.000001 UTC", "1970-01-01 00:00:01.000002 UTC")),
        ("a", "1000000001", "1000000002", ("1970-01-01 00:00:01.000000001 UTC", "1970-01-01 00:00:01.000000002 UTC")),
        ("a", "-1", "0", ("1969-12-31 23:59:59 UTC", "1970-01-01 00:00:00 UTC")),
        ("a", "5", "5", ("1970-01-01 00:00:00 UTC", "1970-01-01 00:00:00 UTC")),
        ("file:///a", "1.5", "1.75", ("1970-01-01 00:00:01.500 UTC", "1970-01-01 00:00:01.750 UTC")),
        ("s3://b/a", '"0815"', '"0816"', ('"0815"', '"0816"')),
    ],
)
def test_versions_are_shown_as_times_that_differ(path: str, was: str, now: str, shown: tuple[str, str]) -> None:
    assert shown_versions(path, was, now) == shown


def test_changes_are_named(tmp_path: Path) -> None:
    file = parquet.read_metadata(write(tmp_path / "a.parquet", 20)).as_input_file(0, 0)
    require_unchanged(file)
    os.utime(file.path, ns=(1, 1))
    with pytest.raises(InputChanged, match=r"a\.parquet: modified: 20.* -> 1970-01-01 00:00:00 UTC"):
        require_unchanged(file)
    write(tmp_path / "a.parquet", 21, extra=[1.5] * 21)
    with pytest.raises(InputChanged, match=r"column 'extra': none -> double\n.*rows: 20 rows in .* -> 21 rows"):
        require_unchanged(file)
    Path(file.path).write_text("gone bad")
    with pytest.raises(InputChanged, match="not a readable Parquet"):
        require_unchanged(file)
    Path(file.path).unlink()
    with pytest.raises(InputChanged, match="No such file"):
        require_unchanged(file)


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_batches_of_large_rows_are_small(tmp_path: Path, use_dictionary: bool) -> None:
    """Files of a few kilobytes that are gigabytes when all of it is decoded."""
    long, rows = "x" * (4 << 20), 24
    table = pa.table({"id": range(rows), "prompt": pa.array([long] * rows, pa.large_string())})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="zstd", use_dictionary=use_dictionary, data_page_size=1, write_batch_size=1)
    del table
    ids = []
    for batch in scanning.read_rows(str(path), 0, rows):
        assert isinstance(batch, pa.RecordBatch)
        assert batch.nbytes <= scanning.BATCH_BYTES + 1024
        ids += batch.column("id").to_pylist()
    assert ids == list(range(rows))


def test_lists_that_repeat_a_large_value_are_read_few_at_a_time(tmp_path: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1280, pa.int8()), pa.array(["x" * (1 << 20)]))
    lists = pa.ListArray.from_arrays(pa.array(range(0, 1281, 20), pa.int32()), values)
    table = pa.table({"id": range(64), "sources": lists})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
    first = next(scanning.read_rows(str(tmp_path / "a.parquet"), 0, 64))
    assert isinstance(first, pa.RecordBatch)
    assert first.nbytes <= scanning.BATCH_BYTES


def test_damage_anywhere_costs_rows_of_its_own_row_group_only(tmp_path: Path) -> None:
    """Every row comes once, in order, as it was or as unreadable: its pages have checksums."""
    table = pa.table({"id": range(200), "prompt": [f"prompt {i} " * 5 for i in range(200)], "label": ["x", "y"] * 100})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=50, data_page_size=200, write_batch_size=10, write_page_checksum=True)
    whole, rows, rng = path.read_bytes(), table.to_pylist(), random.Random(0)
    num_unreadable = 0
    for _ in range(60):
        group = rng.randrange(4)
        column = pq.ParquetFile(path).metadata.row_group(group).column(rng.randrange(3))
        start = column.dictionary_page_offset or column.data_page_offset
        at = start + rng.randrange(column.total_compressed_size - 1)
        (tmp_path / "b.parquet").write_bytes(whole[:at] + rng.randbytes(2) + whole[at + 2 :])
        place = 0
        for part in scanning.read_rows(str(tmp_path / "b.parquet"), 0, 200):
            if isinstance(part, scanning.Unreadable):
                assert group * 50 <= place < (group + 1) * 50
                num_unreadable += part.rows.num_rows
                place += part.rows.num_rows
            else:
                assert part.to_pylist() == rows[place : place + part.num_rows]
                place += part.num_rows
        assert place == 200
    assert num_unreadable > 0
