"""Rows to requests: every kind of bad row has its code, and costs no other row anything."""

from __future__ import annotations

from typing import Any

import pytest

from storage.spec import InputSpec, JobSpec
from tests.support.fake_engine import FakeTokenizer
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.errors import BadRow, InvalidSpec
from workers.rows.prepare import PreparedRow, Preparer, RejectedRow
from workers.rows.read import Row
from workers.rows.settings import engine_config, with_engine

CONTEXT = 64


def job_spec(**changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "input": InputSpec(paths=("x.parquet",), prompt_column="prompt"),
        "engine": {"target": "fake"},
        "sampling": {"temperature": 0.5, "max_tokens": 8},
    }
    return JobSpec(**{**values, **changes})


def messages_spec(**changes: Any) -> JobSpec:
    return job_spec(input=InputSpec(paths=("x.parquet",), messages_column="messages"), **changes)


def prepare(rows: list[Row], job: JobSpec | None = None, *, template: bool = True) -> list[PreparedRow | RejectedRow]:
    job = job or job_spec()
    return Preparer(job, engine_config(job), FakeTokenizer(template), CONTEXT).prepare(rows)


def prepare_one(row: Row, job: JobSpec | None = None, *, template: bool = True) -> PreparedRow:
    prepared = prepare([row], job, template=template)[0]
    assert isinstance(prepared, PreparedRow), prepared
    return prepared


def text_of(prepared: PreparedRow) -> str:
    return FakeTokenizer().decode(prepared.token_ids)


USER = {"role": "user", "content": "hi"}
TEXT = {"type": "text", "text": "hi", "image_url": None}
CALLS = [{"type": "function", "function": {"name": "get", "arguments": "{}"}}]

BAD_PROMPTS = [
    (Row(0, None), "null_prompt", "null"),
    (Row(0, "x" * 100), "prompt_too_long", "64"),
    (Row(0, "a\ud800b"), "invalid_text", "position 1"),
    (Row(0, "ab\x00"), "invalid_text", "position 2"),
    (Row(0, 7), "invalid_text", "int"),
    (Row(0, "UNTOKENISABLE"), "preparation_failed", "the tokenizer broke"),
    (Row(0, "hi", {"temperature": -1.0}), "invalid_params", "temperature"),
    (Row(0, "hi", {"temprature": 1.0}), "invalid_params", "did you mean 'temperature'"),
    (Row(0, "hi", '{"top_p": 2}'), "invalid_params", "top_p"),
    (Row(0, "hi", "{"), "invalid_params", "JSON"),
    (Row(0, "hi", '{"stop": "' + "x" * 2_000_000 + '"}'), "invalid_params", "2,000,012 characters"),
    (Row(0, "hi", '"greedy"'), "invalid_params", "object"),
    (Row(0, "hi", "[1]"), "invalid_params", "object"),
    (Row(0, "hi", 3), "invalid_params", "struct"),
    (Row(0, "hi", {"n": 2}), "invalid_params", "n is the job's"),
    (Row(0, "hi", {"stop": ["a\x00"]}), "invalid_text", "stop"),
    (Row(0, "hi", {"bad_words": "no"}), "invalid_params", "bad_words"),
    (Row(0, "hi", {"logit_bias": {"x": 1.0}}), "invalid_params", "logit_bias must be a mapping"),
    (Row(0, None, problem=BadRow("invalid_text", "not UTF-8")), "invalid_text", "UTF-8"),
]

