"""Work spread over processes, results in order: the same whatever the number of processes.

Used by the annotation index, image operations, shards, the import of videos and listings. Worker processes are made by
`fork()`, so the worker reaches them without being copied, and whatever holds connections opens its own there
(`core.concurrency.PerProcess`).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

from datacache.core.engine import Engine, Worker, map_on
from datacache.core.errors import DatacacheError

_T_contra = TypeVar("_T_contra", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)
_AHEAD = 3
"""Tasks in flight for each process: enough that none waits, few enough that memory stays small."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


Workers = int | Engine | None
"""The doer of tasks: so many processes of this machine (None: one for each processor), or an engine."""


def ordered_map(
    worker: Worker[_T_contra, _R_co],
    tasks: Iterable[_T_contra],
    *,
    processes: Workers = None,
) -> Iterator[_R_co]:
    """Yield `worker.work(task)` for each task, in their order.

    An engine does all of them (`engine.map_on`). Else with one task, one processor, or in a process that may have no
    children, everything happens here. Errors of the work are raised here; then, and when the caller stops early, what
    is in flight is abandoned. `DatacacheError` if a worker process was killed. Any thread may call it.
    """
    if isinstance(processes, Engine):
        yield from map_on(processes, worker, tasks)
        return
    count = processes or len(os.sched_getaffinity(0))
    ahead = list(islice(tasks := iter(tasks), 2))
    tasks = chain(ahead, tasks)
    if count < 2 or len(ahead) < 2 or multiprocessing.current_process().daemon:
        yield from map(worker.work, tasks)
        return
    with working_processes(worker, count) as submit:
        waiting: deque[Future[_R_co]] = deque()
        for task in tasks:
            waiting.append(submit(task))
            if len(waiting) >= count * _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def working_processes(worker: Worker[_T_contra, _R_co], count: int) -> Iterator[Callable[[_T_contra], Future[_R_co]]]:
    """Give a function that has one of `count` processes do a task. They end with the block, and what is in flight is
    abandoned. `DatacacheError` within it if one was killed."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, _begin_process, (os.getpid(), worker)) as pool:
        try:
            yield lambda task: pool.submit(_work, task)
        except BrokenProcessPool as exc:
            raise DatacacheError(
                "a worker process was killed", hint="Was memory short? (dmesg) What is done stays done: run it again."
            ) from exc
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker: Worker[Any, Any]
"""The one worker of a worker process, which does nothing else; never set in a process that others use."""


def end_with(parent: int) -> None:
    """Have this process, a child of `parent`, end when that does, which it would otherwise wait for for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _begin_process(parent: int, worker: Worker[Any, Any]) -> None:
    global _worker
    gc.freeze()  # a collection would write to each page that is the parent's, and so copy it
    end_with(parent)
    _worker = worker


def _work(task: Any) -> Any:
    return _worker.work(task)
