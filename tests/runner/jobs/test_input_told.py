"""What is said of an input before a model is loaded: files left out, folders that give columns, methods of rows,
columns that look as if they did something, and formats that are not Parquet."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli import TARGET, Cli

WritePrompts = Callable[..., Path]


def write(path: Path, *prompts: str, metadata: dict[str, str] | None = None, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": list(prompts), **columns}).replace_schema_metadata(metadata), path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Hive's way: the language, the year and a code in the names of folders; a file in capitals, and others."""
    root = tmp_path / "year=1999" / "in"
    write(root / "lang=en/year=2024/code=007/a.parquet", "a", label=["x"])
    write(root / "lang=de%20AT/year=2025/code=1/B.PARQUET", "b", "c", label=["y", "z"])
    write(root / "lang=__HIVE_DEFAULT_PARTITION__/year=2025/code=1/label=9/d.Pq", "d", label=["w"])
    (root / "lang=en/_SUCCESS").write_text("")
    (root / "notes.csv").write_text("prompt\nhello\n")
    return root


def test_folders_give_columns_and_files_left_out_are_named(cli: Cli, folders: Path) -> None:
    plan = cli.json("run", str(folders), "--target", TARGET, "--dry-run")["plan"]
    told = "\n".join(plan["notes"])
    assert plan["rows"] == 4
    assert "notes.csv" in told
    assert "_SUCCESS" in told
    assert "label=..." in told
    result = cli("run", str(folders), "--target", TARGET, "--max-tokens", "8", "--name", "job", "--out", "out.parquet")
    assert "notes.csv" in result.stderr
    assert cli.json("status", "job")["notes"] == plan["notes"]
    assert "notes.csv" in cli("status", "job").stdout
    exported = pq.read_table(cli.folder / "out.parquet").select(["prompt", "label", "lang", "year", "code"])
    assert exported.schema.field("year").type == pa.int64()
    assert exported.to_pylist() == [
        {"prompt": "d", "label": "w", "lang": None, "year": 2025, "code": "1"},
        {"prompt": "b", "label": "y", "lang": "de AT", "year": 2025, "code": "1"},
        {"prompt": "c", "label": "z", "lang": "de AT", "year": 2025, "code": "1"},
        {"prompt": "a", "label": "x", "lang": "en", "year": 2024, "code": "007"},
    ]
    groups = cli.json("sql", "SELECT value, num_results FROM acceptance_by_carried WHERE column_name = 'year'")
    assert {(str(row["value"]), row["num_results"]) for row in groups} == {("2024", 1), ("2025", 3)}


def test_a_glob_has_the_folders_below_its_first_wildcard(cli: Cli, folders: Path) -> None:
    cli.run(folders / "lang=*/*/*/*.parquet", "--out", "out.parquet")
    (row,) = pq.read_table(cli.folder / "out.parquet").to_pylist()
    assert (row["lang"], row["year"], row["code"]) == ("en", 2024, "007")


def test_methods_of_rows_are_found_in_their_column(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["a", "b", "c", "d"], speculation=["ngram", "suffix", None, "none"])
    plan = cli.json("run", str(path), "--target", TARGET, "--dry-run")["plan"]
    assert plan["row methods"] == ["ngram", "suffix"]
    assert cli.run(path, "--name", "m")["num_ok"] == 4
    found = cli.json("sql", "SELECT row_index, method FROM results ORDER BY row_index")
    assert [row["method"] for row in found] == ["ngram", "suffix", "none", "none"]
    assert cli.run(path, "--name", "m")["num_ok"] == 4, "the same command is the same job"


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        (["ngrm", "none"], [], "did you mean 'ngram'"),
        (["draft_model", "none"], [], "rows ask for 'draft_model' in column 'speculation': "),
        (["of the market", "on land"], ["--set", "input.speculation_column=speculation"], "there are: none, ngram"),
    ],
)
def test_methods_that_cannot_run_are_refused_before_anything_is_loaded(
    cli: Cli, write_prompts: WritePrompts, values: list[str], arguments: list[str], message: str
) -> None:
    path = write_prompts(["a", "b"], speculation=values)
    result = cli("run", str(path), "--target", TARGET, *arguments, code=2)
    assert message in " ".join(result.output.split())


def test_a_column_of_that_name_that_means_something_else_is_carried(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["a", "b"], speculation=["of the market", "on land"])
    result = cli("run", str(path), "--target", TARGET, "--max-tokens", "8")
    assert "'speculation' names no speculation method" in result.stderr
    carried = cli.json("sql", "SELECT carried FROM results ORDER BY row_index")
    assert [json.loads(row["carried"]) for row in carried] == [
        {"speculation": "of the market"},
        {"speculation": "on land"},
    ]


def test_columns_that_are_not_obeyed_or_renamed_are_told_and_the_schemas_notes_kept(cli: Cli, tmp_path: Path) -> None:
    pandas = {
        "index_columns": [{"kind": "range", "start": 0, "stop": 1, "step": 1}],
        "columns": [],
        "column_indexes": [],
    }
    notes = {"source": "here", "pandas": json.dumps(pandas), "parquet.avro.schema": "{}"}
    path = write(tmp_path / "in.parquet", "a", metadata=notes, max_tokens=[3], seed=[1], output_text=["was"])
    result = cli("run", str(path), "--target", TARGET, "--max-tokens", "8", "--out", "out.parquet", "--limit", "1")
    told = " ".join(result.stderr.split())
    assert "column 'max_tokens', 'seed' is carried and not obeyed" in told
    assert "sampling_params" in told
    assert "'output_text' is named like a column of results: exports have it as 'input_output_text'" in told
    kept = pq.read_schema(cli.folder / "out.parquet").metadata
    assert kept[b"source"] == b"here"
    assert json.loads(kept[b"pandas"])["index_columns"] == []
    assert b"parquet.avro.schema" not in kept


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("in put's.jsonl", '{"prompt": "hello"}\n{"prompt": "two\\nlines"}\n'),
        ("in.json", '{"prompt": "hello"}\n{"prompt": "two\\nlines"}\n'),
        ("in.v2.csv", 'prompt\nhello\n"two\nlines"\n'),
        ("in.TSV", 'prompt\tn\nhello\t1\n"two\nlines"\t2\n'),
    ],
)
def test_other_formats_come_with_the_command_that_converts_them(cli: Cli, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "data" / name
    path.parent.mkdir()
    path.write_text(text)
    for given in (path, path.parent):
        result = cli("run", str(given), "--target", TARGET, code=2)
        command = shlex.split(" ".join(result.output.split()).split("convert it first: ")[1])
        assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True)
    cli.run(path.parent, "--out", "out.parquet")
    assert pq.read_table(cli.folder / "out.parquet")["prompt"].to_pylist() == ["hello", "two\nlines"]


def test_the_plan_counts_no_tokens_beyond_the_context(cli: Cli, write_prompts: WritePrompts) -> None:
    arguments = ("run", str(write_prompts(["a", "b"])), "--target", TARGET, "--max-tokens", "1000000", "--dry-run")
    plan = cli.json(*arguments)["plan"]
    assert plan["output tokens at most"] == 2 * (plan["context, tokens"] - 1)
    assert any("max_tokens 1000000 is beyond the context" in remark for remark in plan["notes"])
