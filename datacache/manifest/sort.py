"""Sort entries that a store lists in any order, in bounded memory: sorted runs on disk, merged.

Used where a store cannot list in byte order (most fsspec file systems). One thread.
"""

from __future__ import annotations

import heapq
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import IO

from datacache.manifest.model import Entry

ROWS_IN_MEMORY = 100_000
_ROWS_AT_A_TIME = 1_000
_by_path = attrgetter("path")


def sorted_entries(entries: Iterable[Entry], *, rows_in_memory: int = ROWS_IN_MEMORY) -> Iterator[Entry]:
    """The same entries by path. Above `rows_in_memory` the rest waits in unnamed temporary files (`TMPDIR`)."""
    source = iter(entries)
    run = sorted(islice(source, rows_in_memory), key=_by_path)
    if len(run) < rows_in_memory:
        yield from run
        return
    with tempfile.TemporaryFile() as spool:
        starts = [_write_run(spool, run)]
        while run := sorted(islice(source, rows_in_memory), key=_by_path):
            starts.append(_write_run(spool, run))
        yield from heapq.merge(*(_read_run(spool, start) for start in starts), key=_by_path)


def _write_run(spool: IO[bytes], run: list[Entry]) -> int:
    start = spool.seek(0, 2)
    for at in range(0, len(run), _ROWS_AT_A_TIME):
        pickle.dump(run[at : at + _ROWS_AT_A_TIME], spool, pickle.HIGHEST_PROTOCOL)
    pickle.dump([], spool, pickle.HIGHEST_PROTOCOL)
    return start


def _read_run(spool: IO[bytes], at: int) -> Iterator[Entry]:
    while True:
        spool.seek(at)
        rows = pickle.load(spool)  # noqa: S301 - our own unnamed file, written above
        at = spool.tell()
        if not rows:
            return
        yield from rows
