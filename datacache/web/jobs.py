"""What takes longer than a request: a version that is made, two that are compared. A page shows how far it is.

Nothing is lost with a job that ends with the server: commits are idempotent, and asked for again they go on. Any thread
may call. A `Jobs` owns its threads; close it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from datacache.core.errors import PathNotFoundError, UsageError
from datacache.core.html import visible

_log = logging.getLogger(__name__)
_KEPT: Final = 100
_MOST_WAITING: Final = 50
Progress = Callable[[str, int, int], None]
"""Step, images done, images in all."""


class Job:
    """A piece of work. `done` has the address of what came out, or the error."""

    def __init__(self, title: str, user: str, datasets: Collection[str]) -> None:
        self.id = secrets.token_hex(8)
        self.title, self.user, self.datasets = title, user, datasets
        self.started_s = time.time()
        self.step, self.count, self.total = "", 0, 0
        self.done: Future[str] = Future()

    def tell(self, step: str, count: int, total: int) -> None:
        """Note how far it is."""
        self.step, self.count, self.total = step, count, total


class Jobs:
    """The jobs of a server, the newest last."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "page-job")
        self._lock = threading.Lock()  # guards _jobs and _running
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._running: dict[Hashable, Job] = {}

    def start(
        self,
        key: Hashable,
        title: str,
        run: Callable[[Progress], str],
        *,
        user: str = "",
        datasets: Collection[str],
    ) -> Job:
        """Begin a job about some data sets, whose `run` returns the address of what it made; the one that has this key
        and still runs is not begun twice. `UsageError` where too many wait."""
        with self._lock:
            if key in self._running:
                return self._running[key]
            if len(self._running) >= _MOST_WAITING:
                raise UsageError(f"{_MOST_WAITING} jobs of this page are not done yet", hint="Try again in a while.")
            job = Job(title, user, datasets)
            self._jobs[job.id] = self._running[key] = job
            for id in [id for id, each in self._jobs.items() if each.done.done()][:-_KEPT]:
                del self._jobs[id]
        self._threads.submit(self._run, key, job, run)
        return job

    def get(self, id: str, may_see: Callable[[str], bool] = lambda _dataset: True) -> Job:
        """Return a job. `PathNotFoundError` for one that is not known any more, or tells of what may not be seen."""
        with self._lock:
            job = self._jobs.get(id)
        if job is None or not all(map(may_see, job.datasets)):
            raise PathNotFoundError("this job is not known any more; what it made is among the versions", path=id)
        return job

    def all(self) -> list[Job]:
        """Return the jobs that are known, the newest first."""
        with self._lock:
            return [*reversed(self._jobs.values())]

    def close(self) -> None:
        """Begin no more. Those that run end with the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, key: Hashable, job: Job, run: Callable[[Progress], str]) -> None:
        try:
            address = run(job.tell)
        except BaseException as exc:  # noqa: BLE001 - whoever asks is told
            _log.info("%s: %s", job.title, visible(str(exc)))
            job.done.set_exception(exc)
        else:
            job.done.set_result(address)
        finally:
            with self._lock:
                del self._running[key]
