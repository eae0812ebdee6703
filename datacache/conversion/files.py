"""Read many small files of a snapshot in order: images' headers, labels, samples.

They come from the node's tiers, or from where they lie on this machine, else from the daemon, many in one request and
ahead of time in threads, so a cold data set costs the store's throughput and not its latency times the number of files.

Used by the index, subsets, image operations and shards. A `Files` has one consumer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple

from datacache.annotations.image_header import HEAD_BYTES, TAIL_BYTES
from datacache.core.concurrency import PerProcess, gather
from datacache.core.errors import DatacacheError
from datacache.core.ids import BLOCK_BYTES, ObjectId
from datacache.reader.snapshot import Snapshot

_THREADS, _AHEAD, _AHEAD_BYTES = 16, 64, 64 * 2**20
_TOGETHER, _TOGETHER_BYTES = 16, 4 * 2**20
_UNMAP_BYTES = 64 * 2**20
_AT_ONCE_S = 0.001
"""Files that come sooner, on average, are read without threads, which would wait for the interpreter at each call."""
Data = bytes | memoryview


class Part(NamedTuple):
    """The bytes of a row to read: all, a part, or of a large one only its beginning and end (an image's header
    and end)."""

    row: int
    stop: int
    start: int = 0
    ends_only: bool = False
    object: ObjectId | None = None
    """Its object's id, where whoever asks has computed it."""


class _Fetch:
    """Parts that are fetched together, as one task of a thread and mostly one request to the daemon."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.size_bytes = 0
        self.future: Future[list[Data | DatacacheError]] | None = None
        """None until it is begun."""

    def add(self, part: Part) -> int:
        """Take a part; return its number."""
        self.parts.append(part)
        self.size_bytes += part.stop - part.start
        return len(self.parts) - 1

    @property
    def full(self) -> bool:
        return len(self.parts) >= _TOGETHER or self.size_bytes >= _TOGETHER_BYTES

    def take(self, number: int) -> Data:
        """Wait for a part and let go of it; raise the error of getting it."""
        assert self.future is not None
        found = self.future.result()
        data, found[number] = found[number], b""
        if isinstance(data, DatacacheError):
            raise data
        return data


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "read")


class Files:
    """Reads rows of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._threads = PerProcess(_new_threads)
        self._file_s = 0.0
        """How long a file of this machine takes, on average."""

    def read(self, parts: Iterable[Part]) -> Iterator[Data]:
        """Yield the bytes of each part, in order; some are on their way while one is used. Raise the store's errors.

        The caller lets go of the bytes before it asks for the next ones."""
        coming: deque[tuple[int, Data | _Fetch, int]] = deque()
        held = viewed = 0
        parts = iter(parts)
        waiting = next(parts, None)
        fetch = _Fetch()
        any_here = self.snapshot.rows.any_local()
        while waiting is not None or coming:
            while waiting is not None and len(coming) < _AHEAD and (not coming or held < _AHEAD_BYTES):
                here: Data | None = self._here(waiting) if any_here else None
                here = self._at_once(waiting) if here is None else here
                size = waiting.stop - waiting.start
                held += size
                coming.append((size, here, 0) if here is not None else (size, fetch, fetch.add(waiting)))
                if fetch.full:
                    fetch = self._begun(fetch)
                waiting = next(parts, None)
            size, data, number = coming.popleft()
            if data is fetch:
                fetch = self._begun(fetch)
            held -= size
            viewed += size
            yield data.take(number) if isinstance(data, _Fetch) else data
            del data
            if viewed >= _UNMAP_BYTES:
                viewed = 0
                self.done()

    def done(self) -> None:
        """Let go of what was read so far."""
        self.snapshot.rows.unmap_pages()

    def _begun(self, fetch: _Fetch) -> _Fetch:
        """Begin to fetch; return the next one."""
        fetch.future = self._threads.get().submit(self._fetched, fetch.parts)
        return _Fetch()

    def _here(self, part: Part) -> memoryview | None:
        if part.object is not None and part.stop:
            return self.snapshot.rows.view_object(part.object, part.stop)
        return self.snapshot.rows.read_local(part.row, part.start, part.stop)

    def _at_once(self, part: Part) -> Data | None:
        """Return the bytes of a file of this machine, unless such take their time."""
        if self._file_s > _AT_ONCE_S:
            return None
        begun = perf_counter()
        data = self._of_file(part)
        self._file_s += (perf_counter() - begun - self._file_s) / _TOGETHER
        return data

    def _fetched(self, parts: Sequence[Part]) -> list[Data | DatacacheError]:
        """Return the bytes of parts that are not on this node, or the error of each that cannot be had."""
        rows = self.snapshot.rows
        found: list[Data | DatacacheError | None] = [self._of_file(part) for part in parts]
        left = [at for at, data in enumerate(found) if data is None]
        whole = [at for at in left if _is_whole(parts[at], rows.object_at(parts[at].row)[1])]
        for at, data in zip(whole, rows.read_rows([parts[at].row for at in whole]), strict=True):
            found[at] = data
        large = [at for at in left if found[at] is None]
        for at, data in zip(large, gather(lambda at: self._of_large(parts[at]), large), strict=True):
            found[at] = data
        return [b"" if data is None else data for data in found]

    def _of_file(self, part: Part) -> Data | None:
        """Return the bytes of a file of this machine; of any other nothing."""
        if part.ends_only and part.stop > HEAD_BYTES + TAIL_BYTES:
            head, tail = (self.snapshot.rows.read_file(part.row, *span) for span in _ends(part))
            return None if head is None or tail is None else b"".join((head, tail))
        return self.snapshot.rows.read_file(part.row, part.start, part.stop)

    def _of_large(self, part: Part) -> Data:
        rows = self.snapshot.rows
        if part.ends_only:
            return b"".join([rows.read_row(part.row, *span) for span in _ends(part)])
        return rows.read_row(part.row, part.start, part.stop)


def _is_whole(part: Part, size_bytes: int) -> bool:
    """Tell whether a part is a whole row of one block, which rows can be asked for together."""
    return not part.start and part.stop == size_bytes <= BLOCK_BYTES


def _ends(part: Part) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the beginning and the end of an image are."""
    return (0, HEAD_BYTES), (part.stop - TAIL_BYTES, part.stop)
