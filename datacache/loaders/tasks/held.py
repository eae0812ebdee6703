"""The tasks that one training process holds: leases are kept alive, what was used is reported, the rest given back.

Used by `elastic`; no PyTorch. `take`, `begin`, `used`, `flush` and `close` belong to the training's thread; a thread of
their own renews leases and, after `stop`, gives back what the training is not at. The lock guards which tasks are held
and in use; it is never held while the database is asked. A process made by `fork()` holds nothing of its parent's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datacache.core.errors import LeaseLostError, TasksError
from datacache.loaders.tasks.queue import Task, TaskQueue, Wait

_BEATS_IN_A_LEASE = 3
_LONGEST_BEAT_S = 10.0
_STOP_POLL_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class HeldTask:
    """A task, and how far it is."""

    task: Task
    samples: NDArray[np.int64]
    """Numbers in the data set of the records that were left when it was taken, in their order."""
    begun: int
    """Its position then."""
    given: int = 0
    """How many of `samples` are in batches."""
    used: int = 0
    """How many of them the training has used."""
    heard_s: float = 0.0
    """When the database last heard of it (monotonic)."""
    lost: bool = False
    """True once it is done, given back, or leased to another worker: nothing of it is reported then."""
    in_use: bool = False
    """The training is at a batch with records of it."""

    @property
    def position(self) -> int:
        return self.begun + self.used


class HeldTasks:
    """Those of the worker `worker` in `queue`. Close it. Reports wait for one another up to `report_every_s`, so that
    quick trainings do not write all the time; the end of a task is reported at once."""

    def __init__(self, queue: TaskQueue, worker: str, *, report_every_s: float) -> None:
        self._queue = queue
        self._hasty = queue.impatient()
        self._worker = worker
        self._report_every_s = report_every_s
        self._lock = threading.Lock()
        self._held: list[HeldTask] = []
        self._stopped = False  # no event: a signal handler may set it while the same thread waits for it
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.lost = 0
        """Tasks whose lease was lost while they were held."""

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Take no more tasks, and have those given back that the training is not at. Any thread, any signal handler."""
        self._stopped = True

    def take(self, first_samples: dict[str, int]) -> HeldTask | Wait | None:
        """Take one more task; `Wait` where there is none now, None at the end. `first_samples` has the first sample of
        each span."""
        found = self._queue.try_fetch(self._worker)
        if not isinstance(found, Task):
            return found
        first = first_samples.get(found.name)
        if first is None:
            self._queue.release(found)
            raise TasksError(
                f"the task queue {self._queue.name} was reset to another data set: it has {found.name!r} now"
            )
        held = HeldTask(found, first + found.left(), found.position, heard_s=time.monotonic())
        with self._lock:
            self._held.append(held)
        if self._thread is None:
            beat_s = min(_LONGEST_BEAT_S, found.lease_s / _BEATS_IN_A_LEASE)
            self._thread = threading.Thread(target=self._heartbeat, args=(beat_s,), name="task-leases", daemon=True)
            self._thread.start()
        return held

    def begin(self, pieces: Iterable[tuple[HeldTask, int]]) -> bool:
        """Note that the training gets a batch with these pieces; false where it should not: all of them are somebody
        else's now."""
        with self._lock:
            ours = [held for held, _records in pieces if not held.lost]
            if self._stopped or not ours:
                return False
            for held in ours:
                held.in_use = True
            return True

    def used(self, pieces: Iterable[tuple[HeldTask, int]]) -> None:
        """Note that the training has used these records. Report them where it is time to."""
        for held, records in pieces:
            held.used += records
            held.in_use = False  # from here on, after `stop`, the other thread may give it back
            done = held.used == len(held.samples)
            if done or time.monotonic() - held.heard_s >= self._report_every_s:
                self._report(held, self._queue)

    def fail(self, pieces: Iterable[tuple[HeldTask, int]], error: str) -> None:
        """Report these tasks as failed."""
        for held in {id(held): held for held, _records in pieces}.values():
            if not self._drop(held):
                continue
            try:
                if held.position > held.task.position:
                    self._queue.report(held.task, held.position)
                self._queue.report_failed(held.task, error)
            except LeaseLostError:
                self.lost += 1

    def give_back_unused(self) -> None:
        """Give back tasks with records that went into batches and were not used: called where no batch is under way, so
        nobody would ever report them."""
        for held in self._all():
            if held.used < held.given:
                self._give_back(held)

    def flush(self) -> None:
        """Report all that is used and not reported yet."""
        for held in self._all():
            if held.position > held.task.position:
                self._report(held, self._queue)

    def close(self) -> None:
        """Report what was used and give the rest back. A database that is away is not waited for: the leases then
        expire. Idempotent; whoever takes a task afterwards closes again."""
        if self._pid != os.getpid():
            return
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None
        self._closing.clear()
        for held in self._all():
            self._give_back(held)

    def _report(self, held: HeldTask, queue: TaskQueue) -> None:
        if held.lost:
            return
        try:
            queue.report(held.task, held.position)
        except LeaseLostError as exc:
            self._note_lost(held, exc)
            return
        held.heard_s = time.monotonic()
        if held.used == len(held.samples):
            self._drop(held)

    def _give_back(self, held: HeldTask, *, even_in_use: bool = True) -> None:
        if not self._drop(held, even_in_use=even_in_use):
            return
        try:
            if held.position > held.task.position:
                self._hasty.report(held.task, held.position)
            if held.position < held.task.count:
                self._hasty.release(held.task)
        except LeaseLostError:
            self.lost += 1
        except Exception as exc:  # noqa: BLE001 - there are others to give back
            _log.warning("task %d cannot be given back, its lease will expire: %s", held.task.number, exc)

    def _note_lost(self, held: HeldTask, exc: LeaseLostError) -> None:
        if self._drop(held):
            self.lost += 1
            _log.warning("%s", exc)

    def _drop(self, held: HeldTask, *, even_in_use: bool = True) -> bool:
        with self._lock:
            if held not in self._held or (held.in_use and not even_in_use):
                return False
            self._held.remove(held)
            held.lost = True
            return True

    def _all(self) -> list[HeldTask]:
        with self._lock:
            return list(self._held)

    def _heartbeat(self, beat_s: float) -> None:
        poll_s = min(beat_s, _STOP_POLL_S)
        while not self._closing.wait(poll_s):
            for held in self._all():
                if self._closing.is_set():
                    return
                if self._stopped and not held.in_use:
                    self._give_back(held, even_in_use=False)
                elif time.monotonic() - held.heard_s >= beat_s:
                    self._renew(held)

    def _renew(self, held: HeldTask) -> None:
        try:
            self._hasty.renew(held.task)
        except LeaseLostError as exc:
            self._note_lost(held, exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is: without this thread all leases would be lost
            _log.warning("the lease of task %d cannot be renewed yet: %s", held.task.number, exc)
        else:
            held.heard_s = time.monotonic()
