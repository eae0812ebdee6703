"""A store's clock: what the age of its objects is counted by.

The times of objects are the store's, and a node's clock may differ from it by days. A store is asked by writing a small
object and looking at its time, since nothing else tells the time of every kind of store. Any thread may call it.
"""

from __future__ import annotations

import re
import secrets
import time

from datacache.core.errors import StoreError
from datacache.store.base import ObjectStore

_NAME = "clock-"
IS_PROBE = re.compile(rf"{_NAME}[0-9a-f]{{16}}")
"""The names, below the prefix, of what is written: a process that is killed leaves one."""
_READ_AGAIN_S = 3600.0


class StoreClock:
    """The clock of one store, which is asked when it is first needed, and then once an hour."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        """Write probes below `prefix`, which ends with a slash."""
        self._store, self._prefix = store, prefix
        self._read: tuple[float, float] | None = None

    def now_s(self) -> float:
        """Return Unix time there, not ahead of it. The store's errors, and `StoreError` where objects have no times."""
        here_s = elapsed_s()
        read = self._read
        if read is None or here_s - read[0] > _READ_AGAIN_S:
            read = self._read = (here_s, self._ask())
        return read[1] + here_s - read[0]

    def _ask(self) -> float:
        key = f"{self._prefix}{_NAME}{secrets.token_hex(8)}"
        self._store.put(key, b"")
        try:
            mtime_ns = self._store.head(key).mtime_ns
        finally:
            self._store.delete(key)
        if mtime_ns <= 0:
            raise StoreError(
                f"{self._store.url} does not tell when an object was written", hint="Use another place for objects."
            )
        return mtime_ns / 1e9


def elapsed_s() -> float:
    """Return seconds since the machine was started: goes on while it sleeps, and is never set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
