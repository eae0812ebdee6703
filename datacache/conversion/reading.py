"""Read many small files of a snapshot one after the other: from this node where they are here, ahead of time otherwise.

Used in the worker processes of the index and of image operations. One consumer; threads of its own fetch what is not on
the node, so that a cold data set costs the store's throughput and not its latency times the number of files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

from datacache.annotations.image_header import HEAD_BYTES, TAIL_BYTES
from datacache.core.concurrency import PerProcess
from datacache.core.objects import BLOCK_BYTES, ObjectId
from datacache.reader.snapshot import Snapshot

_THREADS = 16
_AHEAD = 32
Data = bytes | memoryview


class Part(NamedTuple):
    """What to read of a row: all of it, or of a large one only its beginning and end (an image's header and end)."""

    row: int
    size_bytes: int
    ends_only: bool = False
    object: ObjectId | None = None
    """Its object's id, where whoever asks has computed it."""


class Files:
    """Reads rows of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._threads = PerProcess(lambda: ThreadPoolExecutor(_THREADS, "read"))

    def read(self, parts: Iterable[Part]) -> Iterator[Data]:
        """The bytes of each, in order. Raises the store's errors."""
        coming: deque[Data | Future[Data]] = deque()
        parts = iter(parts)
        while True:
            for part in islice(parts, _AHEAD - len(coming)):
                here = self._here(part)
                coming.append(self._threads.get().submit(self._fetch, part) if here is None else here)
            if not coming:
                return
            data = coming.popleft()
            yield data.result() if isinstance(data, Future) else data

    def done(self) -> None:
        """What was read so far is not needed any more."""
        self._snapshot.unmap_pages()

    def _here(self, part: Part) -> memoryview | None:
        if part.object is not None and part.size_bytes:
            return self._snapshot.view_object(part.object, part.size_bytes)
        return self._snapshot.read_local(part.row, 0, part.size_bytes)

    def _fetch(self, part: Part) -> Data:
        row, size_bytes = part.row, part.size_bytes
        if part.ends_only and size_bytes > BLOCK_BYTES:
            tail = self._snapshot.read_row(row, size_bytes - TAIL_BYTES, size_bytes)
            return b"".join([self._snapshot.read_row(row, 0, HEAD_BYTES), tail])
        return self._snapshot.read_row(row, 0, size_bytes)
