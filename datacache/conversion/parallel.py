"""Work spread over processes, results in order: the same whatever the number of processes.

Used by the annotation index and by image operations. Workers are made by `fork()`, so what `begin` is given reaches
them without being copied, and whatever holds connections opens its own there (`core.concurrency.PerProcess`).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any, TypeVar

from datacache.core.errors import DatacacheError

_T = TypeVar("_T")
_R = TypeVar("_R")
_AHEAD = 3
"""Tasks in flight for each process: enough that none waits, few enough that memory stays small."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def ordered_map(
    work: Callable[[_T], _R],
    tasks: Iterable[_T],
    *,
    begin: Callable[..., None],
    arguments: tuple[Any, ...] = (),
    processes: int | None = None,
) -> Iterator[_R]:
    """`work(task)` for each task, in their order. `begin(*arguments)` is called once in each process before.

    With one task or one process everything happens here. Errors of `work` are raised here; then, and when the caller
    stops early, what is in flight is abandoned. `DatacacheError` if a worker was killed.
    """
    count = processes or processors()
    ahead = list(islice(tasks := iter(tasks), 2))
    tasks = chain(ahead, tasks)
    if count < 2 or len(ahead) < 2:
        begin(*arguments)
        yield from map(work, tasks)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, _begin_worker, (os.getpid(), begin, arguments)) as pool:
        waiting: deque[Future[_R]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(work, task))
                if len(waiting) >= count * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as exc:
            raise DatacacheError(
                "a worker process was killed", hint="Was memory short? (dmesg) What is done stays done: run it again."
            ) from exc
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(parent: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # A parent that is killed takes its workers with it: they would wait for tasks for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    begin(*arguments)
