"""Flags of the commands: each sets a key that the job spec knows, and says the default that applies."""

from __future__ import annotations

from dataclasses import fields

import pytest
from typer.testing import CliRunner

from runner.cli import app
from runner.cli.flags import FLAGS, Flag, Given, description, section_class, takes
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.sampling_params import SamplingParams


@pytest.mark.parametrize("flag", FLAGS.values(), ids=list(FLAGS))
def test_every_flag_sets_a_key_that_a_spec_has(flag: Flag) -> None:
    section, _, key = flag.key.rpartition(".")
    assert key in [item.name for item in fields(section_class(section))]


@pytest.mark.parametrize("flag", FLAGS.values(), ids=list(FLAGS))
def test_a_flag_has_the_words_of_its_field_or_else_its_own(flag: Flag) -> None:
    words = description(flag.key)
    assert (flag.text is None) == (words is not None)
    assert flag.help().startswith(words or str(flag.text))


def test_help_says_the_default_of_the_field() -> None:
    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    assert f"(default: {EngineConfig(target='x').max_batch})" in text
    assert f"(default: {SamplingParams().max_tokens})" in text
    assert f"(default: {SpeculationConfig().policy})" in text
    for name in FLAGS:
        assert name in text
    assert "A column of strings: the prompts." in text


def test_a_default_of_the_command_replaces_that_of_the_spec_in_its_help() -> None:
    text = CliRunner().invoke(app, ["calibrate", "--help"], env={"COLUMNS": "200"}).output
    assert "[default: 64]" in text
    assert f"(default: {SamplingParams().max_tokens})" not in text


def test_what_is_not_said_overrides_nothing() -> None:
    seen: list[Given] = []

    def command(given: Given) -> None:
        seen.append(given)

    takes("--tree-width", "--row-method", "--limit", limit=32)(command)(
        inputs=["a.parquet"], tree_width=None, row_method=[], limit=32
    )
    assert seen[0].flags == {
        "engine": {"speculation": {"tree_width": None, "row_methods": None}},
        "input": {"limit": 32},
    }
