"""Processes that have nothing of this one, as an executor."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from datacache.core import engine
from datacache.executors.queue import trusted


@contextmanager
def spawned_pool(home: Path, monkeypatch: pytest.MonkeyPatch, *, models: bool = False) -> Iterator[Executor]:
    """Give an executor of two processes, which have another home. `models`: they may load some."""
    monkeypatch.delenv("DATACACHE_HOME")
    resource_tracker.ensure_running()  # for all tests, and so not ended with the home of this one
    monkeypatch.setenv("DATACACHE_HOME", str(home))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield _Trusting(pool, partial(trusted.loads, models=models))


class _Trusting(Executor):
    """Hands calls on to processes that unpickle as workers of the queue do: whatever travels is listed there."""

    _max_workers = 2

    def __init__(self, pool: Executor, loads: Callable[[bytes], Any]) -> None:
        self._pool, self._loads = pool, loads

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if fn is not engine.do_tasks:
            return self._pool.submit(fn, *args, **kwargs)
        return self._pool.submit(_do_trusted, *args, self._loads)


def _do_trusted(*args: Any) -> bytes:
    answer = engine.do_tasks(*args)
    for result in trusted.loads(answer)[0]:
        trusted.loads(result)
    return answer
