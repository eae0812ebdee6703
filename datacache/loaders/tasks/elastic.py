"""`ElasticDataset`: batches for one training process out of a task queue that it shares with others.

Needs PyTorch, which is imported when an iteration begins. One thread; `stop` may be called from any, and from a signal
handler.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from datacache.core.errors import (
    CatalogUnavailableError,
    DaemonError,
    StoreAccessError,
    StoreUnavailableError,
    TasksError,
    UsageError,
)
from datacache.loaders.processes import worker_context
from datacache.loaders.source import is_skippable
from datacache.loaders.tasks.held import HeldTask, HeldTasks
from datacache.loaders.tasks.plan import Plan
from datacache.loaders.tasks.queue import Span, TaskQueue, Wait, worker_name

_POLL_S = 0.2
"""How soon a `stop` is noticed while there is nothing to do."""

_OUTAGES = (StoreUnavailableError, StoreAccessError, CatalogUnavailableError, DaemonError)
"""Errors that are no fault of the samples being read."""

_log = logging.getLogger(__name__)


class Spanned(Protocol):
    """A map-style dataset that knows which of its samples lie together."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> Any: ...

    def spans(self) -> Sequence[Span]:
        """Return runs of samples, by names that other processes know them by, too."""
        ...


_Pieces = list[tuple[HeldTask, int]]


class _Batch(NamedTuple):
    """The parts of a batch under way: pieces of tasks. `dropped` are those left out behind it (`drop_last`)."""

    pieces: _Pieces
    dropped: _Pieces


