"""Whether the input of a job is still what it was at submission, and what changed: one comparison, one wording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from storage.errors import Difference, InputChanged, InputNotFound, NotParquet
from storage.files.locations import is_url, shown_size, shown_versions, stat
from storage.files.parquet import read_metadata
from storage.records import InputFile

ADVICE = "Put the old files back, or submit the new ones as a fresh job (--new)."


def changes(was: Sequence[InputFile], now: Sequence[InputFile]) -> list[Difference]:
    """Files by path; a file that is the same in everything does not appear."""
    old, new = {file.path: file for file in was}, {file.path: file for file in now}
    gone = [Difference(path, _rows(old[path]), "not in the input") for path in old if path not in new]
    added = [Difference(path, "not in the input", _rows(new[path])) for path in new if path not in old]
    changed = [difference for path in old if path in new for difference in _of_file(old[path], new[path])]
    if gone or added or changed or list(old) == list(new):
        return gone + added + changed
    return [Difference("order of the files", ", ".join(old), ", ".join(new))]


def changes_since(was: InputFile) -> list[Difference]:
    """What is different about a file now, from its metadata; that it cannot be read is a difference too."""
    try:
        now = read_metadata(was.path).as_input_file(was.index, was.first_row)
    except (InputNotFound, NotParquet) as error:
        return [Difference(was.path, f"{was.num_rows} rows", str(error))]
    return changes([was], [now])


def require_unchanged(file: InputFile) -> None:
    """Raise `InputChanged`, with what was and what is, unless the file is what was submitted."""
    if differences := changes_since(file):
        raise InputChanged("the input has changed since the job was submitted:", differences, ADVICE)


def require_same_version(file: InputFile) -> None:
    """The same from size and version alone, which every chunk can afford: footers are read only to tell what changed.

    Raises `InputChanged` and `InputNotFound`."""
    if stat(file.path) != (file.size, file.modified):
        require_unchanged(file)


def _of_file(was: InputFile, now: InputFile) -> Iterator[Difference]:
    if was.schema != now.schema:
        yield from _of_schema(was, now)
    if was.row_groups != now.row_groups:
        yield Difference(f"{was.path}: rows", _rows(was), _rows(now))
    if was.size != now.size:
        yield Difference(f"{was.path}: size", shown_size(was.size), shown_size(now.size))
    elif was.modified != now.modified:
        name = "version" if is_url(was.path) else "modified"
        yield Difference(f"{was.path}: {name}", *shown_versions(was.path, was.modified, now.modified))


def _of_schema(was: InputFile, now: InputFile) -> Iterator[Difference]:
    old, new = (dict(line.split(": ", 1) for line in file.schema.splitlines()) for file in (was, now))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    for name in changed:
        yield Difference(f"{was.path}: column {name!r}", old.get(name, "none"), new.get(name, "none"))
    if not changed:
        yield Difference(f"{was.path}: order of the columns", ", ".join(old), ", ".join(new))


def _rows(file: InputFile) -> str:
    groups = len(file.row_groups)
    return f"{file.num_rows:,} rows in {groups:,} row group{'' if groups == 1 else 's'}"
