from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler.errors import InvalidJob, SpecChanged, WrongState
from storage.errors import InputChanged
from storage.files.export import export_job
from storage.records import JobState
from storage.store.store import Store
from tests.support.records import claim_next
from tests.support.submissions import job_spec, submitted, work_through, write_prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in" / "prompts.parquet", 100, id=list(range(100)))


def test_a_job_is_stored_with_its_files_chunks_and_settled_columns(store: Store, prompts: Path) -> None:
    submission = submitted(store, prompts)
    assert not submission.resumed
    job = store.jobs.get("night")
    assert job == submission.job
    assert (job.state, job.num_rows, job.num_samples) == (JobState.QUEUED, 100, 1)
    assert job.spec.input.prompt_column == "prompt"
    assert job.spec.input.paths == (str(prompts),)
    assert [file.path for file in store.jobs.files(job.id)] == [str(prompts)]
    chunks = store.chunks.of_job(job.id)
    assert len(chunks) > 1
    assert sum(chunk.num_rows for chunk in chunks) == 100


def test_no_rows_complete_at_once(store: Store, prompts: Path) -> None:
    assert submitted(store, prompts, limit=0).job.state is JobState.COMPLETED
    assert store.jobs.get("night").finished_at is not None


def test_the_same_again_is_the_same_job(store: Store, prompts: Path) -> None:
    first = submitted(store, prompts)
    again = submitted(store, prompts)
    assert again.resumed
    assert again.job == first.job


def test_another_spelling_of_the_paths_is_the_same_input(store: Store, prompts: Path) -> None:
    first = submitted(store, prompts)
    assert submitted(store, prompts.parent).job == first.job


def test_a_completed_job_is_returned_as_it_is(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts).job
    work_through(store, job.id)
    again = submitted(store, prompts)
    assert again.resumed
    assert again.job.state is JobState.COMPLETED


def test_a_cancelled_job_is_opened_again(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts).job
    store.jobs.cancel(job.id)
    assert submitted(store, prompts).job.state is JobState.QUEUED
    work_through(store, job.id)
    assert store.jobs.get(job.id).state is JobState.COMPLETED


def test_a_job_that_is_being_cancelled_has_to_be_waited_for(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts).job
    assert claim_next(store, "worker-1", 60.0, job.id)
    store.jobs.cancel(job.id)
    with pytest.raises(WrongState, match="being cancelled"):
        submitted(store, prompts)


def test_another_spec_is_refused_field_by_field(store: Store, prompts: Path) -> None:
    submitted(store, prompts, seed=1)
    with pytest.raises(SpecChanged) as caught:
        submitted(
            store,
            prompts,
            seed=2,
            engine={"target": "scripted:vocab=256", "speculation": {"method": "draft_model", "draft": "d"}},
            limit=50,
        )
    assert {str(difference) for difference in caught.value.differences} == {
        "input.limit: (not set) -> 50",
        'engine.speculation.draft: (not set) -> "d"',
        'engine.speculation.method: "none" -> "draft_model"',
        "seed: 1 -> 2",
    }
    assert "job 'night' exists with another spec:\n  " in str(caught.value)
    assert "--new" in str(caught.value)


def engine(**speculation: Any) -> dict[str, Any]:
    return {"target": "m", "speculation": {"method": "none", **speculation}}


def test_a_field_that_a_stored_spec_is_older_than_has_its_default_of_today(store: Store, prompts: Path) -> None:
    defaults = job_spec(engine=engine(verify="exact"), sampling={"n": 1, "extra": 4})
    old = submitted(store, prompts, engine=engine(), sampling={"n": 1})
    again = submitted(store, prompts, engine=engine(verify="exact"), sampling={"n": 1, "extra": 4}, defaults=defaults)
    assert (again.resumed, again.job) == (True, old.job)
    with pytest.raises(SpecChanged) as caught:
        submitted(store, prompts, engine=engine(verify="block"), sampling={"n": 1, "extra": 5}, defaults=defaults)
    assert [str(difference) for difference in caught.value.differences] == [
        'engine.speculation.verify: "exact" -> "block"',
        "sampling.extra: 4 -> 5",
    ]


