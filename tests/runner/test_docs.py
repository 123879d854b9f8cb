"""Commands and SQL in README.md, docs/ and examples/ are real: subcommands, options, keys, columns."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from runner.cli import app
from runner.spec.job_file import read_spec_file
from runner.spec.parse import ENGINE_KEYS, INPUT_KEYS, JOB_KEYS, SAMPLING_KEYS, SPECULATION_KEYS
from storage.store.query import run_sql
from storage.store.store import Store
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.models.executors.scripted import Script

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/demo.sh"]
GROUP = typer.main.get_command(app)


def commands(text: str) -> Iterator[str]:
    """Every `nightdraft ...` command of a page: indented or fenced lines, lines of a script, and inline code."""
    for line in text.replace("\\\n", " ").splitlines():
        code = line.strip().removeprefix("$ ").removeprefix("step ")
        if code != line and re.match(r"nightdraft( |$)", code):
            yield code
        yield from re.findall(r"`(nightdraft [^`]+)`", line)


def words(command: str) -> list[str]:
    if command.count('"') % 2:
        command = command[: command.rindex('"')] + '""'
    return [word for word in shlex.split(command, comments=True)[1:] if word not in ("|", "&&", "...", "·")]


ALL = [
    pytest.param(command, id=f"{page.name}: {command[:60]}") for page in PAGES for command in commands(page.read_text())
]


def test_commands_are_found() -> None:
    assert len(ALL) > 10


@pytest.mark.parametrize("command", ALL)
def test_subcommands_and_options_exist(command: str) -> None:
    command_group, rest = GROUP, words(command)
    while rest and hasattr(command_group, "commands") and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command_group.commands, f"no command {name!r} in: {command}"
        command_group = command_group.commands[name]
    known = {option for parameter in command_group.params for option in parameter.opts} | {"--help"}
    used = {word.partition("=")[0] for word in rest if word.startswith("-") and len(word) > 1}
    assert used <= known, f"unknown {sorted(used - known)} in: {command}"


def sql_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text()
        found = re.findall(r"^```sql\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        found += re.findall(r'nightdraft sql "([^"]+)"', text)
        yield from ((page.name, block) for block in found if "..." not in block)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path_factory.mktemp('docs')}/docs.db") as opened:
        yield opened


@pytest.mark.parametrize(("page", "query"), [pytest.param(*b, id=f"{b[0]}: {b[1][:50]!r}") for b in sql_blocks()])
def test_sql_runs(store: Store, page: str, query: str) -> None:
    for statement in filter(str.strip, re.sub(r"--.*", "", query).split(";")):
        columns, rows = run_sql(store, statement)
        assert columns
        list(rows)


@pytest.mark.parametrize(("page", "query"), [pytest.param(*b, id=f"{b[0]}: {b[1][:50]!r}") for b in sql_blocks()])
def test_sql_can_be_pasted_behind_the_command(page: str, query: str) -> None:
    assert not query.startswith("-"), f"{page}: the command line takes a leading comment for an option"


def keys_of_section(heading: str) -> set[str]:
    """Keys in the first column of the table under a heading of docs/configuration.md."""
    text = (ROOT / "docs/configuration.md").read_text()
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Job", set(JOB_KEYS) - {"input", "engine", "sampling"}),
        ("`input`", set(INPUT_KEYS)),
        ("`engine`", set(ENGINE_KEYS) - {"speculation"}),
        ("`engine.speculation`", set(SPECULATION_KEYS)),
        ("`sampling`", set(SAMPLING_KEYS)),
    ],
)
def test_the_reference_lists_every_key(heading: str, known: set[str]) -> None:
    assert keys_of_section(heading) == known


@pytest.mark.parametrize("config", [EngineConfig, SpeculationConfig, SamplingParams])
def test_the_reference_states_the_defaults(config: type) -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    for item in fields(config):
        if isinstance(item.default, bool | int | float | str):
            shown = f"{item.default:g}" if isinstance(item.default, float) else str(item.default).lower()
            if item.name not in ("kv_memory",):
                assert f"| `{item.name}` | `{shown}` |" in text, f"{item.name}: default is {shown}"


def test_the_reference_lists_the_options_of_scripted_targets_with_their_defaults() -> None:
    text = (ROOT / "docs/configuration.md").read_text().split("## Scripted targets\n", 1)[1].split("\n## ", 1)[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", text, re.MULTILINE))
    defaults = {item.name: item.default for item in fields(Script)}
    assert listed == {name: f"{d:g}" if isinstance(d, int | float) else d or "none" for name, d in defaults.items()}
    targets = re.findall(r"scripted:[\w=,]*", text)
    assert len(targets) > 3
    for target in targets:
        Script.parse(target)


def test_the_example_job_file_is_valid() -> None:
    from runner.spec.overrides import build_spec

    path = ROOT / "examples/job.yaml"
    spec = build_spec([str(path)], {})
    assert spec.name == "demo-from-file"
    assert spec.input.paths == (str(ROOT / "demo/prompts.parquet"),)
    assert read_spec_file(path)["sampling"]["temperature"] == 0.7


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_map_names_modules_that_are_there() -> None:
    text = (ROOT / "docs/code-map.md").read_text()
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        folder = part.partition(":")[0]
        if (ROOT / folder).is_dir():
            names = re.findall(r"^\|([^|]+)\|", part, re.MULTILINE)
            for name in re.findall(r"`([\w.]+/?)`", "".join(names)):
                assert (ROOT / folder / name).exists(), f"the map names {folder}/{name}"


def test_paths_in_the_docs_exist() -> None:
    folders = "runner|scheduler|workers|storage|examples|tests"
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[\w/]+\.\w+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
