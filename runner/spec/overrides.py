"""From a command line to a job spec: flags lie over a job file, `--set` lies over both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from runner.errors import SpecError, UsageError
from runner.spec.job_file import absolute_paths, load_yaml, merge, read_spec_file
from runner.spec.names import with_name
from runner.spec.parse import parse_spec, row_methods
from storage.spec import JobSpec
from workers.engine.api.config import DRAFTERS, DRAFTING, OPTIONS_OF_METHODS

JOB_FILE_SUFFIXES = (".yaml", ".yml", ".json")


def build_spec(inputs: Sequence[str], flags: Mapping[str, Any], settings: Sequence[str] = ()) -> JobSpec:
    """Spec of a `run` command: INPUT is Parquet, or one job file that the flags are laid over; None is not given.

    Raises `UsageError` (or `SpecError`), naming the option or the key.
    """
    base = _base(inputs)
    over = absolute_paths(_set(flags, settings), Path.cwd())
    _settle_method(_section(base, "engine"), _section(over, "engine"))
    return with_name(parse_spec(merge(base, over), f"no model is named: {_how_to_name_it(inputs)}"))


def require_job_file(path: str) -> None:
    """Raise `UsageError` for anything else, such as the Parquet file that `run` would take."""
    if not path.endswith(JOB_FILE_SUFFIXES):
        raise UsageError(
            f"a job file ({', '.join(JOB_FILE_SUFFIXES)}) is needed, not {path}: it names the input (input.paths) and"
            " the model (engine.target); `nightdraft run` takes Parquet files themselves"
        )


def _how_to_name_it(inputs: Sequence[str]) -> str:
    if inputs and inputs[0].endswith(JOB_FILE_SUFFIXES):
        return f"set engine.target in {inputs[0]}, for example to smollm2-135m"
    return "add --target MODEL, for example --target smollm2-135m"


def _base(inputs: Sequence[str]) -> dict[str, Any]:
    job_files = [path for path in inputs if path.endswith(JOB_FILE_SUFFIXES)]
    if not job_files:
        return absolute_paths({"input": {"paths": list(inputs)}}, Path.cwd())
    if len(inputs) > 1:
        raise UsageError(f"{job_files[0]} is a job file and names its own input; give it alone")
    return read_spec_file(job_files[0])


def _set(flags: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    result = dict(flags)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE, for example sampling.top_k=40; got {setting!r}")
        try:
            parsed = load_yaml(value)
        except SpecError as error:
            raise SpecError(*(f"--set {key}: {problem}" for problem in error.problems)) from error
        except yaml.YAMLError as error:
            raise UsageError(f"--set {key}: {value!r} is not a YAML value: {error}") from error
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        result = merge(result, parsed)
    return result


def _section(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """The section itself, or an empty one where it is missing or wrong (which `parse_spec` refuses by name)."""
    section = spec.get(name)
    return section if isinstance(section, dict) else {}


def _settle_method(base: dict[str, Any], over: dict[str, Any]) -> None:
    """--draft implies draft_model; another --method drops what the file sets for its own and no row can ask for.

    How long drafts are is not meant for one method: it stays, unless nothing drafts.
    """
    flags, from_file = _section(over, "speculation"), _section(base, "speculation")
    by_row = set(row_methods(flags) or row_methods(from_file))
    drafters = {from_file.get("method"), *by_row} & set(DRAFTERS)
    if flags.get("draft") and not flags.get("method") and not drafters:
        flags["method"] = "draft_model"
    if flags.get("method") and flags["method"] != from_file.get("method"):
        for key, methods in OPTIONS_OF_METHODS.items():
            users = by_row | {flags["method"]} if methods == DRAFTING else by_row
            if users.isdisjoint(methods):
                from_file.pop(key, None)