BAD_MESSAGES = [
    (None, "null_prompt", "null"),
    ([], "empty_messages", "empty"),
    ("[]", "empty_messages", "empty"),
    ("{", "bad_message", "JSON"),
    ("{}", "bad_message", "list"),
    ([USER, "hi"], "bad_message", "message 1"),
    ([{"role": "user"}], "bad_message", "content"),
    ([{"content": "hi"}], "bad_message", "role"),
    ([{"role": "user", "content": None}], "bad_message", "content"),
    ([{"role": "wizard", "content": "hi"}], "unknown_role", "wizard"),
    ('[{"role": "user", "content": "\\ud800"}]', "invalid_text", "surrogate"),
    ([{"role": "user", "content": "a\x00"}], "invalid_text", "NUL"),
    ([{"role": "system", "content": "REFUSE"}, USER], "template_error", "System role not supported"),
    ([{"role": "user", "content": []}], "bad_message", "no text in content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "bad_message", "part 0 of the content of message 0 (user)"),
    (
        [USER, {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "data:..."}}]}],
        "bad_message",
        "part 1 of the content of message 1 (user) is of type 'image_url': this engine answers text alone",
    ),
    ([{"role": "assistant", "content": None, "tool_calls": []}], "bad_message", "no text in content"),
    ([{"role": "assistant", "tool_calls": CALLS}], "template_error", "no place for tool calls"),
    (
        {"model": "m", "messages": [USER]},
        "bad_message",
        "request in OpenAI's form; the column must hold the list under",
    ),
    ('{"custom_id": "1", "body": {"messages": []}}', "bad_message", "under its key 'messages' in 'body'"),
    ([{"model": "m", "messages": [USER]}], "bad_message", "the list under its key 'messages'"),
    ([{"role": "user", "content": {"a": "b" * 9999}}], "bad_message", "bbb..."),
]


@pytest.mark.parametrize(("row", "code", "says"), BAD_PROMPTS)
def test_a_bad_prompt_row_is_its_own_error(row: Row, code: str, says: str) -> None:
    before, bad, after = prepare([Row(5, "before"), row, Row(6, "after")])
    assert isinstance(before, PreparedRow)
    assert isinstance(after, PreparedRow)
    assert isinstance(bad, RejectedRow)
    assert (bad.code, bad.row) == (code, row)
    assert says in bad.message


@pytest.mark.parametrize(("value", "code", "says"), BAD_MESSAGES)
def test_bad_messages_are_their_own_error(value: Any, code: str, says: str) -> None:
    bad, good = prepare([Row(0, value), Row(1, [USER])], messages_spec())
    assert isinstance(good, PreparedRow)
    assert isinstance(bad, RejectedRow)
    assert bad.code == code
    assert says in bad.message


def test_an_empty_text_without_template_has_nothing_to_answer() -> None:
    bad = prepare([Row(0, "")], job_spec(chat_template=False))[0]
    assert isinstance(bad, RejectedRow)
    assert bad.code == "empty_prompt"


def test_prompts_go_through_the_template_when_there_is_one() -> None:
    assert text_of(prepare_one(Row(0, "hi"))) == "<user>hi\n<assistant>"
    assert text_of(prepare_one(Row(0, "hi"), template=False)) == "hi"
    assert text_of(prepare_one(Row(0, "hi"), job_spec(chat_template=False))) == "hi"


@pytest.mark.parametrize(
    "value",
    [
        [USER],
        [[("role", "user"), ("content", "hi")]],
        [{**USER, "name": None}],
        '[{"role": "user", "content": "hi"}]',
        [{"role": "user", "content": [TEXT]}],
    ],
    ids=["structs", "maps", "null fields", "json", "parts"],
)
def test_messages_come_as_structs_maps_or_json(value: Any) -> None:
    assert text_of(prepare_one(Row(0, value), messages_spec())) == "<user>hi\n<assistant>"


def test_the_system_prompt_goes_in_front_unless_the_row_has_its_own() -> None:
    job = messages_spec(system_prompt="Be brief")
    own = [{"role": "system", "content": "Be long"}, USER]
    assert text_of(prepare_one(Row(0, [USER]), job)).startswith("<system>Be brief\n<user>")
    assert text_of(prepare_one(Row(0, own), job)).startswith("<system>Be long\n<user>")
    assert text_of(prepare_one(Row(0, "hi"), job_spec(system_prompt="Be brief"))).startswith("<system>Be brief\n")


