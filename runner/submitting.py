"""From a spec to a job in the store: the input is checked before anything is recorded or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.spec import JobSpec, default_spec
from runner.tables import note
from scheduler.dataset import inspect
from scheduler.submission import submit
from storage.records import JobState

if TYPE_CHECKING:
    from scheduler.submission import Submission
    from storage.store import Store


LOSSY = "typical"
"""The verification rule that changes the distribution of the answers."""


def warn_if_lossy(spec: JobSpec) -> None:
    """Say that a verification rule changes what the model would answer, if it does."""
    if spec.engine_config().speculation.verify == LOSSY:
        note(
            f"warning: verify {LOSSY} is lossy: the answers are not distributed as the target's own. The stored method"
            f" of every row ends in /{LOSSY}; docs/verification.md has the rules that keep the distribution"
        )


def submit_job(store: Store, spec: JobSpec, *, new: bool = False, models_here: bool = False) -> Submission:
    """Inspect the input and record the job, or find the one that it repeats.

    `models_here`: this machine will run it, so its models must be found and fit each other as well; paths of a job for
    other machines mean nothing here. Raises `InvalidInput`, `InvalidJob`, `SpecChanged`, `InputChanged`, `WrongState`,
    and with `models_here` what `Preflight` raises, each naming what is wrong.
    """
    dataset = inspect(spec.input_spec())
    warn_if_lossy(spec)
    if models_here and not _is_complete(store, spec, new):
        from workers.engine.preflight import Preflight

        Preflight(spec.engine_config())
    return submit(store, spec.to_dict(), dataset, new=new, defaults=default_spec())


def _is_complete(store: Store, spec: JobSpec, new: bool) -> bool:
    """Whether the job was run to its end before, so that no model will be loaded for it."""
    known = None if new or spec.name is None else store.find_job(spec.name)
    return known is not None and known.state is JobState.COMPLETED
