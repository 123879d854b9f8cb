"""What changed between two specs, or between the input as submitted and as it is now: field, was, is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scheduler.errors import Difference
from storage.files.locations import shown_size, shown_versions
from storage.records import InputFile
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


def input_differences(was: Sequence[InputFile], now: Sequence[InputFile]) -> list[Difference]:
    """Files by path; a file that is the same in everything does not appear."""
    old, new = {file.path: file for file in was}, {file.path: file for file in now}
    gone = [Difference(path, _rows(old[path]), "not in the input") for path in old if path not in new]
    added = [Difference(path, "not in the input", _rows(new[path])) for path in new if path not in old]
    changed = [difference for path in old if path in new for difference in _file(old[path], new[path])]
    if gone or added or changed or list(old) == list(new):
        return gone + added + changed
    return [Difference("order of the files", ", ".join(old), ", ".join(new))]


def _file(was: InputFile, now: InputFile) -> Iterator[Difference]:
    if was.schema != now.schema:
        yield from _schema(was, now)
    if was.row_groups != now.row_groups:
        yield Difference(f"{was.path}: rows", _rows(was), _rows(now))
    if was.size != now.size:
        yield Difference(f"{was.path}: size", shown_size(was.size), shown_size(now.size))
    elif was.modified != now.modified:
        yield Difference(f"{was.path}: modified", *shown_versions(was.path, was.modified, now.modified))


def _schema(was: InputFile, now: InputFile) -> Iterator[Difference]:
    old, new = (dict(line.split(": ", 1) for line in file.schema.splitlines()) for file in (was, now))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    for name in changed:
        yield Difference(f"{was.path}: column {name!r}", old.get(name, "none"), new.get(name, "none"))
    if not changed:
        yield Difference(f"{was.path}: order of the columns", ", ".join(old), ", ".join(new))


def _rows(file: InputFile) -> str:
    groups = len(file.row_groups)
    return f"{file.num_rows:,} rows in {groups:,} row group{'' if groups == 1 else 's'}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return UNSET if value is None else json.dumps(value, ensure_ascii=False)
