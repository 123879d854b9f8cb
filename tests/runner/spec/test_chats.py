"""Chats on the command line: what no row could do is refused at submit, and the switch for control tokens is obeyed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli import TARGET, Cli
from tests.support.models.tiny import config_of, save

CHATML = (
    "{% for m in messages %}{{ '<3>' + m.role + '\n' + m.content + '<2>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<3>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has no chat template; <2> and <3> are special tokens."""
    folder = tmp_path_factory.mktemp("plain")
    save(folder, config_of("Llama"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": "<3>"}))
    return folder


@pytest.fixture
def model(plain_model: Path, tmp_path: Path) -> Path:
    """The same, with a chat template that the test may change."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in plain_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def chats(folder: Path, *contents: Any) -> Path:
    path = folder / "chats.parquet"
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": content}] for content in contents]}), path)
    return path


def test_messages_need_a_template_before_anything_is_recorded(cli: Cli, plain_model: Path) -> None:
    path = chats(cli.folder, "hi", "you")
    for dry in ((), ("--dry-run",)):
        shown = cli("run", str(path), "--target", str(plain_model), *dry, code=2)
        assert "the messages of column 'messages' need a chat template" in shown.output.replace("\n", " ")
    section = f"{{target: {plain_model}}}\nchat_template: false\n"
    (cli.folder / "job.yaml").write_text(f"input: {{paths: {path.name}}}\nengine: {section}")
    assert "chat_template is false" in cli("submit", "job.yaml", code=2).output
    assert cli.json("status") == []


def test_a_template_that_does_not_compile_is_refused_as_well(cli: Cli, model: Path) -> None:
    for source in ("{% for m in messages %}", "{{ messages|wordwrap }}"):
        (model / "chat_template.jinja").write_text(source)
        shown = cli("run", str(chats(cli.folder, "hi")), "--target", str(model), code=2)
        assert "the target's chat template does not compile" in shown.output


def test_a_template_that_runs_wild_costs_its_row_only(cli: Cli, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content * (10 ** messages[0].content|length) }}")
    path = chats(cli.folder, "h", "a longer one")
    job = cli.json("run", str(path), "--target", str(model), "--max-tokens", "4", "--name", "wild", code=3)
    assert (job["num_ok"], job["num_errors"]) == (1, 1)
    (error,) = cli.json("errors", "wild")
    assert error["error_code"] == "template_error"
    assert "more than the 16,777,216 characters" in error["error_message"]


def test_control_tokens_in_content_are_text_unless_the_job_parses_them(cli: Cli, model: Path) -> None:
    path = chats(cli.folder, "a<2>b")
    lengths = {}
    for name, given in (("text", ()), ("parse", ("--set", "special_tokens_in_content=parse"))):
        arguments = ("run", str(path), "--target", str(model), "--max-tokens", "4", *given)
        lengths[name] = cli.json(*arguments, "--dry-run")["prompts"][0]["num_tokens"]
        cli(*arguments, "--name", name)
        assert cli.json(
            "sql", f"SELECT num_prompt_tokens AS n FROM results JOIN jobs ON job_id = id WHERE name = '{name}'"
        ) == [{"n": lengths[name]}]
    # Three letters, or one token.
    assert lengths["text"] == lengths["parse"] + 2
    wrong = cli("run", str(path), "--target", str(model), "--set", "special_tokens_in_content=both", code=2)
    assert "special_tokens_in_content must be 'text' or 'parse'" in wrong.output


def test_a_dry_run_of_which_nothing_would_be_answered_says_so(cli: Cli, write_prompts: Any) -> None:
    path = write_prompts([None, None])
    assert (
        "all of the sampled rows would become errors"
        in cli("run", str(path), "--target", TARGET, "--dry-run", code=3).stdout
    )
    assert len(cli.json("run", str(path), "--target", TARGET, "--dry-run", code=3)["rejected"]) == 2


def test_a_shown_prompt_cannot_write_to_the_terminal(cli: Cli, write_prompts: Any) -> None:
    path = write_prompts(["a\x1b]0;owned\x07b\rc\u202ed\x9be\tf\ng 🌍 é"])
    shown = cli("run", str(path), "--target", TARGET, "--dry-run").stdout
    assert "a\\x1b]0;owned\\x07b\\rc\\u202ed\\x9be" in shown
    assert "\ng 🌍 é" in shown
    assert not set("\x1b\x07\u202e\x9b") & set(shown)
