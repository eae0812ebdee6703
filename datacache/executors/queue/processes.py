"""Worker processes of one machine: `run_workers`.

Used by `datacache.api`, in a process that does nothing else. It forks the workers, starts another for each that is
killed, and hands signals on: at SIGTERM and Ctrl-C they finish what they have or give it back. Where it is killed
itself, the kernel kills them. One thread.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

from datacache.catalog.open import open_catalog_url, open_task_store
from datacache.core.errors import DatacacheError
from datacache.core.parallel import end_with
from datacache.executors.queue.worker import Ended, ParcelDone, QueueWorker, WorkPlan
from datacache.settings import Settings

_AGAIN_S = 1.0
"""How long after a worker was killed another one is started: what killed the first may kill it at once."""
_FOLLOWED = (Ended.FAILED, Ended.DONE, Ended.ONCE, Ended.IDLE, Ended.STOPPED)
"""Why all ended, where workers ended for several reasons: the first of these that one of them had."""
_log = logging.getLogger(__name__)


class _Child:
    def __init__(self, settings: Settings, plan: WorkPlan) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.process: ForkProcess = context.Process(target=_work, args=(settings, plan, theirs, os.getpid()))
        self.process.start()
        theirs.close()
        self.ended: Ended | DatacacheError | None = None

    def drain(self, say: Callable[[ParcelDone], None]) -> None:
        """Take what it has told so far."""
        with suppress(EOFError, OSError):
            while self.connection.poll():
                told = self.connection.recv()
                if isinstance(told, ParcelDone):
                    say(told)
                else:
                    self.ended = told


def run_workers(settings: Settings, plan: WorkPlan, processes: int, say: Callable[[ParcelDone], None]) -> Ended:
    """Do parcels in some processes until the plan ends, or a signal. Return why it ended. Raises the error of a worker
    that can go on no more."""
    children: list[_Child] = []
    with _signals_to(children) as stopping:
        children += [_Child(settings, plan) for _ in range(processes)]
        ended: set[Ended] = set()
        error: DatacacheError | None = None
        while children:
            wait([part for child in children for part in (child.connection, child.process.sentinel)])
            for child in list(children):
                child.drain(say)
                if child.process.is_alive():
                    if child.ended is not None:
                        child.process.join()
                    else:
                        continue
                child.drain(say)
                children.remove(child)
                child.connection.close()
                child.process.join()
                if isinstance(child.ended, DatacacheError):
                    error = error or child.ended
                    _terminate(children)
                elif child.ended is not None or stopping.is_set():
                    ended.add(child.ended or Ended.STOPPED)
                else:
                    _log.warning("a worker process was killed (exit code %s)", child.process.exitcode)
                    if not stopping.wait(_AGAIN_S):
                        children.append(_Child(settings, plan))
    if error is not None:
        raise error
    return next(why for why in _FOLLOWED if why in ended)


@contextmanager
def _signals_to(children: list[_Child]) -> Iterator[threading.Event]:
    """Hand signals on to children while this is open. Gives what is set from the first one on; the second one ends the
    children at once."""
    stopping = threading.Event()

    def hand_on(_number: int, _frame: Any) -> None:
        if stopping.is_set():
            for child in children:
                child.process.kill()
        stopping.set()
        _terminate(children)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(children: list[_Child]) -> None:
    for child in children:
        child.process.terminate()


def _work(settings: Settings, plan: WorkPlan, tell: Connection, parent: int) -> None:
    gc.freeze()
    name = f"{socket.gethostname()}:{os.getpid()}:{time.time_ns() % 0x10000:04x}"
    catalog, store = open_catalog_url(settings.catalog, settings=settings), open_task_store(settings.catalog)
    worker = QueueWorker(catalog, store, name, plan)
    signal.signal(signal.SIGTERM, lambda _number, _frame: worker.stop.set())
    end_with(parent)
    ended: Ended | DatacacheError
    try:
        ended = worker.run(tell.send)
    except DatacacheError as exc:
        ended = exc
    tell.send(ended)
    store.close()
    catalog.close()
