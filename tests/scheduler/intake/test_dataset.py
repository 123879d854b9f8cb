from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scheduler.errors import InvalidInput
from scheduler.intake.dataset import inspect
from storage.spec import InputSpec
from tests.support.submissions import write_prompts

MESSAGES = [[{"role": "user", "content": "hi"}]]


def spec(*paths: Path | str, **fields: Any) -> InputSpec:
    return InputSpec(paths=tuple(str(path) for path in paths), **fields)


def problems(input_spec: InputSpec) -> str:
    with pytest.raises(InvalidInput) as caught:
        inspect(input_spec)
    return str(caught.value)


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_files_are_placed_one_behind_the_other(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "b.parquet", 7)
    write_prompts(tmp_path / "in" / "a.parquet", 25, row_group_size=10)
    dataset = inspect(spec(tmp_path / "in"))
    assert [Path(file.path).name for file in dataset.files] == ["a.parquet", "b.parquet"]
    assert [file.first_row for file in dataset.files] == [0, 25]
    assert dataset.files[0].row_groups == (10, 10, 5)
    assert dataset.num_rows == 32
    assert dataset.input.prompt_column == "prompt"


@pytest.mark.parametrize("pattern", ["in/*.parquet", "in", "in/a.parquet"])
def test_a_glob_a_directory_and_a_file_are_inputs(tmp_path: Path, pattern: str) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", 3)
    assert inspect(spec(tmp_path / pattern)).num_rows == 3