class ElasticDataset:
    """An iterable over the batches of those tasks that this process gets, to the end of the queue's last epoch.

        with ElasticDataset(ShardDataset(url), datacache.open_tasks("job"), batch_size=64, num_workers=8) as batches:
            for batch in batches:
                train(batch)

    Any number of processes on any number of nodes iterate over one queue and may come and go. Batches are read by a
    `DataLoader`, by its workers ahead of the training. A batch counts as used when the training comes back for the next
    one; then it is reported, once every `report_every_s` and at the end of each task. What a process had used and not
    reported when it was killed is repeated by another one, and nothing else is.

    Batches are filled from one task after the other; at the end of an epoch, and whenever others are still doing the
    last tasks, one is smaller (or with `drop_last` left out, and counted in `dropped`). `batches.epoch` is the epoch of
    the batch given last.

    Processes get different numbers of batches, and one that has none waits until the others are done with theirs. Where
    processes take every step together (DistributedDataParallel), they would wait for each other forever: with
    `wait=False` a process gets None in place of a batch while there is nothing for it and others are not done.
    `docs/TRAINING.md` has such a loop.

    Leases are renewed by a thread for as long as the process lives, also one whose training hangs. At the end, with
    `close`, after an exception and after `stop` the leases are given back. Where one was lost all the same (the machine
    was suspended), the rest of that task is left out and counted in `lost`.

    An error in reading is raised, and counts as a failure of the batch's tasks, except where the store, the catalog or
    the daemon is away or lets nobody in: then they are given back. With `on_error="skip"`, an error that says what is
    wrong with a sample (`AnnotationError`, `ShardError`, `ObjectNotFoundError`, `ObjectChangedError`; a dataset of your
    own may raise them) is logged, and other tasks go on. Errors of the training in the loop count only if they are one
    of these four, and that only in a `with`; after all others the tasks are given back as they are. A batch of which
    the dataset left all samples out does not come; it counts as used.

    `collate_fn` is `datacache.torch.collate` for our datasets and PyTorch's for others. `TasksError` if the queue is
    not there (any more), or is of another data set.
    """

    def __init__(
        self,
        dataset: Spanned,
        tasks: TaskQueue,
        *,
        batch_size: int,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        worker: str = "",
        on_error: str = "raise",
        wait: bool = True,
        report_every_s: float = 1.0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size={batch_size}")
        if on_error not in ("raise", "skip"):
            raise UsageError(f"on_error is 'raise' or 'skip', not {on_error!r}")
        self.dataset, self.batch_size = dataset, batch_size
        self.worker = worker or worker_name()
        self.epoch = 0
        self.dropped = 0
        """Samples that were left out by `drop_last`."""
        self._collate_fn, self._worker_init_fn = collate_fn, worker_init_fn
        self._tasks, self._drop_last, self._skip, self._wait = tasks, drop_last, on_error == "skip", wait
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "multiprocessing_context": worker_context(multiprocessing_context) if num_workers else None,
            "persistent_workers": num_workers > 0,
        }
        self._held = HeldTasks(tasks, self.worker, report_every_s=report_every_s)
        self._first_samples: dict[str, int] = {}
        self._iterating = self._entered = False
        self._next: HeldTask | None = None
        """The task that batches are filled from."""
        self._wait_s: float | None = 0.0
        """How long there is nothing to take; None at the end."""
        self._under_way: deque[_Batch] = deque()
        self._current: _Batch | None = None
        self._reading: Any = None
        """The DataLoader's iterator."""
        self._trouble: Exception | None = None
        """The error of the queue while the DataLoader asked for samples: raised when it has given what is under way."""
        # Runs at the exit of the interpreter, too; not where the process is killed.
        self._finalizer = weakref.finalize(self, HeldTasks.close, self._held)

    @property
    def lost(self) -> int:
        """Tasks that were somebody else's before this process was through with them."""
        return self._held.lost

    def stop(self) -> None:
        """Take no more tasks and give back those that the batch at hand is not of, for others to go on with at once.
        The loop over the batches ends when it comes back for the next one."""
        self._held.stop()

    def flush(self) -> None:
        """Report what is used and not reported yet."""
        self._held.flush()

    def checkpoint(self) -> str:
        """Return the queue's checkpoint, to be kept with the model's. Called in the loop when the batch has been
        trained with, which counts as used."""
        self._count_current()
        self.flush()
        return self._tasks.get_shard_checkpoint()

    def close(self) -> None:
        """Give the leases back. Idempotent; iterating afterwards goes on where the queue is."""
        self._next = None
        self._under_way.clear()
        self._current = None
        self._held.close()

    def __enter__(self) -> ElasticDataset:
        self._entered = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and is_skippable(error) and self._current is not None:
            self._held.fail(self._current.pieces, f"{type(error).__name__}: {error}")
        self._entered = False
        self.close()

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            raise UsageError(
                "an ElasticDataset cannot be iterated over in a worker of a DataLoader, which does not know what the"
                " training has used",
                hint="Iterate over it in the training's process. It has a DataLoader inside: num_workers=…",
            )
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        from datacache.loaders.loader import default_collate
        from datacache.loaders.packed import CollateUnlessEmpty
        from datacache.loaders.tuning.autotune import shut_down

        if self._iterating:
            raise UsageError("this ElasticDataset is being iterated over already")
        self._iterating = True
        self._count_current()  # where the loop was left in a `with`, and the training comes back
        self._under_way.clear()
        try:
            self._first_samples = self._check_spans()
            collate = CollateUnlessEmpty(self._collate_fn or default_collate(self.dataset))
            # The parent of workers may also be a fork server, which outlives the training.
            context = self._options["multiprocessing_context"]
            parent = os.getpid() if context is not None and context.get_start_method() != "forkserver" else 0
            init = partial(_init_worker, parent, self._worker_init_fn)
            loader = DataLoader(
                self.dataset, batch_sampler=_Sampler(self), collate_fn=collate, worker_init_fn=init, **self._options
            )
            while (found := self._wait_for_task()) is not False:
                if found is None:
                    yield None
                    continue
                yield from self._read(loader)
                if self._trouble is not None:
                    raise self._trouble
        except GeneratorExit:
            # The loop was left, maybe by an error of the training, which `__exit__` is to hear of before we give up.
            if not self._entered:
                self.close()
            raise
        except BaseException:
            self.close()
            raise
        else:
            self.close()
        finally:
            self._iterating = False
            shut_down(self._reading)  # not when it is collected: an error's traceback may keep it for long
            self._reading = None

    def _check_spans(self) -> dict[str, int]:
        spans, parameters = self.dataset.spans(), self._tasks.parameters
        if Plan.of(spans).digest != parameters.digest:
            raise TasksError(
                f"the task queue {self._tasks.name} is of another data set ({parameters.dataset or 'unnamed'}): its"
                " shards have other names or sizes",
                hint="Open the data set that the queue was made of, or make another queue.",
            )
        return {span.name: span.first for span in spans}

    def _wait_for_task(self) -> bool | None:
        """Wait until there is a task to fill batches from; false at the end, None where there is nothing to take and
        nobody is to wait. Nothing is under way meanwhile: the queue may be waiting for what we have."""
        self._held.give_back_unused()
        while not self._held.stopped:
            if self._take():
                return True
            if self._wait_s is None:
                name, failed = self._tasks.name, len(self._tasks.status().failed)
                if failed:
                    _log.warning(
                        "the task queue %s is finished, and %d task(s) failed: their records were not all seen."
                        " See: dsctl tasks show %s. Again: dsctl tasks retry %s",
                        *(name, failed, name, name),
                    )
                return False
            if not self._wait:
                return None
            until = time.monotonic() + self._wait_s
            while (left_s := until - time.monotonic()) > 0 and not self._held.stopped:
                time.sleep(min(left_s, _POLL_S))
        return False

    def _read(self, loader: Any) -> Iterator[Any]:
        """Yield batches until the sampler finds no task."""
        from datacache.loaders.packed import Nothing

        self._reading = iter(loader)
        while True:
            try:
                batch = next(self._reading)
            except StopIteration:
                return
            except Exception as exc:
                if not self._failed(exc):
                    raise
                continue
            mine = self._under_way.popleft()
            if isinstance(batch, Nothing):
                self._held.used(mine.pieces)
            elif self._held.begin(mine.pieces):
                self.epoch = mine.pieces[0][0].task.epoch
                self._current = mine
                yield batch
                self._count_current()
            if self._held.stopped:
                return
            self._held.used(mine.dropped)

    def _count_current(self) -> None:
        mine, self._current = self._current, None
        if mine is not None:
            self._held.used(mine.pieces)

    def _failed(self, exc: Exception) -> bool:
        """Note that a batch could not be read. Return whether to go on."""
        if not self._under_way:
            return False
        mine = self._under_way.popleft()
        if isinstance(exc, _OUTAGES):
            return False
        numbers = sorted({held.task.number for held, _records in mine.pieces})
        self._held.fail(mine.pieces, f"{type(exc).__name__}: {exc}")
        if not self._skip or not is_skippable(exc):
            return False  # also where a worker died, and the DataLoader is of no use
        _log.warning("reading task %s failed: %s", ", ".join(map(str, numbers)), exc)
        self._held.used(mine.dropped)  # of other tasks, which have not failed
        return True

    def _take(self) -> bool:
        while self._next is None or self._next.lost or self._next.given == len(self._next.samples):
            found = self._held.take(self._first_samples)
            self._next = found if isinstance(found, HeldTask) else None
            if self._next is None:
                self._wait_s = found.seconds if isinstance(found, Wait) else None
                return False
        return True

    def batches(self) -> Iterator[list[int]]:
        """Yield the samples of one batch after the other, for the DataLoader, which is not to see errors: it would take
        them for those of the batch that it is reading."""
        self._trouble = None
        try:
            yield from self._fill()
        except Exception as exc:  # noqa: BLE001 - raised when what is under way is through
            self._trouble = exc

    def _fill(self) -> Iterator[list[int]]:
        samples: list[int] = []
        pieces: _Pieces = []
        while not self._held.stopped and self._take():
            held = self._next
            assert held is not None
            if pieces and pieces[0][0].task.epoch != held.task.epoch:
                yield from self._rest(samples, pieces)
                samples, pieces = [], []
            records = min(self.batch_size - len(samples), len(held.samples) - held.given)
            samples += held.samples[held.given : held.given + records].tolist()
            held.given += records
            pieces.append((held, records))
            if len(samples) == self.batch_size:
                self._under_way.append(_Batch(pieces, []))
                yield samples
                samples, pieces = [], []
        if pieces and not self._held.stopped:
            yield from self._rest(samples, pieces)

    def _rest(self, samples: list[int], pieces: _Pieces) -> Iterator[list[int]]:
        """Yield a batch that is not full: others may wait for just these records, so it is not kept back."""
        if not self._drop_last:
            self._under_way.append(_Batch(pieces, []))
            yield samples
            return
        self.dropped += len(samples)
        if self._under_way:
            self._under_way[-1].dropped.extend(pieces)  # they count when what is before them in their tasks is used
        else:
            self._held.used(pieces)


def _init_worker(training_pid: int, then: Callable[[int], None] | None, worker: int) -> None:
    # PyTorch's workers look whether their parent is still the one that they began with: where it was killed before
    # that, they would stay for good.
    if training_pid not in (0, os.getppid()):
        os._exit(1)
    if then is not None:
        then(worker)


class _Sampler:
    """The object that a DataLoader asks for batches."""

    def __init__(self, elastic: ElasticDataset) -> None:
        self._elastic = elastic

    def __iter__(self) -> Iterator[list[int]]:
        return self._elastic.batches()
