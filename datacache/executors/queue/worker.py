"""Do the tasks that clients put into the catalog's queue: what `dsctl tasks work` is.

A process does one parcel after the other. A thread beside it renews the worker's note and the parcel's lease, so a
worker that is killed is known to be gone within `client.LEASE_S`. One that is told to stop finishes its parcel; where
that takes longer than `FINISH_S`, the thread gives the parcel back and ends the process.

Nothing is unpickled but what `trusted` knows, and models only where the plan allows it.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_128_hexdigest

from datacache.catalog.base import Catalog
from datacache.catalog.tasks.base import Leased, QueueRecord, TaskStore
from datacache.core.engine import do_tasks, patiently
from datacache.core.errors import CatalogUnavailableError, DatacacheError, LeaseLostError
from datacache.executors.queue import records, trusted

FINISH_S = 10.0
"""Kubernetes gives a pod 30 s."""
_RENEW_S = 3.0
_FASTEST_S, _SLOWEST_S = 0.05, 1.0
_JOBS_S = 1.0
"""The jobs are looked for this often."""
_FORGET_S = 600.0
_KEPT_CODES = 4
_T = TypeVar("_T")


class Ended(Enum):
    """Why a worker ended."""

    STOPPED = "stopped"
    IDLE = "idle"
    ONCE = "once"
    DONE = "done"
    FAILED = "failed"


class ParcelDone(NamedTuple):
    """A parcel that a worker has done."""

    job: str
    tasks: int
    took_s: float
    problem: str
    """Why it does not count; '' where it does."""


class WorkPlan(NamedTuple):
    """What a worker does, and until when."""

    job: str = ""
    """The only job; '' for any."""
    once: bool = False
    """End after one parcel."""
    max_idle_s: float | None = None
    """End when no client that it works for has lived for so long."""
    allow_models: bool = False
    """Load the models that clients name, which run code."""


class _Held(NamedTuple):
    job: str
    lease: Leased
    lease_s: float


class QueueWorker:
    """Does parcels. `run` it in one thread; `stop` may be set from any, and by a handler of signals."""

    def __init__(self, catalog: Catalog, store: TaskStore, name: str, plan: WorkPlan) -> None:
        self._catalog, self._store, self._name, self._plan = catalog, store, name, plan
        self._loads = partial(trusted.loads, models=plan.allow_models)
        self.stop = threading.Event()
        self._over = threading.Event()
        self._held: _Held | None = None
        self._codes: OrderedDict[str, bytes] = OrderedDict()
        self._queues: list[tuple[str, QueueRecord]] = []
        self._clients_live = False
        self._look_at = self._forget_at = 0.0
        self._ended: Ended | None = None
        self._seen = False

    def run(self, say: Callable[[ParcelDone], None]) -> Ended:
        """Do parcels to the end. Raises `CatalogUnavailableError` where the catalog is away for a minute."""
        records.renew_worker(self._catalog, self._name, self._plan.job, models=self._plan.allow_models)
        thread = threading.Thread(target=self._pulse, name="pulse", daemon=True)
        thread.start()
        try:
            return self._run(say)
        finally:
            self._over.set()
            thread.join()
            records.remove_worker(self._catalog, self._name)

    def _run(self, say: Callable[[ParcelDone], None]) -> Ended:
        pause_s, idle_since = _FASTEST_S, time.monotonic()
        while not self.stop.is_set():
            found = self._patiently(self._lease)
            if isinstance(found, Ended):
                return found
            if found is None:
                idle_s = time.monotonic() - idle_since
                if self._clients_live:  # they may have more tasks
                    idle_since = time.monotonic()
                elif self._plan.max_idle_s is not None and idle_s >= self._plan.max_idle_s:
                    return Ended.IDLE
                self.stop.wait(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(_SLOWEST_S, 1.5 * pause_s)
                continue
            self._held = found
            try:
                done = self._do(found)
            finally:
                self._held = None
            say(done)
            if self._plan.once:
                return Ended.ONCE
            pause_s, idle_since = _FASTEST_S, time.monotonic()
        return Ended.STOPPED

    def _lease(self) -> _Held | Ended | None:
        """Return a parcel, why there will be none, or None."""
        if time.monotonic() >= self._look_at:
            self._look()
        if self._ended is not None:
            return self._ended
        for job, queue in self._queues:
            if (known := records.parameters(queue)) is None:
                continue
            lease_s, max_lost = known
            limits = {"lease_s": lease_s, "max_lost": max_lost}
            lease = self._store.lease(queue, self._name, secrets.token_hex(8), **limits)  # type: ignore[arg-type]
            if lease is not None:
                return _Held(job, lease, lease_s)
        return None

    def _look(self) -> None:
        """Find the jobs whose clients live."""
        if time.monotonic() >= self._forget_at:
            records.forget_old(self._catalog, self._store)
            self._forget_at = time.monotonic() + _FORGET_S
        if self._plan.job:
            job = records.jobs(self._catalog).get(self._plan.job)
            ends = {records.DONE: Ended.DONE, records.FAILED: Ended.FAILED}
            if job is not None:
                self._seen, self._ended = True, ends.get(job.state)
            elif self._seen:
                self._ended = Ended.FAILED  # nobody went on with it: it was forgotten
        names = [name for name in records.running(self._catalog) if self._plan.job in ("", name)]
        random.shuffle(names)  # one job is not always before the others
        queues = [(name, self._store.queue(records.queue_name(name))) for name in names]
        if not self._plan.allow_models:
            queues = [(name, queue) for name, queue in queues if queue is None or not records.needs_models(queue)]
        self._clients_live = bool(queues)
        self._queues = [(name, queue) for name, queue in queues if queue is not None and queue.made]
        self._look_at = time.monotonic() + _JOBS_S

    def _do(self, held: _Held) -> ParcelDone:
        started, count = time.monotonic(), 0
        job, lease, lease_s = held
        try:
            try:
                key, tasks = self._parcel(job, lease.number)
                count = len(tasks)
                answer = do_tasks(key, self._code(job, key), tasks, self._loads)
            except DatacacheError as exc:
                if isinstance(exc, CatalogUnavailableError):
                    raise
                error = f"{type(exc).__name__}: {exc}"
                self._patiently(lambda: self._store.fail(lease, error, max_failures=1))
                return ParcelDone(job, count, time.monotonic() - started, error)
            place = f"{job}/{lease.number}/answer {lease.token}"
            self._patiently(lambda: records.put_bytes(self._catalog, place, answer))
            try:
                self._patiently(lambda: self._store.report(lease, 1, lease_s=lease_s))
            except LeaseLostError:
                records.remove_bytes(self._catalog, place)
                raise
        except LeaseLostError as exc:
            return ParcelDone(job, count, time.monotonic() - started, str(exc))
        return ParcelDone(job, count, time.monotonic() - started, "")

    def _parcel(self, job: str, number: int) -> tuple[str, Sequence[bytes]]:
        packed = self._patiently(lambda: records.get_bytes(self._catalog, f"{job}/{number}/tasks"))
        if packed is None:
            raise DatacacheError("a parcel's tasks are gone from the catalog")
        found: Any = trusted.loads(packed)
        match found:
            case str(key), list(tasks) if all(isinstance(task, bytes) for task in tasks):
                return key, tasks
        raise DatacacheError("a parcel in the catalog is none")

    def _code(self, job: str, key: str) -> bytes:
        """Return the pickled worker that a key names by its hash."""
        code = self._codes.pop(key, None)
        if code is None:
            code = self._patiently(lambda: records.get_bytes(self._catalog, f"{job}/code/{key}"))
            if code is None or key.rpartition(" ")[2] != xxh3_128_hexdigest(code):
                raise DatacacheError("the code for a parcel's tasks is gone from the catalog, or another")
        self._codes[key] = code
        while len(self._codes) > _KEPT_CODES:
            self._codes.popitem(last=False)
        return code

    def _patiently(self, call: Callable[[], _T]) -> _T:
        return patiently(call, self.stop.is_set)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _pulse(self) -> None:
        pause_s, renewed_at = min(0.2, _RENEW_S), time.monotonic()
        stopped_at = 0.0
        while not self._over.wait(pause_s):
            now = time.monotonic()
            if self.stop.is_set():
                stopped_at = stopped_at or now
                if now - stopped_at > FINISH_S:
                    self._give_back()
            held = self._held
            every_s = min(_RENEW_S, held.lease_s / 4) if held is not None else _RENEW_S
            if now - renewed_at < every_s:
                continue
            renewed_at = now
            try:
                records.renew_worker(self._catalog, self._name, self._plan.job, models=self._plan.allow_models)
                if held is not None and self._held is held:
                    self._store.report(held.lease, 0, lease_s=held.lease_s)
            except DatacacheError:
                pass  # a lease that is lost is told when its parcel is done; a catalog that is away comes back

    def _give_back(self) -> None:
        try:
            held = self._held
            if held is not None:
                self._store.release(held.lease)
            records.remove_worker(self._catalog, self._name)
        finally:
            os._exit(0)
