"""The name of a job that was not given one: the same command gets the same name, so running it again resumes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Any

from runner.spec import JobSpec


def with_name(spec: JobSpec) -> JobSpec:
    """The spec with its own name, or with one derived from its input and its content."""
    return spec if spec.name else spec.model_copy(update={"name": derive_name(spec)})


def derive_name(spec: JobSpec) -> str:
    """`<first input>-<target>-<8 hex digits of the whole spec>`, in lower case."""
    stem = _word(spec.input.paths[0].rstrip("/"))
    target = _word(str(spec.engine["target"]))
    return f"{stem}-{target}-{_digest(spec.to_dict())}"


def _digest(spec: dict[str, Any]) -> str:
    content = json.dumps({**spec, "name": None}, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=4).hexdigest()


def _word(path: str) -> str:
    name = PurePosixPath(path).name.removesuffix(".parquet").removesuffix(".gguf")
    return re.sub(r"[^a-z0-9]+", "-", name.split(":")[0].lower()).strip("-")[:40] or "job"
