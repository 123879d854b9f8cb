"""What changed between two specs: field, was, is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from storage.errors import Difference
from storage.spec import JobSpec

UNSET = "(not set)"
NOT_COMPARED = ("name", "input.paths")
"""The name is how the job was found; the files themselves are compared instead of how they were spelled."""


def spec_hash(spec: JobSpec) -> str:
    """Equal for specs with the same fields (a value that is null counts as not set)."""
    fields = {field: value for field, value in _flat(spec.to_json()) if field not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def spec_differences(was: JobSpec, now: JobSpec, defaults: JobSpec | None = None) -> list[Difference]:
    """Fields by dotted name, in the order of `was`, then new ones.

    A stored spec may be older than a field. It then means what workers take it for: the field's default of today.
    """
    known = {} if defaults is None else {"engine": defaults.engine, "sampling": defaults.sampling}
    old, new = dict(_flat(_completed(was.to_json(), known))), dict(_flat(now.to_json()))
    fields = [field for field in {**old, **new} if field not in NOT_COMPARED]
    changed = [field for field in fields if old.get(field) != new.get(field)]
    return [Difference(field, _shown(old.get(field)), _shown(new.get(field))) for field in changed]


def _completed(spec: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with the defaults of the fields that it lacks; one that is null is there."""
    result = dict(spec)
    for key, default in defaults.items():
        value = result.setdefault(key, default)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            result[key] = _completed(value, default)
    return result


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return UNSET if value is None else json.dumps(value, ensure_ascii=False)
