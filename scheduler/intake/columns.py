"""What the columns of the input must be for a job to make sense of them: everything here looks at schemas only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyarrow import types

from scheduler.errors import InvalidInput, near_or_all
from storage.files.arrow_types import unwritable
from storage.files.parquet import FileMetadata
from storage.spec import InputSpec

PROMPT_COLUMN = "prompt"
MESSAGES_COLUMN = "messages"
SAMPLING_COLUMN = "sampling_params"
SPECULATION_COLUMN = "speculation"
"""Columns that are taken for what their name says unless the job names others."""

LIST_TYPES = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
SAME_COLUMNS = "the files of a job need the same columns; add it, drop it, or submit the files as two jobs"
MESSAGE_FIELDS = ("role", "content")


def resolve_columns(spec: InputSpec, schema: pa.Schema) -> InputSpec:
    """The spec with exactly one text column, and those that are found by their name. Raises `InvalidInput`."""
    settled = _with_text_column(spec, schema)
    if settled.sampling_column is None and SAMPLING_COLUMN in schema.names:
        settled = replace(settled, sampling_column=SAMPLING_COLUMN)
    if settled.speculation_column is None and _has_speculation(schema):
        settled = replace(settled, speculation_column=SPECULATION_COLUMN)
    problems = [*_role_problems(settled), *_column_problems(settled, schema)]
    if problems:
        raise InvalidInput(*problems)
    return settled


def _has_speculation(schema: pa.Schema) -> bool:
    """A column of that name which is not text means something else, and is carried."""
    return SPECULATION_COLUMN in schema.names and _is_text(schema.field(SPECULATION_COLUMN).type)


def duplicate_columns(file: FileMetadata) -> Iterator[str]:
    for name, count in Counter(file.schema.names).items():
        if count > 1:
            yield f"{file.path} has {count} columns named {name!r}: rename or drop all but one"


def unwritable_columns(schema: pa.Schema) -> Iterator[str]:
    """The columns that an export could not give back."""
    for name, reason in unwritable(schema):
        yield (
            f"column {name!r} is {schema.field(name).type}, which cannot be exported ({reason}): cast it, or leave it"
            " out of the input"
        )


def schema_problems(files: Sequence[FileMetadata]) -> Iterator[str]:
    """How the columns of the files of one input clash. Their order may differ."""
    first = files[0]
    typed = {name: _first_with_type(files, name) for name in first.schema.names}
    for other in files[1:]:
        for name in first.schema.names:
            if name not in other.schema.names:
                yield f"column {name!r} is in {first.path} but not in {other.path}: {SAME_COLUMNS}"
                continue
            was, now = typed[name].schema.field(name).type, other.schema.field(name).type
            if not _compatible(was, now):
                yield f"column {name!r} is {was} in {typed[name].path} but {now} in {other.path}: cast one of them"
        for name in other.schema.names:
            if name not in typed:
                yield f"column {name!r} is in {other.path} but not in {first.path}: {SAME_COLUMNS}"


def _first_with_type(files: Sequence[FileMetadata], name: str) -> FileMetadata:
    """The first file whose column has a type: one without a single value is stored with type null."""
    having = (file for file in files if name in file.schema.names and not _is_null(file.schema.field(name).type))
    return next(having, files[0])


def _with_text_column(spec: InputSpec, schema: pa.Schema) -> InputSpec:
    if spec.prompt_column and spec.messages_column:
        raise InvalidInput(
            f"both a prompt column ({spec.prompt_column!r}) and a messages column ({spec.messages_column!r}) are set:"
            " a row's text comes from one of them"
        )
    if spec.prompt_column or spec.messages_column:
        return spec
    there = [name for name in (PROMPT_COLUMN, MESSAGES_COLUMN) if name in schema.names]
    if len(there) == 2:
        raise InvalidInput(
            f"the input has a column {PROMPT_COLUMN!r} and a column {MESSAGES_COLUMN!r}: say which one is meant with"
            " --prompt-column or --messages-column"
        )
    if not there:
        near = near_or_all(PROMPT_COLUMN, schema.names) or near_or_all(MESSAGES_COLUMN, schema.names)
        raise InvalidInput(
            f"the input has no column {PROMPT_COLUMN!r} or {MESSAGES_COLUMN!r}: name the text column with"
            f" --prompt-column or --messages-column{near}"
        )
    if there == [PROMPT_COLUMN]:
        return replace(spec, prompt_column=PROMPT_COLUMN)
    return replace(spec, messages_column=MESSAGES_COLUMN)


def _roles(spec: InputSpec) -> dict[str, str]:
    """What each named column is for -> its name."""
    names = {
        "prompt": spec.prompt_column,
        "messages": spec.messages_column,
        "id": spec.id_column,
        "sampling": spec.sampling_column,
        "speculation": spec.speculation_column,
    }
    return {role: name for role, name in names.items() if name}


def carried_columns(spec: InputSpec, columns: Sequence[str]) -> list[str]:
    """The columns that mean nothing to the job."""
    return [name for name in columns if name not in _roles(spec).values()]


def _role_problems(spec: InputSpec) -> Iterator[str]:
    roles = _roles(spec)
    for name, count in Counter(roles.values()).items():
        if count > 1:
            meant = " and ".join(role for role, column in roles.items() if column == name)
            yield f"column {name!r} is named as the {meant} column at once: name different columns"


def _column_problems(spec: InputSpec, schema: pa.Schema) -> Iterator[str]:
    for role, name in _roles(spec).items():
        wanted, fits = _WANTED[role]
        if name not in schema.names:
            yield f"the input has no column {name!r} (the {role} column){near_or_all(name, schema.names)}"
        elif not fits(schema.field(name).type):
            yield (
                f"column {name!r} is {schema.field(name).type}, but the {role} column must be {wanted}:"
                f" cast it, or name another with {_OPTIONS.get(role, f'--{role}-column')}"
            )


def _is_null(kind: pa.DataType) -> bool:
    # A column without a single value has no type of its own; its rows become errors, or nothing to worry about.
    return bool(types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(
        is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    )


def _is_messages(kind: pa.DataType) -> bool:
    if _is_text(kind):
        return True
    return isinstance(kind, LIST_TYPES) and _is_message(kind.value_type)


def _is_message(kind: pa.DataType) -> bool:
    if types.is_map(kind):
        return _is_text(kind.key_type) and _is_text(kind.item_type)
    if not types.is_struct(kind):
        return _is_null(kind)
    fields = {field.name: field.type for field in kind}
    return all(name in fields and _is_text(fields[name]) for name in MESSAGE_FIELDS)


def _is_sampling(kind: pa.DataType) -> bool:
    return _is_text(kind) or types.is_struct(kind) or (types.is_map(kind) and _is_text(kind.key_type))


def _is_id(kind: pa.DataType) -> bool:
    return _is_text(kind) or bool(types.is_integer(kind))


_OPTIONS = {role: f"--set input.{role}_column=NAME" for role in ("sampling", "speculation")}
"""How the columns are named that have no option of their own."""

_WANTED: dict[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "prompt": ("text (string)", _is_text),
    "messages": ("a list of {role, content} structs, or their JSON text", _is_messages),
    "id": ("text or integers", _is_id),
    "sampling": ("a struct, a map or JSON text", _is_sampling),
    "speculation": ("text (string)", _is_text),
}


def _compatible(one: pa.DataType, other: pa.DataType) -> bool:
    """Equal, or text stored another way, or without any value."""
    plain = (types.is_string, types.is_large_string, types.is_string_view)
    both_text = all(any(is_kind(kind) for is_kind in plain) for kind in (one, other))
    return bool(one == other or both_text or _is_null(other))
