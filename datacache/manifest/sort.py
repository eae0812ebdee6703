"""Sort what comes in any order, in bounded memory: sorted runs on disk, merged.

Used where a store cannot list in byte order (most fsspec file systems), and for other rows that are made in another
order than they are kept in. One thread.
"""

from __future__ import annotations

import heapq
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import IO, Any, Generic, TypeVar

from datacache.manifest.model import Entry

ROWS_IN_MEMORY = 100_000
_ROWS_AT_A_TIME = 1_000
_by_path = attrgetter("path")
_T = TypeVar("_T")


def sorted_entries(entries: Iterable[Entry], *, rows_in_memory: int = ROWS_IN_MEMORY) -> Iterator[Entry]:
    """The same entries by path. Above `rows_in_memory` the rest waits in unnamed temporary files (`TMPDIR`)."""
    with Sorter(_by_path, rows_in_memory=rows_in_memory) as sorter:
        for entry in entries:
            sorter.add(entry)
        yield from sorter.sorted()


class Sorter(Generic[_T]):
    """Takes rows in any order and gives them by `key`, equal ones in the order they came. Close it."""

    def __init__(self, key: Callable[[_T], Any], *, rows_in_memory: int = ROWS_IN_MEMORY) -> None:
        self._key = key
        self._limit = rows_in_memory
        self._rows: list[_T] = []
        self._spool: IO[bytes] | None = None
        self._starts: list[int] = []

    def add(self, row: _T) -> None:
        """One more row; it must be possible to pickle it."""
        self._rows.append(row)
        if len(self._rows) >= self._limit:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            self._rows.sort(key=self._key)
            self._starts.append(_write_run(self._spool, self._rows))
            self._rows = []

    def sorted(self) -> Iterator[_T]:
        """All rows in order. Nothing may be added while it runs."""
        self._rows.sort(key=self._key)
        if self._spool is None:
            yield from self._rows
            return
        runs = [_read_run(self._spool, start) for start in self._starts]
        yield from heapq.merge(*runs, self._rows, key=self._key)

    def close(self) -> None:
        """Give the temporary file back."""
        if self._spool is not None:
            self._spool.close()

    def __enter__(self) -> Sorter[_T]:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


def _write_run(spool: IO[bytes], run: list[Any]) -> int:
    start = spool.seek(0, 2)
    for at in range(0, len(run), _ROWS_AT_A_TIME):
        pickle.dump(run[at : at + _ROWS_AT_A_TIME], spool, pickle.HIGHEST_PROTOCOL)
    pickle.dump([], spool, pickle.HIGHEST_PROTOCOL)
    return start


def _read_run(spool: IO[bytes], at: int) -> Iterator[Any]:
    while True:
        spool.seek(at)
        rows = pickle.load(spool)  # noqa: S301 - our own unnamed file, written above
        at = spool.tell()
        if not rows:
            return
        yield from rows
