from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import InputChanged, JobNotFinished, UnusableOutput
from storage.files import export
from storage.files.export import RESULT_FIELDS, export_job
from storage.files.parquet import read_metadata
from storage.records import Job
from storage.store.store import Store
from tests.support.records import answer, claim, claim_next, failure, make_job, pairs, plan, work

RESULT_COLUMNS = [
    "_row_index", "_sample", "_status", "_error_code", "_error_message", "output_text", "finish_reason", "stop_reason",
    "num_prompt_tokens", "num_output_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
]  # fmt: skip


def submit(store: Store, paths: list[Path], *, chunk_rows: int = 4, limit: int | None = None, **changes: Any) -> Job:
    files = []
    for index, path in enumerate(paths):
        files.append(read_metadata(str(path)).as_input_file(index, sum(f.num_rows for f in files)))
    total = sum(f.num_rows for f in files)
    job = make_job(num_rows=total if limit is None else min(limit, total), **changes)
    store.jobs.create(job, files, plan(job, chunk_rows))
    return job


def write(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path, row_group_size=5)
    return path


def prompts(num_rows: int, first: int = 0) -> pa.Table:
    return pa.table({"prompt": [f"p{i}" for i in range(first, first + num_rows)], "id": range(first, first + num_rows)})


def test_rows_come_in_input_order_with_their_columns(store: Store, tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.parquet", prompts(11)), write(tmp_path / "b.parquet", prompts(6, 11))]
    job = submit(store, paths, num_samples=2)
    waiting = []
    while (chunk := claim_next(store, "worker", 60, job.id)) is not None:
        waiting.append(chunk)
    rng = random.Random(0)
    rng.shuffle(waiting)
    for chunk in waiting:
        batch = [failure(*p) if p[0] in (3, 12) else answer(*p) for p in pairs(chunk, 2)]
        rng.shuffle(batch)
        store.results.write(chunk.lease, batch)
        store.chunks.finish(chunk.lease)
    store.jobs.finalize_if_done(job.id)
    out = tmp_path / "out.parquet"
    report = export_job(store, job.id, str(out))
    assert (report.num_rows, report.num_ok, report.num_errors, report.num_missing) == (34, 30, 4, 0)
    assert report.num_bytes == out.stat().st_size
    table = pq.read_table(out)
    assert table.schema.names == ["prompt", "id", *RESULT_COLUMNS]
    rows = table.to_pylist()
    assert [(r["_row_index"], r["_sample"]) for r in rows] == [(row, s) for row in range(17) for s in range(2)]
    for row, result in zip(rows, store.results.iterate(job.id), strict=True):
        assert (row["id"], row["prompt"]) == (row["_row_index"], f"p{row['_row_index']}")
        assert (row["_status"], row["_error_code"]) == (result.status.value, result.error_code)
        assert (row["output_text"], row["finish_reason"]) == (result.output_text, result.finish_reason)
        stats = result.acceptance
        assert row["num_spec_steps"] == (stats.num_spec_steps if stats else None)
        assert row["num_draft_tokens"] == (stats.num_draft_tokens if stats else None)


def test_every_type_is_kept(store: Store, tmp_path: Path) -> None:
    moment = dt.datetime(2026, 1, 2, 3, 4, 5, 678901)
    columns = {
        "prompt": pa.array(["a", "b", None], pa.large_string()),
        "i8": pa.array([1, None, -3], pa.int8()),
        "u64": pa.array([2**64 - 1, 0, None], pa.uint64()),
        "f32": pa.array([0.1, float("nan"), None], pa.float32()),
        "flag": pa.array([True, False, None]),
        "raw": pa.array([b"\x00\xff", b"", None], pa.binary()),
        "price": pa.array([Decimal("1.10"), None, Decimal("-2.00")], pa.decimal128(10, 2)),
        "day": pa.array([dt.date(2026, 1, 2), None, None]),
        "at": pa.array([moment, None, moment], pa.timestamp("us", "UTC")),
        "label": pa.array(["x", "y", "x"]).dictionary_encode(),
        "messages": pa.array([[{"role": "user", "content": "hi\x00"}], [], None]),
        "nested": pa.array([{"a": [1, 2], "b": {"c": None}}, None, {"a": [], "b": {"c": "z"}}]),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int32())),
        "empty": pa.nulls(3),
    }
    source = pa.table(columns)
    job = submit(store, [write(tmp_path / "in.parquet", source)], chunk_rows=2)
    work(store, job)
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    kept = pq.read_table(tmp_path / "out.parquet").select(source.column_names)
    assert kept.schema == source.schema
    assert kept.drop(["f32"]).equals(source.drop(["f32"]))
    assert str(kept["f32"].to_pylist()) == str(source["f32"].to_pylist())


