"""From a spec to a job in the store: the input is checked before anything is recorded or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.models import require_models
from runner.spec import JobSpec
from scheduler.dataset import inspect
from scheduler.submission import submit

if TYPE_CHECKING:
    from scheduler.submission import Submission
    from storage.store import Store


def submit_job(store: Store, spec: JobSpec, *, new: bool = False, models_here: bool = False) -> Submission:
    """Inspect the input and record the job, or find the one that it repeats.

    `models_here`: this machine will run it, so its models must be found as well. Raises `InvalidInput`, `InvalidJob`,
    `ModelNotFound`, `InvalidConfig`, `SpecChanged`, `InputChanged` or `WrongState`, each naming what is wrong.
    """
    dataset = inspect(spec.input_spec())
    if models_here:
        require_models(spec)
    return submit(store, spec.to_dict(), dataset, new=new)
