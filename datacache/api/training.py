"""Training: queues of tasks in the catalog, and how fast samples come with several numbers of worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from os import PathLike
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from datacache.api.opening import open_catalog, open_samples
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from datacache.loaders.tasks.queue import Span, TaskQueue, TaskStatus
    from datacache.loaders.tuning.report import Report


class TaskOptions(TypedDict, total=False):
    """Say how a data set is cut into tasks; see `TaskParameters`."""

    records: int
    epochs: int
    shuffle: bool
    seed: int
    lease_s: float
    max_failures: int
    max_lost: int


def open_tasks(name: str, settings: Settings | None = None, *, patience_s: float = 60.0) -> TaskQueue:
    """Return the queue of training tasks `name`. Nothing is opened before its first call.

    Thread-safe, safe after `fork()`, picklable. While the database is away, calls wait for `patience_s` before they
    raise `CatalogUnavailableError`. `TasksError` where the queue is not there.
    """
    from datacache.catalog.open import open_task_store
    from datacache.loaders.tasks.queue import TaskQueue

    return TaskQueue(open_task_store((settings or load_settings()).catalog), name, patience_s=patience_s)


def create_tasks(
    name: str,
    dataset: Any,
    *,
    reset: bool = False,
    settings: Settings | None = None,
    patience_s: float = 60.0,
    **options: Unpack[TaskOptions],
) -> TaskQueue:
    """Make a queue of training tasks over a data set, in the catalog.

    `dataset` is one of `datacache.torch`'s (anything with `spans()`), or what they are opened with: a snapshot, or a
    shard set in a snapshot, at a URL or in a folder. For the options see `TaskParameters`. All workers of a job
    may call this: with the same arguments it is the same queue, with others `TasksError` unless `reset` begins anew.
    """
    from datacache.loaders.tasks.queue import TaskParameters, TaskQueue

    settings = settings or load_settings()
    label, spans = (repr(dataset), dataset.spans()) if hasattr(dataset, "spans") else _spans(dataset, settings)
    parameters = TaskParameters(dataset=label, **options)
    store = open_tasks(name, settings).store
    return TaskQueue.create(store, name, spans, parameters, reset=reset, patience_s=patience_s)


def list_tasks(settings: Settings | None = None) -> list[TaskStatus]:
    """Return the state of all queues of training tasks, by name."""
    from datacache.catalog.open import open_task_store
    from datacache.loaders.tasks.queue import list_queues

    with closing(open_task_store((settings or load_settings()).catalog)) as store:
        return list_queues(store)


def _spans(where: str | PathLike[str], settings: Settings) -> tuple[str, list[Span]]:
    """Return the name of a data set, and its spans as `ShardDataset` and `SnapshotDataset` have them."""
    from datacache.annotations.query import Query
    from datacache.loaders.selection import select
    from datacache.loaders.shard_source import ShardSource
    from datacache.loaders.source import SnapshotSource
    from datacache.shards.reader import Shards

    found = open_samples(where, settings, lenient=True)
    if isinstance(found, Shards):
        return found.files.where, ShardSource(found, None).spans()
    with closing(found), closing(open_catalog(settings)) as catalog:
        selection = select(found, catalog, target="auto", query=Query())
        return found.record.ref, SnapshotSource(found, selection).spans()


def worker_counts() -> list[int]:
    """Return the numbers of workers that are worth trying on this machine."""
    from datacache.loaders.processes import processors
    from datacache.loaders.tuning.autotune import candidates

    return candidates(processors())


def measure_loading(
    dataset: Any, *, workers: int, batch_size: int, seconds: float, on_batch: Callable[[], None] = lambda: None
) -> Report:
    """Load random batches of a dataset for some seconds and return what that was like. Needs PyTorch."""
    import numpy as np

    from datacache.loaders.loader import default_collate
    from datacache.loaders.tuning.autotune import measure

    def batches() -> Iterator[list[int]]:
        draw = np.random.default_rng(workers)  # other numbers each time: one does not warm the cache for the next
        while True:
            yield draw.integers(0, len(dataset), batch_size).tolist()

    return measure(
        dataset,
        batches(),
        default_collate(dataset),
        batch_size=batch_size,
        workers=workers,
        seconds=seconds,
        on_batch=on_batch,
    )
