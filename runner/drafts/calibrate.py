"""`nightdraft calibrate`: fit a speculator to a target and to the user's own prompts, once, ahead of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from runner.drafts.prompts import Prompts, prepared_prompts
from runner.errors import UsageError
from runner.output.console import note
from runner.output.output import Fields, Output, Table
from runner.paths import output_file, require_folder
from storage.spec import JobSpec
from storage.suggest import did_you_mean
from workers.engine.api.config import EngineConfig
from workers.rows.settings import engine_config

SHOWN_PATHS = 12
REPORTED_CANDIDATES = 50
"""A line of progress after so many."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be calibrated, and on what."""

    config: EngineConfig
    prompts: Prompts
    batch: int | None
    out: str | None


def calibrate(spec: JobSpec, output: Output, *, batch: int | None, out: str | None) -> None:
    """Calibrate the spec's method on its prompts, store the result where jobs find it (or at `out`), and show it.

    Raises `UsageError` for a method with nothing to calibrate and an `out` that cannot be written, and what the engine
    raises for models and options.
    """
    config = engine_config(spec)
    method = config.speculation.method
    if method not in CALIBRATED:
        near = did_you_mean(method, CALIBRATED)
        raise UsageError(f"method {method} has nothing to calibrate; these have: {', '.join(CALIBRATED)}{near}")
    if out is not None and method != "self":
        raise UsageError(f"--out is for method self; what is calibrated for {method} lies beside its draft")
    if out is not None:
        require_folder(output_file(out))
    result = CALIBRATED[method](Wanted(config, prepared_prompts(spec), batch, out))
    output.show(result, *_parts(method, result))
    if not output.as_json and result.get("predicted_speedup", 2.0) <= 1.0:
        note("no set promises a speedup for this batch size on this machine: method self would slow the job down")


def _medusa(wanted: Wanted) -> dict[str, Any]:
    from workers.engine.measure.calibrate_medusa import TREE_FILE, calibrate_medusa

    prompts = wanted.prompts
    tree = calibrate_medusa(wanted.config, prompts.token_ids, max_tokens=prompts.params.max_tokens, batch=wanted.batch)
    paths = zip(tree.paths, tree.frequencies, strict=True)
    return {
        "draft": wanted.config.speculation.draft,
        "file": TREE_FILE,
        "nodes": len(tree.paths),
        "expected_tokens": tree.expected_tokens,
        "positions": tree.positions,
        "paths": [{"path": list(path), "frequency": frequency} for path, frequency in paths],
    }


def _self(wanted: Wanted) -> dict[str, Any]:
    from workers.engine.measure.calibrate_self import calibrate_self

    result = calibrate_self(
        wanted.config,
        wanted.prompts.token_ids,
        answer_tokens=wanted.prompts.params.max_tokens,
        temperature=wanted.prompts.params.temperature,
        batch=wanted.batch or 1,
        progress=_report,
    )
    file = result.found.write(wanted.out)
    found = asdict(result.found)
    return {"file": str(file), **found, "positions": result.positions, "candidates": result.candidates}


CALIBRATED: dict[str, Callable[[Wanted], dict[str, Any]]] = {"medusa": _medusa, "self": _self}


def _report(tried: int, speedup: float) -> None:
    if tried % REPORTED_CANDIDATES == 0:
        note(f"{tried} sets tried, the best promises a speedup of {speedup:.2f}")


def _parts(method: str, result: dict[str, Any]) -> Iterator[Fields | Table]:
    shown = {name.replace("_", " "): value for name, value in result.items() if name != "paths"}
    yield Fields(shown, title=f"calibrated {method}")
    if paths := result.get("paths"):
        rows = [(str(row["path"]), row["frequency"]) for row in paths[:SHOWN_PATHS]]
        yield Table(("path", "frequency"), rows, title=f"the {len(rows)} most frequent of {len(paths)} paths")
