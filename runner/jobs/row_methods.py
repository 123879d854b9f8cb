"""Rows that name their speculation method: which ones, found in their column before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runner.errors import SpecError
from scheduler.intake.distinct import MOST_VALUES, distinct_texts
from storage.spec import JobSpec
from storage.suggest import did_you_mean
from workers.engine.api.config import METHODS
from workers.engine.api.errors import Refused
from workers.rows.settings import engine_config, with_engine

if TYPE_CHECKING:
    from scheduler.intake.dataset import Dataset
    from workers.engine.api.config import SpeculationConfig

MOST_SHOWN = 5
MOST_CHARACTERS = 60


def with_row_methods(spec: JobSpec, dataset: Dataset) -> tuple[JobSpec, Dataset]:
    """The spec with its columns settled, and with the methods of its speculation column among its `row_methods`.

    A column that was found by its name and holds nothing like a method is carried instead, and a note says so. Raises
    `SpecError` for a name that is no method, or for a method that the job lacks something for; where the job lists
    row methods, such rows are errors of their own instead.
    """
    named, spec = spec.input.speculation_column, replace(spec, input=dataset.input)
    column = dataset.input.speculation_column
    if column is None:
        return spec, dataset
    engine = engine_config(spec)
    config = engine.speculation
    found = distinct_texts(dataset, column)
    asked = [name for name in found if name in METHODS]
    unknown = [name for name in found if name not in METHODS]
    if found and not asked and named is None and not any(did_you_mean(n, METHODS) for n in found):
        note = f"column {column!r} names no speculation method, so that it is carried like any other"
        carried = replace(dataset.input, speculation_column=None)
        return replace(spec, input=carried), replace(dataset, input=carried, notes=(*dataset.notes, note))
    if unknown and not config.row_methods:
        raise SpecError(*_unknown(column, unknown))
    added = _added(config, [name for name in asked if name not in config.methods], column)
    failing = [*unknown, *(name for name in asked if name not in added.methods)]
    if failing:
        names = ", ".join(map(_quoted, failing[:MOST_SHOWN])) + (", ..." if len(failing) > MOST_SHOWN else "")
        note = f"rows that ask for the speculation method {names} in column {column!r} will be errors: the job has none"
        dataset = replace(dataset, notes=(*dataset.notes, note))
    return with_engine(spec, replace(engine, speculation=added)), dataset


def _added(config: SpeculationConfig, methods: list[str], column: str) -> SpeculationConfig:
    if not methods:
        return config
    try:
        return replace(config, row_methods=(*config.row_methods, *methods))
    except Refused as refused:
        if config.row_methods:
            return config
        asked = " and ".join(map(repr, methods))
        raise SpecError(
            *(f"rows ask for {asked} in column {column!r}: {problem}" for problem in refused.problems)
        ) from refused


def _quoted(name: str) -> str:
    return repr(name if len(name) <= MOST_CHARACTERS else name[:MOST_CHARACTERS] + "…")


def _unknown(column: str, names: list[str]) -> list[str]:
    if len(names) > MOST_VALUES:
        other = _quoted(names[0])
        return [f"column {column!r} names the speculation method of each row, and holds something else: {other}, ..."]
    known = f"; there are: {', '.join(METHODS)}"
    return [
        f"column {column!r} asks for the speculation method {_quoted(name)}, which there is not"
        f"{did_you_mean(name, METHODS) or known}; correct it, or set input.speculation_column if another column names"
        " the methods"
        for name in names
    ]
