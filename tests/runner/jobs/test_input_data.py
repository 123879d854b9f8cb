"""`nightdraft run` and `export` over what Parquet files hold: every type, damaged pages, values too large for SQL."""

from __future__ import annotations

import base64
import json
import sqlite3
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli import Cli


def of_every_type() -> dict[str, pa.Array]:
    """A column of each type that a Parquet file can give back, with a null in row 1."""
    ids = [uuid.UUID(int=n).bytes for n in range(4)]
    typed: list[tuple[pa.DataType, list[Any]]] = [
        (pa.string_view(), ["a", None, "c" * 40, ""]),
        (pa.binary_view(), [b"a", None, b"c" * 40, b""]),
        (pa.large_string(), ["a", None, "c", "d"]),
        (pa.large_binary(), [b"a", None, b"c", b"d"]),
        (pa.binary(2), [b"ab", None, b"cd", b"ef"]),
        (pa.list_(pa.int32()), [[1], None, [], [2, 3]]),
        (pa.large_list(pa.string()), [["a"], None, [], ["b", None]]),
        (pa.list_(pa.int32(), 2), [[1, 2], None, [3, 4], [5, 6]]),
        (pa.list_view(pa.int32()), [[1], None, [], [2, 3]]),
        (pa.large_list_view(pa.string()), [["a"], None, [], ["b"]]),
        (pa.list_(pa.time64("ns")), [[1], None, [], [2, 3]]),
        (pa.struct([("a", pa.int8()), ("b", pa.list_(pa.string()))]), [{"a": 1, "b": ["x"]}, None, {}, {"a": 3}]),
        (pa.map_(pa.string(), pa.int32()), [[("k", 1)], None, [], [("l", 2)]]),
        *((kind, [Decimal("1.1"), None, Decimal("-2.2"), Decimal(0)]) for kind in _decimals()),
        *((pa.duration(unit), [1, None, 3, 4]) for unit in ("s", "ms", "us", "ns")),
        (pa.time32("ms"), [1, None, 3, 4]),
        (pa.time64("us"), [1, None, 3, 4]),
        (pa.time64("ns"), [1, None, 3, 4]),
        (pa.timestamp("ns", "Europe/Berlin"), [1, None, 3, 4]),
        (pa.timestamp("us"), [1, None, 3, 4]),
        (pa.date32(), [1, None, 3, 4]),
        (pa.float16(), [1.5, None, float("nan"), 2.0]),
        (pa.uint64(), [2**64 - 1, None, 0, 1]),
        (pa.bool_(), [True, None, False, True]),
        (pa.null(), [None] * 4),
        (pa.uuid(), [ids[0], None, ids[1], ids[2]]),
        (pa.json_(), ["1", None, "{}", "[]"]),
        (pa.bool8(), [1, None, 0, 1]),
    ]
    columns = {str(kind): pa.array(values, kind) for kind, values in typed}
    tensor = pa.fixed_shape_tensor(pa.int32(), [2])
    columns["tensor"] = pa.ExtensionArray.from_storage(
        tensor, pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int32(), 2))
    )
    columns["dictionary"] = pa.array(["x", None, "y", "x"]).dictionary_encode()
    columns["ordered"] = pa.DictionaryArray.from_arrays(
        pa.array([0, None, 1, 0], pa.int8()), pa.array(["x", "y"]), ordered=True
    )
    return columns


def _decimals() -> list[pa.DataType]:
    return [pa.decimal32(5, 1), pa.decimal64(12, 1), pa.decimal128(25, 1), pa.decimal256(60, 1)]