def test_the_result_columns_have_fixed_types(store: Store, tmp_path: Path) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(2))])
    work(store, job, bad_rows=(0, 1))
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert [schema.field(field.name) for field in RESULT_FIELDS] == list(RESULT_FIELDS)
    assert [field.name for field in RESULT_FIELDS] == RESULT_COLUMNS


def test_token_ids_and_logprobs_on_request(store: Store, tmp_path: Path) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(2))])
    chunk = claim(store, job)
    full = answer(0, output_token_ids=(5, 6, 7), logprobs=[{"token_id": 5, "logprob": -0.5}])
    store.results.write(chunk.lease, [full, answer(1)])
    store.chunks.finish(chunk.lease)
    store.jobs.finalize_if_done(job.id)
    export_job(store, job.id, str(tmp_path / "out.parquet"), token_ids=True)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["output_token_ids"].to_pylist() == [[5, 6, 7], None]
    assert table["logprobs"].to_pylist() == ['[{"token_id":5,"logprob":-0.5}]', None]
    export_job(store, job.id, str(tmp_path / "plain.parquet"))
    assert "output_token_ids" not in pq.read_schema(tmp_path / "plain.parquet").names


def test_an_export_can_be_the_input_of_another_job(store: Store, tmp_path: Path) -> None:
    first = submit(store, [write(tmp_path / "in.parquet", prompts(3))], name="first")
    work(store, first)
    export_job(store, first.id, str(tmp_path / "one.parquet"))
    second = submit(store, [tmp_path / "one.parquet"], name="second")
    work(store, second)
    report = export_job(store, second.id, str(tmp_path / "two.parquet"))
    assert report.renamed == {name: f"input_{name}" for name in RESULT_COLUMNS}
    table = pq.read_table(tmp_path / "two.parquet")
    assert table["input_output_text"].to_pylist() == table["output_text"].to_pylist()
    third = submit(store, [tmp_path / "two.parquet"], name="third")
    work(store, third)
    assert export_job(store, third.id, str(tmp_path / "3.parquet")).renamed["output_text"] == "input_input_output_text"


def test_characters_that_no_database_holds_are_exported(store: Store, tmp_path: Path) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(2))])
    chunk = claim(store, job)
    batch = [answer(0, output_text="a\x00b"), answer(1, output_text="half \ud800")]
    store.results.write(chunk.lease, batch)
    store.chunks.finish(chunk.lease)
    store.jobs.finalize_if_done(job.id)
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet")["output_text"].to_pylist() == ["a\x00b", "half �"]


def test_a_running_job_is_exported_only_in_part(store: Store, tmp_path: Path) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(9))])
    claim(store, job)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(6), failure(4)])
    out = tmp_path / "out.parquet"
    with pytest.raises(JobNotFinished, match="in_progress"):
        export_job(store, job.id, str(out))
    assert not out.exists()
    report = export_job(store, job.id, str(out), partial=True)
    assert (report.num_rows, report.num_missing) == (2, 7)
    assert pq.read_table(out).select(["id", "_row_index"]).to_pydict() == {"id": [4, 6], "_row_index": [4, 6]}


def test_a_cancelled_job_gives_what_it_has(store: Store, tmp_path: Path) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(9))])
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(*p) for p in pairs(chunk)])
    store.chunks.finish(chunk.lease)
    store.jobs.cancel(job.id)
    report = export_job(store, job.id, str(tmp_path / "out.parquet"))
    assert (report.num_rows, report.num_missing) == (4, 5)


@pytest.mark.parametrize("limit", [3, 5, 7])
def test_a_limit_ends_the_export(store: Store, tmp_path: Path, limit: int) -> None:
    paths = [write(tmp_path / f"{n}.parquet", prompts(5, 5 * n)) for n in range(2)]
    job = submit(store, paths, limit=limit)
    work(store, job)
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == list(range(limit))


