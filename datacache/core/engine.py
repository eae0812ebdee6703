"""Tasks on machines of others: on anything with the interface of `concurrent.futures.Executor`.

Used by `parallel.ordered_map` where a caller gives an `Engine` in place of a number of processes: Dask, Ray, the
catalog's queue, or an executor of the user's own. A worker is pickled once, and kept by each process that gets tasks of
it. Tasks go together, about a second's worth, and results come back in the order of the tasks. What an engine loses is
sent again a few times; that is safe, as all our tasks may be done twice.

Settings do not travel whole. What has a method `reduce_elsewhere` is pickled by it, as by `object.__reduce__`: so a
process elsewhere has its own home, cache and credentials.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
import time
from base64 import b64decode, b64encode
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeVar

from xxhash import xxh3_128_hexdigest

from datacache.core.errors import CatalogUnavailableError, DatacacheError, UsageError
from datacache.core.joblog import JobLog

_T_contra = TypeVar("_T_contra", contravariant=True)
_R_co = TypeVar("_R_co", covariant=True)
_T = TypeVar("_T")
_AHEAD = 3
"""Parcels in flight for each process: enough that none waits while results travel."""
_PARCEL_S = 1.0
_MOST_TASKS = 4096
_MOST_BYTES = 8 * 2**20
"""Of the tasks in a parcel, unless one alone has more."""
_TRIES = 4
_LOOK_S = 3.0
"""The engine is asked for its width this often while a result is waited for."""
_KEPT_WORKERS = 4
PATIENCE_S = 60.0
"""A catalog may be away for so long."""
_AWAY_S = 1.0
_ID_DIGITS = 32
_OF_BYTES = "biufcmMSU"
"""Kinds of arrays whose bytes are their values."""
_VERSION: str = sys.modules["datacache"].__version__  # imported by importing this; naming it would be a circle


class Worker(Protocol[_T_contra, _R_co]):
    """The worker's code. Local processes are forked with it; elsewhere it is pickled."""

    def work(self, task: _T_contra, /) -> _R_co:
        """Return the result of one task. Doing it twice gives the same, and does no harm.

        A worker whose results name things that may be gone later has `lasts(result)`, too, which tells before a result
        of an earlier start is taken whether they are there; else the task is done again."""
        ...


