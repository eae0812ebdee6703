"""A function applied to items by some threads, results in the order of the items, a bounded number ahead.

Used by `jsonl`. Unlike those of `core.threads` these threads are daemons, so that a command that is interrupted ends at
once, without waiting for servers that do not answer; otherwise they have ended when `ordered` has. And the consumer can
show progress meanwhile, however long one item takes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from queue import SimpleQueue
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_LOOK_EVERY_S = 0.2
_AHEAD = 16
"""Items for each thread that may be begun before the first of them is done: one that is slow stops no other for
long."""


def ordered(
    work: Callable[[_T], _R], items: Iterable[_T], *, threads: int, meanwhile: Callable[[], None] | None = None
) -> Iterator[_R]:
    """`work(item)` for each item. Errors of `work` are raised here, in their turn.

    `meanwhile` is called here a few times a second while nothing else happens. What is under way when the caller stops
    early is left to itself.
    """
    queue: SimpleQueue[tuple[Future[_R], _T] | None] = SimpleQueue()
    stopped = threading.Event()

    def run() -> None:
        while (task := queue.get()) is not None:
            future, item = task
            if stopped.is_set():
                continue
            try:
                future.set_result(work(item))
            except BaseException as exc:  # noqa: BLE001 - raised where the result is asked for
                future.set_exception(exc)

    pool = [threading.Thread(target=run, name=f"import-{number}", daemon=True) for number in range(threads)]
    for thread in pool:
        thread.start()
    waiting: deque[Future[_R]] = deque()
    finished = False
    try:
        for item in items:
            future: Future[_R] = Future()
            queue.put((future, item))
            waiting.append(future)
            while waiting and (waiting[0].done() or len(waiting) >= threads * _AHEAD):
                yield _result(waiting.popleft(), meanwhile)
        while waiting:
            yield _result(waiting.popleft(), meanwhile)
        finished = True
    finally:
        stopped.set()
        for _ in pool:
            queue.put(None)
        if finished:
            for thread in pool:
                thread.join()


def _result(future: Future[_R], meanwhile: Callable[[], None] | None) -> _R:
    while True:
        try:
            return future.result(_LOOK_EVERY_S)
        except NotYet:
            if future.done():  # the work itself timed out
                raise
            if meanwhile is not None:
                meanwhile()