def _rows_of(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    return pa.concat_tables([table.slice(row, 1) for row in rows])


def _shown(column: pa.ChunkedArray) -> str:
    """Every value as text: NaN equals itself, and nanoseconds have no Python value."""
    array = column.combine_chunks()
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    return str(array.to_string(window=20, container_window=20)).replace("string_view", "large_string")


def _require_same(exported: pa.Table, source: pa.Table) -> None:
    for field in source.schema:
        kept = exported.schema.field(field.name).type
        # Views inside of a nested type come as large strings: pyarrow writes no others.
        assert kept == field.type or field.name.endswith(" of views"), field.name
        assert _shown(exported[field.name]) == _shown(source[field.name]), field.name


def test_columns_of_every_type_come_back(cli: Cli, tmp_path: Path) -> None:
    """With several samples of a row, and where only some rows are recorded."""
    path = tmp_path / "in.parquet"
    nested = {
        "struct of views": pa.array([{"a": "x"}, None, {"a": None}, {"a": "y"}]),
        "list of views": pa.array([["a"], None, [], ["b", "c"]]),
        "list view of views": pa.array([["a"], None, [], ["b", "c"]]),
    }
    view = pa.string_view()
    told = [pa.struct([("a", view)]), pa.list_(view), pa.list_view(view)]
    table = pa.table({"prompt": ["one", "two", None, "four"], **of_every_type(), **nested})
    _write_as(path, table, dict(zip(nested, told, strict=True)))
    source = pq.read_table(path)
    cli.run(path, "--set", "sampling.n=2", "--out", "run.parquet", "--name", "job", "--chunk-rows", "1", code=3)
    _require_same(pq.read_table(cli.folder / "run.parquet"), _rows_of(source, [0, 0, 1, 1, 2, 2, 3, 3]))
    with sqlite3.connect(cli.folder / "jobs.db") as connection:
        connection.execute("DELETE FROM results WHERE row_index IN (0, 2) OR sample = 1")
        carried = json.loads(connection.execute("SELECT carried FROM results WHERE row_index = 3").fetchone()[0])
    cli("export", "job", "-o", "some.parquet")
    _require_same(pq.read_table(cli.folder / "some.parquet"), _rows_of(source, [1, 3]))
    assert carried["dictionary"] == "x"
    assert carried[str(pa.list_(pa.time64("ns")))] == ["00:00:00.000000002", "00:00:00.000000003"]


def test_a_type_that_no_export_can_write_is_refused_before_anything_is_stored(cli: Cli, tmp_path: Path) -> None:
    """Views inside of list views inside of a struct: in Parquet they are lists of strings, which a note makes this."""
    wanted = pa.struct([("a", pa.list_view(pa.string_view()))])
    _write_as(tmp_path / "in.parquet", pa.table({"prompt": ["p"], "odd": [{"a": ["x"]}]}), {"odd": wanted})
    result = cli("run", "in.parquet", "--target", "scripted:eos_every=8", code=2)
    assert "column 'odd'" in result.output
    assert "cannot be exported" in result.output
    assert not (tmp_path / "jobs.db").exists() or cli.json("status") == []


def _write_as(path: Path, table: pa.Table, kinds: dict[str, pa.DataType]) -> None:
    """A file whose columns say that they are of other types, which are stored alike."""
    fields = [field.with_type(kinds.get(field.name, field.type)) for field in table.schema]
    told = base64.b64encode(pa.schema(fields).serialize().to_pybytes()).decode()
    with pq.ParquetWriter(path, table.schema, store_schema=False) as writer:
        writer.write_table(table, row_group_size=3)
        writer.add_key_value_metadata({"ARROW:schema": told})


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """100 rows in 2 row groups; in the first, prompts are broken from row 20 on, another column from row 10 on."""
    path = tmp_path / "damaged.parquet"
    table = pa.table(
        {
            "prompt": [f"prompt {n} " + "x" * 50 for n in range(100)],
            "label": [f"label {n} " + "y" * 100 for n in range(100)],
            "n": range(100),
        }
    )
    options = {"row_group_size": 50, "data_page_size": 1, "write_batch_size": 10, "use_dictionary": False}
    pq.write_table(table, path, compression="none", **options)
    data = bytearray(path.read_bytes())
    for text in (b"prompt 20 ", b"label 10 "):
        at = data.index(text)
        data[at - 4 : at] = b"\xff\xff\xff\x7f"  # the length of the value
    path.write_bytes(data)
    return path


def test_a_damaged_page_costs_only_its_own_rows(cli: Cli, damaged: Path) -> None:
    summary = cli.run(damaged, "--out", "out.parquet", "--name", "job", "--chunk-rows", "16", code=3)
    assert (summary["state"], summary["num_ok"], summary["num_errors"]) == ("completed", 70, 30)
    (group,) = cli.json("errors", "job", "--group")
    assert group["error_code"] == "unreadable_input"
    assert "'prompt'" in group["example_message"]
    report = cli.json("export", "job", "--partial", "-o", "partial.parquet")
    assert report["num_unreadable"] == 40
    for name in ("out.parquet", "partial.parquet"):
        rows = pq.read_table(cli.folder / name).to_pylist()
        lost = set(range(20, 50))
        assert [row["n"] for row in rows] == list(range(100))
        assert {row["n"] for row in rows if row["_status"] == "error"} == lost
        assert {row["n"] for row in rows if row["prompt"] is None} == lost
        assert {row["n"] for row in rows if row["label"] is None} == set(range(10, 50))


def test_large_values_are_left_in_the_input_and_come_back_from_there(cli: Cli, tmp_path: Path) -> None:
    """A small file whose dictionary holds one value of a megabyte, twenty thousand times."""
    path = tmp_path / "small.parquet"
    document = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int8()), pa.array(["x" * 1_000_000]))
    table = pa.table({"prompt": ["p"] * 20_000, "document": document, "label": ["a"] * 20_000})
    with pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
    assert path.stat().st_size < 2000
    wide = {f"c{n}": "w" * 4000 for n in range(20)}
    pq.write_table(
        pa.table(
            {
                "prompt": ["p"],
                "id": ["i" * 5000],
                "list": [["s" * 3000] * 2],
                **{name: [text] for name, text in wide.items()},
            }
        ),
        tmp_path / "wide.parquet",
    )
    cli.run(path, "--limit", "40", "--name", "job", "--out", "out.parquet")
    cli.run(tmp_path / "wide.parquet", "--name", "wide", "--id-column", "id")
    (row,) = cli.json(
        "sql", "SELECT DISTINCT carried FROM results r JOIN jobs j ON j.id = r.job_id WHERE j.name = 'job'"
    )
    left = {"left_in_input": True}
    assert json.loads(row["carried"]) == {"document": left, "label": "a"}
    exported = pq.read_table(cli.folder / "out.parquet")
    assert [len(text) for text in exported["document"].to_pylist()] == [1_000_000] * 40
    (row,) = cli.json(
        "sql", "SELECT carried, row_id FROM results r JOIN jobs j ON j.id = r.job_id WHERE j.name = 'wide'"
    )
    assert list(json.loads(row["carried"]).values()) == [left] + ["w" * 4000] * 8 + [left] * 12
    assert row["row_id"] == "i" * 1024 + "…"
