"""Decide what happens after `fork()`: DataLoader workers fork, and so does everybody who uses them.

Calls spread over threads, results in order, bounded in number and in bytes.

For work that waits for other machines: requests to stores. Used by whatever makes many of them for one result: a long
row of them (`map_in_threads`), or a handful again and again (`gather`).

A bound on the bytes that are in flight at once; and the last values that took long to load, each loaded once: packs of
the catalog, blocks that are read past the daemon. What is to survive `fork()` of these is made by `PerProcess`.

Something that a thread does again and again (`RepeatedCall`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from datacache.core.errors import DatacacheError

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PerProcess(Generic[T]):
    """A value that each process makes for itself when it first asks: `fork()` gives a child none of its parent's.

    For connections, runtimes and open databases: a DataLoader forks its workers, and two processes on one socket read
    each other's answers. What a child inherited is kept unused, never finalised. Threads that ask first at the same
    moment wait for one of them to make it; a lock that a parent's thread held during `fork()` is not the child's.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[int, T] = {}  # by generation of processes
        self._locks: dict[int, threading.Lock] = {}

    def get(self) -> T:
        """This process's value. Raises what making it raises, and tries again at the next call."""
        try:
            return self._values[_generation]
        except KeyError:
            pass
        with self._locks.setdefault(_generation, threading.Lock()):
            if _generation not in self._values:
                self._values[_generation] = self._make()
            return self._values[_generation]

    def peek(self) -> T | None:
        """This process's value if it was made already."""
        return self._values.get(_generation)

    def take(self) -> T | None:
        """Give up this process's value, if there is one, for the caller to close."""
        return self._values.pop(_generation, None)

    def __reduce__(self) -> tuple[object, ...]:
        return (PerProcess, (self._make,))


_generation = 0
"""How many forks lie between the first process and this one: cheaper to look at than the pid."""


def _count_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count_fork)


_AHEAD = 64
"""Calls for each thread that are begun or wait to be, or whose results wait for an earlier one."""
_gathering = PerProcess(lambda: ThreadPoolExecutor(32, thread_name_prefix="gather"))


def gather(call: Callable[[T], R], items: Sequence[T]) -> list[R | DatacacheError]:
    """`call(item)` for each of a few items, all at once, in threads that the process keeps. The errors that a caller
    can act on are among the results; others are raised."""

    def run(item: T) -> R | DatacacheError:
        try:
            return call(item)
        except DatacacheError as exc:
            return exc

    if len(items) < 2:
        return [run(item) for item in items]
    return list(_gathering.get().map(run, items))


def map_in_threads(
    call: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    size_bytes: Callable[[T], int] = lambda _item: 0,
    limit_bytes: int = 1,
) -> Iterator[R]:
    """`call(item)` for each item, in their order. `items` is read in the caller's thread.

    A call begins when its `size_bytes` fit beside those of the calls under way (a larger one is alone). The first error
    of a call is raised, as soon as it is noticed; then, and when the caller stops early, calls that have begun are
    waited for and no others are made.
    """
    budget = ByteBudget(limit_bytes)
    failed: list[Future[R]] = []
    waiting: deque[Future[R]] = deque()

    def run(item: T, size: int) -> R:
        try:
            return call(item)
        finally:
            budget.give(size)

    def done(future: Future[R]) -> None:
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


class RepeatedCall:
    """Does something again and again in a thread of its own, from `start` to `stop`. Trouble does not end it: it is
    logged, once until a call has gone well again."""

    def __init__(
        self,
        name: str,
        call: Callable[[], object],
        every_s: float,
        *,
        first_s: float = 0.0,
        trouble: str,
        log: logging.Logger,
    ) -> None:
        """`name` is the thread's, `first_s` the time until the first call. `trouble` begins the line in the log, and
        says what does not happen meanwhile."""
        self._call, self._every_s, self._first_s = call, every_s, first_s
        self._trouble, self._log = trouble, log
        self._failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 0.0) -> None:
        """End the thread, and wait for it so long at most. A call that is under way ends by itself, or with the
        process."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._stopping.wait(wait_s):
            wait_s = self._every_s
            try:
                self._call()
                self._failed = False
            except Exception as exc:  # noqa: BLE001 - the next call may find things mended
                if not self._failed and not self._stopping.is_set():
                    self._log.warning("%s: %s", self._trouble, exc, exc_info=self._log.isEnabledFor(logging.DEBUG))
                self._failed = True


class ByteBudget:
    """Whoever holds bytes takes room for them first and gives it back. Safe from several threads.

    A request larger than the whole budget waits until it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = threading.Condition()  # guards _held

    def take(self, size_bytes: int) -> None:
        """Wait until `size_bytes` fit."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size_bytes <= self._limit)
            self._held += size_bytes

    def give(self, size_bytes: int) -> None:
        """Give bytes back."""
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()


class LastLoaded(Generic[K, V]):
    """Hold bytes, or what has a size, by their key, up to a number of bytes and one value at least. Each is loaded
    once, however many ask at the same moment; what cannot be loaded is an error for all of these, and is tried again by
    who asks later."""

    def __init__(self, limit_bytes: int, size_of: Callable[[Any], int] = len) -> None:
        self._limit_bytes, self._size_of = limit_bytes, size_of
        self._lock = threading.Lock()  # guards all below; never held while anything is loaded
        self._bytes = 0
        self._held: OrderedDict[K, V] = OrderedDict()
        self._coming: dict[K, Future[V]] = {}

    def get(self, key: K, load: Callable[[], V]) -> V:
        """Return the value of a key, by `load` where it is not held. Raises what that raises."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                return held
            future = self._coming.get(key)
            begun = future is None
            if future is None:
                future = self._coming[key] = Future()
        if not begun:
            return future.result()
        try:
            value = load()
        except BaseException as exc:
            with self._lock:
                del self._coming[key]
            future.set_exception(exc)
            raise
        with self._lock:
            self._held[key] = value
            self._bytes += self._size_of(value)
            while self._bytes > self._limit_bytes and len(self._held) > 1:
                self._bytes -= self._size_of(self._held.popitem(last=False)[1])
            del self._coming[key]
        future.set_result(value)
        return value

    def held(self, key: K) -> V | None:
        """Return the value of a key, if it is held."""
        with self._lock:
            return self._held.get(key)

    def forget(self, which: Callable[[K], bool]) -> None:
        """Let go of what is held under such keys."""
        with self._lock:
            for key in [key for key in self._held if which(key)]:
                self._bytes -= self._size_of(self._held.pop(key))
