"""Calls spread over threads, results in order, bounded in number and in bytes.

For work that waits for other machines: requests to stores. Used by whatever makes many of them for one result: a long
row of them (`map_in_threads`), or a handful again and again (`gather`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from datacache.core.budget import ByteBudget
from datacache.core.concurrency import PerProcess
from datacache.core.errors import DatacacheError

_T = TypeVar("_T")
_R = TypeVar("_R")
_AHEAD = 64
"""Calls for each thread that are begun or wait to be, or whose results wait for an earlier one."""


_GATHER_THREADS = 32
_gathering = PerProcess(lambda: ThreadPoolExecutor(_GATHER_THREADS, thread_name_prefix="gather"))


def gather(call: Callable[[_T], _R], items: Sequence[_T]) -> list[_R | DatacacheError]:
    """`call(item)` for each of a few items, all at once, in threads that the process keeps. The errors that a caller
    can act on are among the results; others are raised."""

    def run(item: _T) -> _R | DatacacheError:
        try:
            return call(item)
        except DatacacheError as exc:
            return exc

    if len(items) < 2:
        return [run(item) for item in items]
    return list(_gathering.get().map(run, items))


def map_in_threads(
    call: Callable[[_T], _R],
    items: Iterable[_T],
    *,
    threads: int,
    size_bytes: Callable[[_T], int] = lambda _item: 0,
    limit_bytes: int = 1,
) -> Iterator[_R]:
    """`call(item)` for each item, in their order. `items` is read in the caller's thread.

    A call begins when its `size_bytes` fit beside those of the calls under way (a larger one is alone). The first error
    of a call is raised, as soon as it is noticed; then, and when the caller stops early, calls that have begun are
    waited for and no others are made.
    """
    budget = ByteBudget(limit_bytes)
    failed: list[Future[_R]] = []
    waiting: deque[Future[_R]] = deque()

    def run(item: _T, size: int) -> _R:
        try:
            return call(item)
        finally:
            budget.give(size)

    def done(future: Future[_R]) -> None:
        if not future.cancelled() and future.exception() is not None:
            failed.append(future)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="map")
    try:
        for item in items:
            size = size_bytes(item)
            budget.take(size)
            future = pool.submit(run, item, size)
            future.add_done_callback(done)
            waiting.append(future)
            while waiting and (waiting[0].done() or len(waiting) >= _AHEAD * threads):
                yield waiting.popleft().result()
            if failed:
                failed[0].result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