def test_no_rows(store: Store, tmp_path: Path) -> None:
    job = submit(
        store, [write(tmp_path / "in.parquet", prompts(0).cast(pa.schema({"prompt": "string", "id": "int64"})))]
    )
    store.jobs.finalize_if_done(job.id)
    report = export_job(store, job.id, str(tmp_path / "out.parquet"))
    assert report.num_rows == 0
    assert pq.read_schema(tmp_path / "out.parquet").names == ["prompt", "id", *RESULT_COLUMNS]


def test_changed_input_is_refused_by_name(store: Store, tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", prompts(3))
    job = submit(store, [source])
    work(store, job)
    out = tmp_path / "out.parquet"
    export_job(store, job.id, str(out))
    before = out.read_bytes()
    write(source, prompts(4))
    with pytest.raises(InputChanged, match=r"in\.parquet"):
        export_job(store, job.id, str(out))
    assert out.read_bytes() == before


@pytest.mark.parametrize("lost", [["b"], ["a", "b"]])
def test_what_a_lost_input_cannot_give_is_null_in_a_partial_export(
    store: Store, tmp_path: Path, lost: list[str]
) -> None:
    paths = [write(tmp_path / "a.parquet", prompts(3)), write(tmp_path / "b.parquet", prompts(4, 3))]
    job = submit(store, paths)
    work(store, job, bad_rows=(4,))
    for name in lost:
        (tmp_path / f"{name}.parquet").unlink()
    with pytest.raises(InputChanged, match="--partial exports its rows"):
        export_job(store, job.id, str(tmp_path / "out.parquet"))
    report = export_job(store, job.id, str(tmp_path / "out.parquet"), partial=True)
    assert (report.num_rows, report.num_errors) == (7, 1)
    assert report.num_unreadable == (4 if lost == ["b"] else 7)
    assert ["b.parquet" in text for text in report.lost_files] == ([True] if lost == ["b"] else [False, True])
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["_row_index"].to_pylist() == list(range(7))
    assert table["output_text"].null_count == 1
    assert lost == ["a", "b"] or table["id"].to_pylist() == [0, 1, 2, None, None, None, None]


def test_a_failed_export_leaves_the_old_file_and_no_other(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(9))])
    work(store, job)
    out = tmp_path / "out.parquet"
    export_job(store, job.id, str(out))
    before = out.read_bytes()
    monkeypatch.setattr(export, "SLICE_ROWS", 2)
    real, calls = export.require_unchanged, []

    def changed_meanwhile(file: Any) -> None:
        calls.append(file)
        if len(calls) > 1:
            raise InputChanged("changed while it was read")
        real(file)

    monkeypatch.setattr(export, "require_unchanged", changed_meanwhile)
    with pytest.raises(InputChanged):
        export_job(store, job.id, str(out))
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".db") in (
        ["in.parquet", "out.parquet"],
        ["in.parquet", "out.parquet", "store.db-shm", "store.db-wal"],
    )


def test_small_slices_and_groups_give_the_same_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(300))], chunk_rows=100)
    work(store, job, bad_rows=(0, 299))
    export_job(store, job.id, str(tmp_path / "one.parquet"))
    monkeypatch.setattr(export, "SLICE_ROWS", 3)
    monkeypatch.setattr(export, "GROUP_ROWS", 20)
    export_job(store, job.id, str(tmp_path / "many.parquet"))
    assert pq.read_metadata(tmp_path / "one.parquet").num_row_groups == 1
    assert pq.read_metadata(tmp_path / "many.parquet").num_row_groups > 4
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "many.parquet"))


@pytest.mark.parametrize("out", ["", "missing/out.parquet", "in.parquet"])
def test_an_unusable_output_is_refused(store: Store, tmp_path: Path, out: str) -> None:
    job = submit(store, [write(tmp_path / "in.parquet", prompts(3))])
    work(store, job)
    with pytest.raises(UnusableOutput):
        export_job(store, job.id, str(tmp_path / out))
    assert pq.read_table(tmp_path / "in.parquet").num_rows == 3
    with pytest.raises(UnusableOutput, match="local file"):
        export_job(store, job.id, "s3://bucket/out.parquet")


def test_files_may_order_their_columns_differently(store: Store, tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "a.parquet", prompts(2)),
        write(tmp_path / "b.parquet", prompts(2, 2).select(["id", "prompt"])),
    ]
    job = submit(store, paths)
    work(store, job)
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet").select(["id", "prompt"]).to_pydict() == {
        "id": [0, 1, 2, 3], "prompt": ["p0", "p1", "p2", "p3"],
    }  # fmt: skip