def test_a_field_that_was_stored_as_null_is_not_its_default_of_today(store: Store, prompts: Path) -> None:
    submitted(store, prompts, sampling={"logprobs": None})
    with pytest.raises(SpecChanged, match="logprobs"):
        submitted(store, prompts, sampling={"logprobs": 10}, defaults=job_spec(sampling={"logprobs": 10}))


def test_changed_input_is_refused_file_by_file(store: Store, prompts: Path) -> None:
    submitted(store, prompts.parent)
    write_prompts(prompts, 90, id=list(range(90)))
    write_prompts(prompts.parent / "second.parquet", 5, id=list(range(5)))
    with pytest.raises(InputChanged) as caught:
        submitted(store, prompts.parent)
    fields = {difference.field for difference in caught.value.differences}
    assert f"{prompts}: rows" in fields
    assert str(prompts.parent / "second.parquet") in fields
    assert "100 rows in 1 row group -> 90 rows in 1 row group" in str(caught.value)


def test_a_touched_file_counts_as_changed(store: Store, prompts: Path) -> None:
    submitted(store, prompts)
    os.utime(prompts, ns=(1, 1))
    with pytest.raises(InputChanged, match=r"prompts\.parquet: modified: 20.* UTC -> 1970-01-01 00:00:00 UTC"):
        submitted(store, prompts)


def test_a_changed_column_is_named(store: Store, prompts: Path) -> None:
    submitted(store, prompts)
    write_prompts(prompts, 100, id=[str(n) for n in range(100)])
    with pytest.raises(InputChanged, match="column 'id': int64 -> string"):
        submitted(store, prompts)


def test_new_makes_a_fresh_job_under_the_next_name(store: Store, prompts: Path) -> None:
    names = [submitted(store, prompts, new=True, seed=seed).job.name for seed in range(3)]
    assert names == ["night", "night-2", "night-3"]
    assert store.jobs.get("night-3").spec.name == "night-3"
    assert submitted(store, prompts, name="night-3", seed=2).resumed


@pytest.mark.parametrize("name", ["", "last", "a b", "../x", "-x", "x" * 101, "nächtlich"])
def test_names_that_would_not_work_are_refused(store: Store, prompts: Path, name: str) -> None:
    with pytest.raises(InvalidJob, match="job name"):
        submitted(store, prompts, name=name)


def test_chunks_without_rows_leave_no_job_behind(store: Store, prompts: Path) -> None:
    with pytest.raises(InvalidJob, match="chunk_rows"):
        submitted(store, prompts, chunk_rows=0)
    assert store.jobs.newest() == []


def test_files_that_store_columns_differently_come_out_as_one(store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"prompt": ["a"], "tag": ["x"]}), tmp_path / "in" / "a.parquet")
    other = pa.table({"tag": pa.array([None], pa.null()), "prompt": pa.array(["b"], pa.large_string())})
    pq.write_table(other, tmp_path / "in" / "b.parquet")
    job = submitted(store, tmp_path / "in").job
    work_through(store, job.id)
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.select(["prompt", "tag"]).to_pydict() == {"prompt": ["a", "b"], "tag": ["x", None]}


def test_what_folders_say_and_what_was_told_is_kept_with_the_job(store: Store, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "year=2024" / "lang=en" / "a.PARQUET", 2)
    write_prompts(tmp_path / "in" / "year=2025" / "lang=7" / "b.parquet", 2)
    (tmp_path / "in" / "left.txt").touch()
    job = submitted(store, tmp_path / "in").job
    assert [file.partitions for file in store.jobs.files(job.id)] == [
        {"year": 2024, "lang": "en"},
        {"year": 2025, "lang": "7"},
    ]
    (told,) = store.jobs.get("night").notes
    assert str(tmp_path / "in" / "left.txt") in told
    work_through(store, job.id)
    export_job(store, job.id, str(tmp_path / "out.parquet"))
    assert pq.read_table(tmp_path / "out.parquet", columns=["year", "lang"]).to_pydict() == {
        "year": [2024, 2024, 2025, 2025],
        "lang": ["en", "en", "7", "7"],
    }
