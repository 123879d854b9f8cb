"""`nightdraft run` from Parquet to Parquet on the scripted model, and the commands that look at the job afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.cli import TARGET, Cli
from tests.support.models.tiny import config_of, save

WritePrompts = Callable[..., Path]


@pytest.fixture
def prompts(write_prompts: WritePrompts) -> Path:
    return write_prompts([f"prompt {n}" for n in range(20)], category=["a", "b"] * 10)


def test_every_row_is_answered_and_exported_in_order(cli: Cli, prompts: Path) -> None:
    summary = cli.run(prompts, "--chunk-rows", "3", "--out", "out", "--name", "first")
    assert (summary["state"], summary["num_ok"], summary["num_errors"]) == ("completed", 20, 0)
    assert summary["num_output_tokens"] == summary["num_spec_steps"] + summary["num_accepted_draft_tokens"]
    assert summary["tokens_per_second"] > 0
    table = pq.read_table(cli.folder / "out/first.parquet")
    assert table["prompt"].to_pylist() == [f"prompt {n}" for n in range(20)]
    assert table["_row_index"].to_pylist() == list(range(20))
    assert set(table["_status"].to_pylist()) == {"ok"}


@pytest.mark.parametrize("kept", [True, False])
def test_token_ids_are_exported_where_they_are_kept(cli: Cli, prompts: Path, kept: bool) -> None:
    cli.run(prompts, "--set", f"keep_token_ids={json.dumps(kept)}", "--out", "ids.parquet")
    table = pq.read_table(cli.folder / "ids.parquet")
    assert ("output_token_ids" in table.column_names) == kept
    if kept:
        lengths = [len(ids) for ids in table["output_token_ids"].to_pylist()]
        assert lengths == table["num_output_tokens"].to_pylist()


def test_what_ended_an_answer_is_recorded_and_exported(cli: Cli, prompts: Path) -> None:
    cli.run(
        prompts, "--limit", "4", "--set", "keep_token_ids=true", "--out", "free.parquet", target="scripted:eos_every=0"
    )
    ids = pq.read_table(cli.folder / "free.parquet")["output_token_ids"].to_pylist()
    text = next(chr(token) for token in ids[0] if 32 < token < 127)
    sampling = ("--set", f"sampling.stop=[{json.dumps(text)}]", "--set", f"sampling.stop_token_ids=[{ids[1][5]}]")
    cli.run(prompts, "--limit", "4", *sampling, "--name", "j", "--out", "j.parquet", target="scripted:eos_every=0")
    exported = pq.read_table(cli.folder / "j.parquet").select(["finish_reason", "stop_reason"]).to_pylist()
    assert exported[0] == {"finish_reason": "stop", "stop_reason": text}
    assert exported[1]["stop_reason"] == str(ids[1][5])
    recorded = "SELECT r.finish_reason, r.stop_reason FROM results r JOIN jobs j ON j.id = r.job_id WHERE j.name = 'j'"
    assert cli.json("sql", f"{recorded} ORDER BY row_index") == exported


def test_the_final_table_shows_the_counts(cli: Cli, prompts: Path) -> None:
    result = cli("run", str(prompts), "--target", TARGET, "--max-tokens", "8", "--method", "ngram")
    for words in (
        "completed",
        "20 of 20",
        "output tokens",
        "tokens/s over that time",
        "tokens/s of this run",
        "mean acceptance length",
        "draft acceptance rate",
    ):
        assert words in result.stdout


def test_methods_give_the_same_answers(cli: Cli, prompts: Path) -> None:
    arguments = ("--temperature", "0.3", "--seed", "5", "--max-tokens", "60", "--limit", "6", "--out")
    target = "scripted:order=1,eos_every=0"
    cli.run(prompts, *arguments, "none.parquet", target=target)
    summary = cli.run(prompts, *arguments, "ngram.parquet", "--method", "ngram", "--policy", "fixed", target=target)
    assert summary["num_draft_tokens"] > 0
    assert summary["mean_acceptance_length"] >= 1.0
    answers = [pq.read_table(cli.folder / f"{m}.parquet")["output_text"].to_pylist() for m in ("none", "ngram")]
    assert answers[0] == answers[1]


def test_the_same_command_returns_the_same_job(cli: Cli, prompts: Path) -> None:
    first = cli.run(prompts)
    second = cli.run(prompts)
    assert second["id"] == first["id"]
    assert second["tokens_per_second"] is None, "this run generated nothing"
    assert len(cli.json("status")) == 1


def test_every_command_states_the_job_s_own_time_and_rate(cli: Cli, prompts: Path) -> None:
    first = cli.run(prompts, "--name", "j")
    rate = first["num_output_tokens"] / first["seconds"]
    again, (listed,), status = cli.run(prompts, "--name", "j"), cli.json("status"), cli.json("status", "j")
    watched = json.loads(cli("watch", "j", "--json").stdout.splitlines()[-1])
    for shown in (first, again, status, listed, watched):
        assert shown["seconds"] == first["seconds"]
        assert shown["output_tokens_per_second"] == pytest.approx(rate)
    sql = "SELECT output_tokens_per_second AS rate FROM throughput WHERE job_name = 'j'"
    assert cli.json("sql", sql)[0]["rate"] == pytest.approx(rate, rel=0.05)
    assert f"{rate:.1f}" in cli("status", "j").stdout
    [decoding] = cli.json("sql", "SELECT decode_tokens_per_second AS rate, engine_seconds FROM throughput")
    assert decoding["rate"] == pytest.approx(status["decode_tokens_per_second"])
    assert decoding["rate"] > rate, "loading is in the time of the job, and not in that of its steps"
    assert f"{decoding['rate']:.1f}" in cli("status", "j").stdout
    rerun = cli("run", str(prompts), "--target", TARGET, "--max-tokens", "16", "--name", "j")
    assert f"{rate:.1f}" in rerun.stdout
    assert "job j is completed already" in rerun.stderr
    assert "of this run" not in rerun.stdout


def test_a_complete_job_is_shown_without_its_models(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(model, config_of("Llama"))
    arguments = (prompts, "--limit", "1", "--name", "done")
    first = cli.run(*arguments, target=str(model))
    shutil.rmtree(model)
    assert cli.run(*arguments, target=str(model))["id"] == first["id"]


def test_a_changed_spec_or_input_is_refused_by_name_and_new_starts_afresh(
    cli: Cli, prompts: Path, write_prompts: WritePrompts
) -> None:
    first = cli.run(prompts, "--name", "n")
    arguments = ("run", str(prompts), "--target", TARGET, "--name", "n", "--max-tokens")
    refused = cli(*arguments, "17", code=2)
    assert "sampling.max_tokens: 16 -> 17" in refused.output
    write_prompts(["other"] * 3)
    assert "prompts.parquet" in cli(*arguments, "16", code=2).output
    fresh = cli.json(*arguments, "16", "--new")
    assert (fresh["name"], fresh["num_rows"]) == ("n-2", 3)
    assert fresh["id"] != first["id"]


def test_bad_rows_are_errors_with_codes_and_exit_code_3(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(
        ["fine", None, "nul \x00", "also fine"], sampling_params=[None, None, None, '{"temperature": -1}']
    )
    summary = cli.run(path, "--name", "bad", code=3)
    assert (summary["state"], summary["num_ok"], summary["num_errors"]) == ("completed", 1, 3)
    groups = {group["error_code"]: group["num_errors"] for group in summary["errors"]}
    assert groups == {"null_prompt": 1, "invalid_text": 1, "invalid_params": 1}
    assert [row["row_index"] for row in cli.json("errors", "bad")] == [1, 2, 3]
    assert {group["error_code"] for group in cli.json("errors", "bad", "--group")} == set(groups)
    assert "null_prompt" in cli("errors", "bad").stdout
    assert "invalid_params" in cli("status", "bad").stdout


def test_retry_failed_generates_errors_again_by_the_same_command(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["fine", None])
    cli.run(path, "--name", "r", code=3)
    assert cli.json("retry", "r", "--failed")["chunks"] == 1
    assert cli.json("status", "r")["state"] == "queued"
    summary = cli.run(path, "--name", "r", code=3)
    assert (summary["num_ok"], summary["num_errors"]) == (1, 1)


def test_no_rows_complete_at_once(cli: Cli, write_prompts: WritePrompts) -> None:
    summary = cli.run(write_prompts([]), "--out", "out.parquet")
    assert (summary["state"], summary["num_results"]) == ("completed", 0)
    assert pq.read_table(cli.folder / "out.parquet").num_rows == 0


def test_too_many_errors_fail_the_job(cli: Cli, write_prompts: WritePrompts) -> None:
    summary = cli.run(write_prompts([None] * 5), "--set", "max_error_rate=0.5", code=1)
    assert (summary["state"], summary["error_code"]) == ("failed", "max_error_rate")


def test_a_job_file_runs_and_flags_lie_over_it(cli: Cli, prompts: Path) -> None:
    job = cli.folder / "job.yaml"
    job.write_text(
        f"name: filed\ninput: {{paths: {prompts.name}}}\nengine: {{target: '{TARGET}'}}\nsampling: {{max_tokens: 4}}\n"
    )
    summary = cli.json("run", "job.yaml", "--limit", "5")
    assert (summary["name"], summary["num_results"]) == ("filed", 5)


def test_samples_are_counted_and_differ(cli: Cli, prompts: Path) -> None:
    summary = cli.run(prompts, "--limit", "2", "--set", "sampling.n=3", "--temperature", "1", "--out", "n.parquet")
    assert summary["num_results"] == 6
    table = pq.read_table(cli.folder / "n.parquet")
    assert table["_sample"].to_pylist() == [0, 1, 2, 0, 1, 2]
    assert len(set(table["output_text"].to_pylist())) > 2


def test_sql_in_every_format(cli: Cli, prompts: Path) -> None:
    cli.run(prompts, "--name", "q", "--method", "ngram")
    query = (
        "SELECT value, num_results, mean_acceptance_length FROM acceptance_by_carried "
        "WHERE column_name = 'category' ORDER BY value"
    )
    assert [row["value"] for row in cli.json("sql", query)] == ["a", "b"]
    assert cli("sql", query, "--format", "csv").stdout.splitlines()[0] == "value,num_results,mean_acceptance_length"
    assert "num_results" in cli("sql", query).stdout
    cli("sql", query, "--format", "parquet", "--out", "q.parquet")
    assert pq.read_table(cli.folder / "q.parquet")["num_results"].to_pylist() == [10, 10]
    mixed = "SELECT 1 AS x UNION ALL SELECT 'text'"
    assert "CAST it" in cli("sql", mixed, "--format", "parquet", "--out", "m.parquet", code=2).output
    cli("sql", "SELECT row_index FROM results", "--format", "csv", "--out", "q.csv")
    assert len((cli.folder / "q.csv").read_text().splitlines()) == 21


def test_export_of_a_job_that_has_not_ended_needs_partial(cli: Cli, prompts: Path) -> None:
    job = cli.folder / "job.yaml"
    job.write_text(f"name: waiting\ninput: {{paths: {prompts.name}}}\nengine: {{target: '{TARGET}'}}\n")
    submitted = cli.json("submit", "job.yaml")
    assert (submitted["state"], submitted["resumed"]) == ("queued", False)
    assert cli.json("submit", "job.yaml")["resumed"]
    cli("export", "waiting", "--out", "w.parquet", code=2)
    cli("export", "waiting", "--out", "w.parquet", "--partial")
    assert pq.read_table(cli.folder / "w.parquet").num_rows == 0
    assert "keep_token_ids" in cli("export", "waiting", "--out", "w.parquet", "--token-ids", "--partial", code=2).output


def test_cancel_resume_and_watch(cli: Cli, prompts: Path) -> None:
    job = cli.folder / "job.yaml"
    job.write_text(
        f"name: c\ninput: {{paths: {prompts.name}}}\nengine: {{target: '{TARGET}'}}\nsampling: {{max_tokens: 4}}\n"
    )
    cli("submit", "job.yaml")
    assert cli.json("cancel", "c")["state"] == "cancelled"
    cli("watch", "c", code=1)
    assert cli.json("resume", "c")["chunks"] > 0
    assert cli.json("run", "job.yaml")["state"] == "completed"
    lines = cli("watch", "c", "--json").stdout.splitlines()
    assert '"completed"' in lines[-1]


def test_what_export_and_retry_did_is_a_readable_line(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["fine", None], output_text=["a", "b"])
    cli.run(path, "--name", "bad", code=3)
    line = cli("export", "bad", "--out", "o.parquet").stdout
    assert line.startswith("o.parquet: 2 rows (1 ok, 1 failed), ")
    assert line.endswith("; renamed: output_text to input_output_text\n")
    assert cli.json("export", "bad", "--out", "o.parquet")["renamed"] == {"output_text": "input_output_text"}
    assert "bad: 1 chunk with failed rows is back in line" in cli("retry", "bad", "--failed").stdout
    cli.run(write_prompts(["fine"]), "--name", "good")
    assert cli("retry", "good", "--failed").stdout == "good: no failed rows\n"
