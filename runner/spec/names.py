"""The name of a job that was not given one: the same command gets the same name, so running it again resumes."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from runner.spec.parse import default_spec
from storage.spec import JobSpec


def with_name(spec: JobSpec) -> JobSpec:
    """The spec with its own name, or with one derived from its input and its content."""
    return spec if spec.name else replace(spec, name=derive_name(spec))


def derive_name(spec: JobSpec) -> str:
    """`<first input>-<target>-<8 hex digits of what differs from the defaults>`, in lower case."""
    stem = _word(spec.input.paths[0].rstrip("/"))
    target = str(spec.engine["target"])
    given = _given(spec.to_json(), default_spec().to_json())
    digest = hashlib.blake2b(json.dumps(given, sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{stem}-{_word(target)}-{digest}"


def _given(section: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What is not the default, so that a later version with more keys derives the same name."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            value = _given(value, default)
            default = {}
        if value != default:
            found[key] = value
    return found


def _word(path: str) -> str:
    name = PurePosixPath(path).name.lower().removesuffix(".parquet").removesuffix(".gguf")
    return re.sub(r"[^a-z0-9]+", "-", name.split(":")[0]).strip("-")[:40] or "job"
