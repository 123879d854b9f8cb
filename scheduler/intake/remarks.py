"""What is told of an input that is read as asked, and still may not do what its owner expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.intake.columns import carried_columns
from storage.errors import MAX_SHOWN
from storage.files.export import renamed_columns
from storage.spec import InputSpec

SAMPLING_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids",
    "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "max_new_tokens",
    "max_completion_tokens",
)  # fmt: skip
"""Columns of these names look as if rows were sampled by them."""


def skipped_files(skipped: Sequence[str]) -> Iterator[str]:
    """Of the files of directories that are left out."""
    if skipped:
        more = f" and {len(skipped) - MAX_SHOWN} more" if len(skipped) > MAX_SHOWN else ""
        yield (
            f"files in the input's directories that are not read, since their names are not those of Parquet files or"
            f" begin with _ or .: {', '.join(map(_printable, skipped[:MAX_SHOWN]))}{more}"
        )


def _printable(name: str) -> str:
    """A file's name may be no text; it is shown in terminals and kept in the store."""
    return name.encode(errors="backslashreplace").decode()


def column_remarks(spec: InputSpec, columns: Sequence[str], clashing: Sequence[str]) -> Iterator[str]:
    """Of the columns of the files, and of the folders' keys that files have as a column as well."""
    for name in clashing:
        yield f"folders named {name}=... give no column: the files have a column {name!r} of their own, which is kept"
    sampling = [name for name in carried_columns(spec, columns) if name in SAMPLING_NAMES]
    if sampling:
        names = ", ".join(map(repr, sampling))
        yield (
            f"column {names} is carried and not obeyed: a row's own sampling parameters are read from one column"
            f" {spec.sampling_column or 'sampling_params'!r}, a struct such as {{{sampling[0]}: ...}} or its JSON text"
        )
    for name, new in renamed_columns(columns).items():
        yield f"column {name!r} is named like a column of results: exports have it as {new!r}"