@pytest.mark.parametrize(
    ("job", "template", "says"),
    [
        (messages_spec(), False, "the messages of column 'messages' need a chat template"),
        (messages_spec(chat_template=False), True, "chat_template is false"),
        (job_spec(chat_template=True), False, "chat_template true needs a chat template"),
        (job_spec(system_prompt="Be brief"), False, "system_prompt needs a chat template"),
        (job_spec(system_prompt="Be brief", chat_template=False), True, "system_prompt needs a chat template"),
    ],
)
def test_what_needs_a_template_ends_the_job_when_there_is_none(job: JobSpec, template: bool, says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        prepare([Row(0, "hi" if job.input.prompt_column else [USER])], job, template=template)


def test_parts_of_a_content_are_lines_and_a_template_may_show_tool_calls() -> None:
    parts = [{"role": "user", "content": [TEXT, {"type": "text", "text": "there"}]}]
    assert text_of(prepare_one(Row(0, parts), messages_spec())) == "<user>hi\nthere\n<assistant>"

    class ToolTokenizer(FakeTokenizer):
        def render(self, messages: Any, *, parse_content: bool = False) -> str:
            return "".join(f"{m.get('content', '')}{m.get('tool_calls', '')}" for m in messages)

    value = [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}]
    prepared = Preparer(messages_spec(), EngineConfig("fake"), ToolTokenizer(), 999).prepare([Row(0, value)])[0]
    assert isinstance(prepared, PreparedRow)
    assert text_of(prepared) == f"hi{CALLS}"


@pytest.mark.parametrize(
    "value",
    [
        {"temperature": 0.9, "top_k": None},
        [("temperature", 0.9)],
        '{"temperature": 0.9}',
    ],
    ids=["struct", "map", "json"],
)
def test_a_rows_parameters_go_over_the_jobs(value: Any) -> None:
    params = prepare_one(Row(0, "hi", value)).params
    assert (params.temperature, params.max_tokens, params.top_k) == (0.9, 8, 0)


@pytest.mark.parametrize("value", [None, {"temperature": None}, [], "{}", "null"])
def test_a_row_without_parameters_takes_the_jobs(value: Any) -> None:
    assert prepare_one(Row(0, "hi", value)).params.temperature == 0.5


def test_bad_words_are_tokenised_as_they_start_a_text_and_as_they_follow_a_space() -> None:
    job = job_spec(sampling={"bad_words": ["no"]})
    assert prepare_one(Row(0, "hi"), job).params.bad_words == (tuple(b"no"), tuple(b" no"))
    own = prepare_one(Row(0, "hi", {"bad_words": ["never"]}), job).params.bad_words
    assert own == (tuple(b"never"), tuple(b" never"))


@pytest.mark.parametrize(("sampling", "says"), [({"temperature": -1}, "temperature"), ({"topp": 1}, "top_p")])
def test_wrong_parameters_of_the_job_end_the_job(sampling: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidSpec, match=says):
        prepare([Row(0, "hi")], job_spec(sampling=sampling))


def test_requests_have_seeds_of_their_own_and_keep_a_given_one() -> None:
    prepared = prepare_one(Row(3, "hi"), job_spec(sampling={"n": 2}))
    first, second = prepared.requests((7, 1), [0, 1], job_seed=0, job_id="job")
    assert (first.id, second.id) == ((7, 1, 3, 0), (7, 1, 3, 1))
    assert first.params.seed != second.params.seed
    again = prepared.requests((8, 4), [1], job_seed=0, job_id="job")[0]
    assert again.params.seed == second.params.seed
    given = prepare_one(Row(3, "hi", {"seed": 11})).requests((7, 1), [0], job_seed=0, job_id="job")[0]
    assert given.params.seed == 11


MIXED = EngineConfig(target="fake", speculation=SpeculationConfig(method="ngram", row_methods=("suffix", "none")))


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "none"])
def test_a_row_names_its_speculation_method_and_drafts_are_shared_within_the_job(method: str | None) -> None:
    prepared = prepare_one(Row(0, "hi", speculation=method), with_engine(job_spec(), MIXED))
    (request,) = prepared.requests((1, 1), [0], job_seed=0, job_id="job")
    assert (request.method, request.scope) == (method, "job")


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("sufix", "did you mean 'suffix'"),
        ("medusa", "one of this job's: ngram, suffix, none"),
        ("", "one of this job's"),
        (7, "7 is not"),
    ],
)
def test_a_method_that_the_job_does_not_have_is_that_rows_error(method: Any, says: str) -> None:
    bad, good = prepare([Row(0, "hi", speculation=method), Row(1, "hi")], with_engine(job_spec(), MIXED))
    assert isinstance(bad, RejectedRow)
    assert bad.code == "invalid_params"
    assert says in bad.message
    assert isinstance(good, PreparedRow)
