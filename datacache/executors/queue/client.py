"""Send parcels of tasks to the workers of the catalog's queue: an `Executor` for `core.engine`.

Used by `executors.open`. Whoever submits does so from one thread; another one, of the executor, looks for answers and
holds the job. A client that is killed leaves its parcels: workers do no more of them once its lease has ended, and a
client that takes a job of the same name finds what was done meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import Any

from xxhash import xxh3_64_intdigest

from datacache.catalog.base import Catalog
from datacache.catalog.tasks import base as tasks_base
from datacache.catalog.tasks.base import NewTask, QueueRecord, TaskState, TaskStore
from datacache.core.engine import PATIENCE_S, patiently, pickled
from datacache.core.errors import CatalogUnavailableError, DatacacheError, TasksError
from datacache.executors.queue import records

LEASE_S = 15.0
"""A worker that has not been heard of for this long is taken for dead, and another does its parcel."""
MAX_LOST = 3
"""Workers that may die at one parcel: then its tasks have failed."""
_POLL_S, _SLOWEST_S = 0.03, 0.3
_LOOK_S = 3.0
"""The job is renewed this often, and looked for what is gone."""
_NUMBERS = (1 << 62) - 1
_log = logging.getLogger(__name__)


class QueueExecutor(Executor):
    """Sends the parcels of one job, which it takes as `records.take_job` does. `close` ends the job."""

    def __init__(self, catalog: Catalog, store: TaskStore, name: str = "", *, models: bool = False) -> None:
        """`name` is drawn where none is given; `models` says that tasks load models, which not all workers do. The
        executor closes `catalog`, which has no cache of this node, and `store`."""
        self._catalog, self._store, self._models = catalog, store, models
        name = records.check_job(name or f"job-{secrets.token_hex(4)}")
        by, token = f"{socket.gethostname()}:{os.getpid()}", secrets.token_hex(8)
        patiently(lambda: records.forget_old(catalog, store))
        self._job = patiently(lambda: records.take_job(catalog, name, by, token))
        self._queue = patiently(lambda: self._open(token))
        self._worker_keys: set[str] = set()
        self._places = itertools.count()
        self._lock = threading.Lock()  # guards _futures and _error
        self._futures: dict[int, Future[bytes]] = {}
        self._error: Exception | None = None
        self._gone_before: set[int] = set()
        self._wake, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name=f"job {self.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._job.name

    def width(self) -> int:
        """Return how many workers there are."""
        return patiently(lambda: records.count_workers(self._catalog, self.name, models=self._models))

    def submit(self, _do: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a parcel: the arguments of `core.engine.do_tasks`, which workers call whatever is given here. Raises
        what ended the job."""
        return self._send(*args, **kwargs)

    def _send(self, key: str, worker: bytes, tasks: Sequence[bytes]) -> Future[bytes]:
        if key not in self._worker_keys:
            patiently(lambda: records.put_bytes(self._catalog, f"{self.name}/code/{key}", worker))
            self._worker_keys.add(key)
        parcel = pickle.dumps((key, list(tasks)), pickle.HIGHEST_PROTOCOL)
        number = xxh3_64_intdigest(parcel) & _NUMBERS
        future: Future[bytes] = Future()
        with self._lock:
            if self._error is not None:
                raise self._error
            future = self._futures.setdefault(number, future)
        task = NewTask(0, number, next(self._places), f"{len(tasks)} tasks", 0, 1)
        patiently(lambda: records.put_bytes(self._catalog, f"{self.name}/{number}/tasks", parcel))
        patiently(lambda: self._store.add(self._queue, [task]))
        self._wake.set()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor`. The job stays, for a client that takes one of its name."""
        self._stopped = True
        self._wake.set()
        if wait:
            self._thread.join()
        if cancel_futures:
            self._fail(CancelledError())

    def close(self, *, done: bool) -> None:
        """End the job, which workers that do no other see; `done` says whether all of it was."""
        self.shutdown()
        try:
            patiently(lambda: self._end(records.DONE if done else records.FAILED))
        except DatacacheError as exc:  # its lease ends by itself
            _log.warning("the end of the job %s could not be noted: %s", self.name, exc)
        self._store.close()
        self._catalog.close()

    def _end(self, state: str) -> None:
        self._job = records.renew_job(self._catalog, self._job)  # raises where another client has it by now
        records.forget_job(self._catalog, self._store, self.name)
        records.renew_job(self._catalog, self._job, state)

    def _open(self, claim: str) -> QueueRecord:
        """Return the job's queue, without what nobody has begun: it is asked for again where it is needed."""
        name = records.queue_name(self.name)
        parameters = records.parameters_text(LEASE_S, MAX_LOST, models=self._models)
        made = self._store.create(name, secrets.randbits(62) | 1 << 61, parameters, b"")
        while not made.made:
            self._store.make(made, claim, list)
            found = self._store.queue(name)
            if found is None:
                raise TasksError(f"the job {self.name} was removed", hint="Run the command again.")
            made = found
        left = [*self._store.tasks(made, tasks_base.TODO), *self._store.tasks(made, tasks_base.FAILED)]
        self._store.drop(made, [task.number for task in left])
        return made

    # --- the thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause_s, look_at = _POLL_S, time.monotonic() + _LOOK_S
        away_since: float | None = None  # not since it answered: this process may have been stopped
        while not self._stopped:
            try:
                if self._settle():
                    pause_s = _POLL_S
                if time.monotonic() >= look_at:
                    self._look()
                    look_at = time.monotonic() + _LOOK_S
                away_since = None
            except CatalogUnavailableError as exc:
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if now - away_since > PATIENCE_S:
                    self._fail(exc)
            except Exception as exc:  # noqa: BLE001 - who waits for an answer is told
                self._fail(exc)
                return
            self._wake.wait(pause_s)
            if self._wake.is_set():
                self._wake.clear()
                pause_s = _POLL_S
            else:
                pause_s = min(_SLOWEST_S, 1.5 * pause_s)

    def _settle(self) -> bool:
        """Hand out the answers that are there. Return whether there were any."""
        with self._lock:
            waiting = dict(self._futures)
        if not waiting:
            return False
        found = False
        for number, future in waiting.items():
            if future.cancelled():
                self._forget(number)
                self._take(number)
        for state in (tasks_base.DONE, tasks_base.FAILED):
            for task in self._store.tasks(self._queue, state):
                if task.number not in waiting:
                    continue
                found = True
                answer = self._answer(task)
                if isinstance(answer, Exception):
                    self._forget(task.number, task.token)  # first: it is sent again
                    self._hand_out(task.number, answer)
                else:
                    self._hand_out(task.number, answer)
                    self._forget(task.number, task.token)
        return found

    def _take(self, number: int) -> Future[bytes] | None:
        with self._lock:
            return self._futures.pop(number, None)

    def _hand_out(self, number: int, answer: bytes | Exception) -> None:
        future = self._take(number)
        if future is not None and future.set_running_or_notify_cancel():
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _answer(self, task: TaskState) -> bytes | Exception:
        if task.state == tasks_base.DONE:
            answer = records.get_bytes(self._catalog, f"{self.name}/{task.number}/answer {task.token}")
            return TasksError("the answer of a worker is gone") if answer is None else answer
        error = DatacacheError(
            f"tasks failed on the queue: {'; '.join(task.errors[-MAX_LOST:])}",
            hint="Where leases expire, workers die of these tasks: have they memory? What is done stays.",
        )
        return pickled(([], error, 0.0))

    def _forget(self, number: int, token: int = 0) -> None:
        """Let go of a parcel: then the same can be sent again."""
        self._store.drop(self._queue, [number])
        records.remove_bytes(self._catalog, f"{self.name}/{number}/tasks")
        records.remove_bytes(self._catalog, f"{self.name}/{number}/answer {token}")

    def _look(self) -> None:
        """Hold the job, and have parcels that are gone sent again."""
        self._job = records.renew_job(self._catalog, self._job)
        if self._store.queue(self._queue.name) != self._queue:
            raise TasksError(f"the job {self.name} was removed", hint="Run the command again: it goes on.")
        with self._lock:
            waiting = set(self._futures)
        there = {task.number for task in self._store.progress(self._queue)}
        gone = waiting - there
        # One that is being sent is noted here before it is there.
        for number in gone & self._gone_before:
            self._hand_out(number, TasksError("a parcel is gone from the queue"))
        self._gone_before = gone

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error if isinstance(error, Exception) else DatacacheError("the job was given up")
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
