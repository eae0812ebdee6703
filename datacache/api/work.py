"""Tasks of other machines' commands, done here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from datacache.executors.queue.worker import ParcelDone


class WorkDone(NamedTuple):
    """The work that processes have done."""

    ended: str
    """`done` and `failed`: the job is; `idle`, `once`, `stopped`."""
    parcels: int
    tasks: int
    lost: int
    """Parcels that do not count: refused ones, and those that another worker was given."""
    took_s: float


def work_on_queue(
    *,
    job: str = "",
    processes: int = 1,
    once: bool = False,
    max_idle_s: float | None = None,
    allow_models: bool = False,
    settings: Settings | None = None,
    say: Callable[[ParcelDone], None] = lambda _done: None,
) -> WorkDone:
    """Do what commands with `--on queue` have put into the catalog, in `processes` forked processes, until a signal.

    `job` names the only one to work for; then it ends with the job. `once` ends each process after one parcel of tasks,
    `max_idle_s` after so long without a command to work for. `allow_models` is for `predict`: a model is code that a
    client names, so allow it where you trust whoever may write into the catalog. SIGTERM and SIGINT are handled
    meanwhile, so it runs in the main thread, of a process that does nothing else. `UsageError` for an impossible name,
    `SettingsError` for a catalog that can only be read, `CatalogUnavailableError` where it is away for a minute.
    """
    from datacache.catalog.open import open_task_store
    from datacache.executors.queue.processes import run_workers
    from datacache.executors.queue.records import check_job
    from datacache.executors.queue.worker import WorkPlan

    settings = settings or load_settings()
    open_task_store(settings.catalog)  # one that can only be read is refused here
    plan = WorkPlan(check_job(job) if job else "", once, max_idle_s, allow_models)
    started, parcels, tasks, lost = time.monotonic(), 0, 0, 0

    def count(done: ParcelDone) -> None:
        nonlocal parcels, tasks, lost
        if done.problem:
            lost += 1
        else:
            parcels += 1
            tasks += done.tasks
        say(done)

    ended = run_workers(settings, plan, processes, count)
    return WorkDone(ended.value, parcels, tasks, lost, time.monotonic() - started)