def test_a_remote_file_system_is_an_input() -> None:
    with fsspec.open("memory://bucket/in/a.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["a", "b"]}), file)
    for path in ("memory://bucket/in/a.parquet", "memory://bucket/in", "memory://bucket/in/*.parquet"):
        assert inspect(spec(path)).num_rows == 2


def test_a_driver_that_finds_no_credentials_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        pass

    class Locked(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "locked"

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            raise NoCredentials("unable to locate credentials")

        isdir = exists = info

    fsspec.register_implementation("locked", Locked, clobber=True)
    message = problems(spec("locked://bucket/a.parquet"))
    assert "locked://bucket/a.parquet" in message
    assert "unable to locate credentials" in message


def test_no_rows_are_fine(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", prompt=pa.array([], pa.string()))
    assert inspect(spec(tmp_path / "a.parquet")).num_rows == 0


@pytest.mark.parametrize(("limit", "rows", "files"), [(0, 0, 1), (5, 5, 1), (10, 10, 1), (11, 11, 2), (99, 20, 2)])
def test_a_limit_takes_the_first_rows_and_only_the_files_that_hold_them(
    tmp_path: Path, limit: int, rows: int, files: int
) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", 10)
    write_prompts(tmp_path / "in" / "b.parquet", 10)
    dataset = inspect(spec(tmp_path / "in", limit=limit))
    assert (dataset.num_rows, len(dataset.files)) == (rows, files)


def test_a_negative_limit_is_refused(tmp_path: Path) -> None:
    assert "limit must be 0 or more" in problems(spec(write_prompts(tmp_path / "a.parquet"), limit=-1))


def test_no_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no input" in problems(spec())
    message = problems(spec(tmp_path / "empty", tmp_path / "missing.parquet", tmp_path / "*.parquet"))
    assert "empty" in message
    assert "missing.parquet" in message
    assert "*.parquet" in message


def test_every_broken_file_is_named(tmp_path: Path) -> None:
    whole = write_prompts(tmp_path / "whole.parquet", 100).read_bytes()
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole[: len(whole) // 2])
    text = tmp_path / "text.parquet"
    text.write_text("prompt\nhello\n")
    empty = tmp_path / "nothing.parquet"
    empty.touch()
    message = problems(spec(tmp_path / "whole.parquet", cut, text, empty))
    for path in (cut, text, empty):
        assert f"{path} is not a readable Parquet file" in message
    assert "whole.parquet" not in message


def test_a_damaged_footer_is_named(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", 100)
    data = bytearray(path.read_bytes())
    data[-60:-10] = b"\xff" * 50
    path.write_bytes(data)
    assert str(path) in problems(spec(path))


def test_a_wrong_column_is_named_with_its_neighbours(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", category=["c"] * 10)
    assert problems(spec(path, prompt_column="promt")) == (
        "the input has no column 'promt' (the prompt column); did you mean 'prompt'?"
    )
    assert "there are: category, prompt" in problems(spec(path, prompt_column="zzz"))
    assert "no column 'uid' (the id column)" in problems(spec(path, id_column="uid"))


def test_several_problems_come_together(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", number=[1.5] * 10)
    with pytest.raises(InvalidInput) as caught:
        inspect(spec(path, id_column="number", sampling_column="x"))
    assert len(caught.value.problems) == 2


def test_without_a_text_column_the_near_name_is_offered(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", prompts=["a"])
    assert "did you mean 'prompts'?" in problems(spec(path))


def test_two_text_columns_are_ambiguous(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", prompt=["a"], messages=MESSAGES)
    assert "say which one" in problems(spec(path))
    assert "both a prompt column" in problems(spec(path, prompt_column="prompt", messages_column="messages"))
    assert inspect(spec(path, messages_column="messages")).input.prompt_column is None


def test_one_column_cannot_mean_two_things(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet")
    message = problems(spec(path, prompt_column="prompt", id_column="prompt"))
    assert "'prompt' is named as the prompt and id column" in message


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert "a.parquet has 2 columns named 'prompt'" in problems(spec(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("prompt", pa.array(["a"], pa.large_string())),
        ("prompt", pa.array(["a"]).dictionary_encode()),
        ("prompt", pa.array([None], pa.null())),
        ("messages", pa.array(MESSAGES)),
        ("messages", pa.array(['[{"role": "user", "content": "hi"}]'])),
        ("messages", pa.array([[[("role", "user")]]], pa.list_(pa.map_(pa.string(), pa.string())))),
    ],
)
def test_text_columns_of_these_types_are_taken(tmp_path: Path, column: str, values: pa.Array) -> None:
    dataset = inspect(spec(write(tmp_path / "a.parquet", **{column: values})))
    assert column in (dataset.input.prompt_column, dataset.input.messages_column)


@pytest.mark.parametrize(
    ("column", "values", "kind"),
    [
        ("prompt", pa.array([1]), "int64"),
        ("prompt", pa.array([b"a"]), "binary"),
        ("prompt", pa.array([["a"]]), "list"),
        ("messages", pa.array([["a"]]), "list<element: string>"),
        ("messages", pa.array([[{"role": "user"}]]), "list<element: struct<role: string>>"),
        ("messages", pa.array([[{"role": "user", "content": 1}]]), "content: int64"),
    ],
)
def test_a_text_column_of_another_type_is_refused(tmp_path: Path, column: str, values: pa.Array, kind: str) -> None:
    message = problems(spec(write(tmp_path / "a.parquet", **{column: values})))
    assert f"column {column!r} is" in message
    assert kind in message
    assert f"--{column}-column" in message


def test_the_sampling_column_is_found_by_its_name(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", 1, sampling_params=[{"temperature": 0.5}])
    assert inspect(spec(path)).input.sampling_column == "sampling_params"
    path = write_prompts(tmp_path / "b.parquet", 1, sampling_params=[0.5])
    assert "must be a struct, a map or JSON text" in problems(spec(path))


def test_the_speculation_column_is_found_by_its_name_if_it_is_text(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", 1, speculation=["ngram"], other=[1])
    assert inspect(spec(path)).input.speculation_column == "speculation"
    assert "--set input.speculation_column=NAME" in problems(spec(path, speculation_column="other"))
    path = write_prompts(tmp_path / "b.parquet", 1, speculation=[0.5])
    assert inspect(spec(path)).input.speculation_column is None
    path = write_prompts(tmp_path / "c.parquet", 1, how=["none"])
    assert inspect(spec(path, speculation_column="how")).input.speculation_column == "how"


def test_schemas_that_clash_are_named_by_column_and_file(tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "a.parquet", 1, category=["x"], only_a=[1])
    write_prompts(tmp_path / "in" / "b.parquet", 1, category=[5])
    message = problems(spec(tmp_path / "in"))
    assert "column 'category' is string" in message
    assert "b.parquet: cast one of them" in message
    assert "column 'only_a' is in" in message


def test_files_may_order_columns_and_store_text_differently(tmp_path: Path) -> None:
    write_prompts(tmp_path / "a.parquet", 1, category=["x"])
    write(tmp_path / "b.parquet", category=pa.array([None], pa.null()), prompt=pa.array(["p"], pa.large_string()))
    assert inspect(spec(tmp_path / "*.parquet")).num_rows == 2


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write_prompts(tmp_path / "a.parquet", 3)
    assert inspect(spec(path, tmp_path / "*.parquet")).num_rows == 3


def test_many_files_keep_their_order(tmp_path: Path) -> None:
    for number in range(70):
        write_prompts(tmp_path / "in" / f"{number:03}.parquet", number % 3)
    dataset = inspect(spec(tmp_path / "in"))
    assert [file.num_rows for file in dataset.files] == [number % 3 for number in range(70)]
    assert dataset.files[-1].first_row == dataset.num_rows - dataset.files[-1].num_rows