class Engine:
    """Where tasks are done. Leave it as a context when what they were for is committed: then the results that were kept
    for a second start are removed. One thread."""

    def __init__(
        self,
        executor: Executor,
        *,
        named: str = "the engine",
        width: Callable[[], int],
        folder: Path,
        close: Callable[[bool], None] = lambda _done: None,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> None:
        """`named` is for errors. `width` says how many processes there are now, and may warn where there are none.
        Results are kept in `folder`. `close` lets go of what belongs to the executor, and is told whether all was done.
        `loads` unpickles answers."""
        self.executor, self.loads = executor, loads
        self._named, self._width = named, width
        self._folder, self._close = folder, close
        self._logs: dict[str, JobLog] = {}

    def width(self) -> int:
        """Return how many processes there are now. `DatacacheError` where the engine has failed."""
        with self._named_errors():
            return self._width()

    def submit(self, key: str, worker: bytes, tasks: Sequence[bytes]) -> Future[bytes]:
        """Have `do_tasks` called there. `DatacacheError` where the engine has failed."""
        with self._named_errors():
            return self.executor.submit(do_tasks, key, worker, tasks)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except DatacacheError:
            raise
        except Exception as exc:
            raise DatacacheError(
                f"{self._named} has failed: {type(exc).__name__}: {exc}",
                hint="Is it still there? Run it again: what is done stays.",
            ) from exc

    def log(self, worker: str) -> JobLog:
        """Open the log of the tasks of a worker, which is named by its hash."""
        if worker not in self._logs:
            taken = DatacacheError("another process has the same work done now", hint="Wait for it to end.")
            self._logs[worker] = JobLog(self._folder, {"worker": worker}, taken=taken)
        return self._logs[worker]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        for log in self._logs.values():
            if kind is None:
                log.remove()
            log.close()
        self._close(kind is None)


def map_on(engine: Engine, worker: Worker[_T_contra, _R_co], tasks: Iterable[_T_contra]) -> Iterator[_R_co]:
    """Yield the result of each task, in their order, or what an earlier start has got of the same task.

    Errors of the work are raised here; `DatacacheError` where the engine has lost the same tasks again and again.
    """
    return _Spread(engine, worker).results(iter(tasks))


class _Parcel(NamedTuple):
    """Tasks that go together."""

    tasks: list[bytes]
    future: Future[bytes]
    tries: int = 1


class _Found(NamedTuple):
    """The result that an earlier start has got of a task."""

    result: Any


class _Spread:
    def __init__(self, engine: Engine, worker: Worker[Any, Any]) -> None:
        self._engine = engine
        self._lasts: Callable[[Any], bool] = getattr(worker, "lasts", lambda _result: True)
        self._worker = pickled(worker)
        self._key = f"{_VERSION} {xxh3_128_hexdigest(self._worker)}"
        self._log = engine.log(self._key)
        self._kept = {_id(record): at for at, record in self._log.records()}
        self._size = 1
        self._unkept: Exception | None = None

    def results(self, tasks: Iterator[Any]) -> Iterator[Any]:
        waiting: deque[_Parcel | _Found] = deque()
        packed = (pickled(task) for task in tasks)
        try:
            while True:
                most = _AHEAD * max(1, self._engine.width())
                while len(waiting) < 2 * most and sum(isinstance(each, _Parcel) for each in waiting) < most:
                    if not self._take(packed, waiting):
                        break
                if not waiting:
                    return
                first = waiting.popleft()
                if isinstance(first, _Found):
                    yield first.result
                    continue
                try:
                    answer = self._wait(first.future)
                except Exception as exc:  # the engine's own: errors of the work come as results
                    if first.tries >= _TRIES:
                        raise DatacacheError(
                            f"tasks were lost {first.tries} times: {type(exc).__name__}: {exc}",
                            hint="Do its workers have memory, and this datacache? Run it again: what is done stays.",
                        ) from exc
                    waiting.appendleft(self._send(first.tasks, first.tries + 1))
                    continue
                yield from self._received(answer)
        finally:
            for each in waiting:
                if isinstance(each, _Parcel):
                    each.future.cancel()

    def _wait(self, future: Future[bytes]) -> bytes:
        """Return the answer. Ask for the width meanwhile, which tells the user where no process is left."""
        while not future.done():
            try:
                return future.result(_LOOK_S)
            except TimeoutError:
                with suppress(Exception):  # an engine that ends also ends its futures
                    self._engine.width()
        return future.result()

    def _take(self, packed: Iterator[bytes], waiting: deque[_Parcel | _Found]) -> bool:
        """Send the next tasks, up to one whose result is kept. Return False where there are none."""
        tasks: list[bytes] = []
        size_bytes = 0
        kept: _Found | None = None
        while len(tasks) < self._size and size_bytes < _MOST_BYTES and kept is None:
            task = next(packed, None)
            if task is None:
                break
            kept = self._find_kept(task)
            if kept is None:
                tasks.append(task)
                size_bytes += len(task)
        if tasks:
            waiting.append(self._send(tasks))
        if kept is not None:
            waiting.append(kept)
        return bool(tasks) or kept is not None

    def _find_kept(self, task: bytes) -> _Found | None:
        at = self._kept.get(_task_id(task)) if self._kept else None
        if at is None:
            return None
        (record,) = self._log.read(iter([at]))
        result = _unpacked(record)
        return _Found(result) if self._lasts(result) else None

    def _send(self, tasks: list[bytes], tries: int = 1) -> _Parcel:
        future = self._engine.submit(self._key, self._worker, tasks)
        future.add_done_callback(lambda done: self._note(tasks, done))
        return _Parcel(tasks, future, tries)

    def _note(self, tasks: list[bytes], done: Future[bytes]) -> None:
        """Keep results when they come, which is in no order. Runs in any thread."""
        if done.cancelled() or done.exception() is not None:
            return
        loads = self._engine.loads
        try:
            for task, result in zip(tasks, loads(done.result())[0], strict=False):
                if loads is not pickle.loads:
                    loads(result)  # raises what it refuses: what is kept is believed
                self._log.add(_task_id(task) + b64encode(result))
        except Exception as exc:  # noqa: BLE001 - raised where results are used
            self._unkept = exc

    def _received(self, answer: bytes) -> Iterator[Any]:
        results, error, took_s = self._engine.loads(answer)
        if self._unkept is not None:
            raise self._unkept
        for result in results:
            yield self._engine.loads(result)
        if error is not None:
            raise error
        if took_s > 0 and results:
            wanted = int(_PARCEL_S * len(results) / took_s)
            self._size = max(1, min(wanted, 2 * self._size, _MOST_TASKS))


def _task_id(task: bytes) -> bytes:
    return xxh3_128_hexdigest(task).encode()


def _id(record: bytes) -> bytes:
    return record[:_ID_DIGITS]


def _unpacked(record: bytes) -> Any:
    return pickle.loads(b64decode(record[_ID_DIGITS:]))  # noqa: S301 - of our own home


# --- in the processes elsewhere -------------------------------------------------------------------------------------

_workers: OrderedDict[str, Any] = OrderedDict()
"""The workers met last, by their key."""


def do_tasks(key: str, worker: bytes, tasks: Sequence[bytes], loads: Callable[[bytes], Any] = pickle.loads) -> bytes:
    """Do some tasks of the worker that `key` names, which begins with the client's version. Return their results, the
    error that ended them, and how long they took in seconds, pickled. `loads` unpickles worker and tasks. A catalog
    that is away is waited for: no task is at fault."""
    started = time.perf_counter()
    results: list[bytes] = []
    error: Exception | None = None
    try:
        if (version := key.partition(" ")[0]) != _VERSION:
            raise UsageError(
                f"a process of the engine has datacache {_VERSION}, and this one {version}",
                hint="Install the same version in both places.",
            )
        known = _workers.pop(key, None) or patiently(partial(loads, worker))
        _workers[key] = known
        while len(_workers) > _KEPT_WORKERS:
            _workers.popitem(last=False)
        results.extend(pickled(patiently(partial(known.work, loads(task)))) for task in tasks)
    except Exception as exc:  # noqa: BLE001 - told to the client, which raises it
        error = exc
    took_s = time.perf_counter() - started
    try:
        answer = pickled((results, error, took_s))
        if error is not None:
            loads(answer)
        return answer
    except Exception:  # noqa: BLE001 - an error that cannot be pickled, or only one way
        return pickled((results, DatacacheError(f"{type(error).__name__}: {error}"), took_s))


def patiently(call: Callable[[], _T], is_over: Callable[[], bool] = lambda: False) -> _T:
    """Repeat a call, which is idempotent, while the catalog is away: for a minute, and until `is_over()`. A process
    that was stopped meanwhile has its minute from when it finds the catalog away."""
    deadline: float | None = None
    while True:
        try:
            return call()
        except CatalogUnavailableError:
            now = time.monotonic()
            deadline = now + PATIENCE_S if deadline is None else deadline
            if now >= deadline or is_over():
                raise
        time.sleep(random.uniform(0.5, 1.5) * _AWAY_S)


def _array(dtype: str, shape: tuple[int, ...] | None, data: bytes) -> Any:
    """Unpickle an array of numpy, or a number where `shape` is None: of bytes, never of objects."""
    import numpy as np

    array = np.frombuffer(data, np.dtype(str(dtype))).reshape(shape or ())
    return array[()] if shape is None else array.copy()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, BaseException):  # past copyreg, in which Dask puts its own for all exceptions
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in _OF_BYTES:
            scalar = not isinstance(value, sys.modules["numpy"].ndarray)
            return _array, (value.dtype.str, None if scalar else value.shape, value.tobytes())
        reduce = getattr(value, "reduce_elsewhere", None)
        return NotImplemented if reduce is None or isinstance(value, type) else reduce()


def pickled(value: Any) -> bytes:
    """Pickle what travels to or from an engine: `reduce_elsewhere` counts, and errors need no library of another."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
