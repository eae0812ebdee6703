"""One published order as the daemon follows it: which blocks come next, and how far ahead of the training it may go.

`lookahead` uses it, one thread at a time. `PlanObjects` are the objects that rows of plans stand for; plans of one
snapshot share them. Memory: 24 bytes a row of the snapshot, 4 bytes (12 for parts of objects) a sample of the order,
and the window.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from datacache.core.errors import DatacacheError, UsageError
from datacache.core.ids import BlockId, ObjectRef, block_count, block_length, object_id
from datacache.daemon.orders.plan_file import PlanFile, PlanHeader
from datacache.manifest.reader import Manifest

if TYPE_CHECKING:  # see `server`: it comes with the first order
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)
_UNKNOWN = 2**64 - 1
_MAX_BLOCKS_AHEAD = 16_384
_MIN_BLOCKS_AHEAD = 4
_MAX_BLOCKS_BEHIND = 8_192


class Wanted(NamedTuple):
    """A block of a plan that is not on this node."""

    item: int
    """Its first place in the order."""
    id: BlockId
    row: int
    number: int
    length: int


class PlanObjects:
    """The objects that rows stand for: their sizes and ids, found out as they are needed. Any thread may ask."""

    def __init__(self, manifest: Manifest | None, refs: Sequence[ObjectRef]) -> None:
        """Either a snapshot's manifest, or the objects themselves."""
        import numpy as np

        self._manifest, self._refs = manifest, refs
        self.rows = len(refs) if manifest is None else manifest.rows
        self._sizes = array("Q", bytes(8)) * self.rows
        self.sizes = np.frombuffer(self._sizes, np.uint64) if self.rows else np.empty(0, np.uint64)
        self.sizes[:] = _UNKNOWN
        self._ids = bytearray(16 * self.rows)
        self.complete = threading.Event()
        """Set when all rows are known."""
        self.used_s = time.monotonic()
        """When a plan last had these objects."""

    def ref(self, row: int) -> ObjectRef:
        """Return the object of a row. Raises the catalog's errors."""
        if self._manifest is None:
            return self._refs[row]
        return self._manifest.object_ref(self._manifest.entry(row))

    def size(self, row: int) -> int:
        """Return a row's size in bytes. Raises the catalog's errors."""
        size = self._sizes[row]
        if size == _UNKNOWN:
            size = self._learn(row, self.ref(row))
        return size

    def id(self, row: int) -> bytes:
        """Return a row's object id; `size` must have been asked for."""
        return bytes(self._ids[16 * row : 16 * row + 16])

    def ids(self) -> NDArray[np.uint64]:
        """Return the first eight bytes of all ids, by row. Only when `complete`."""
        import numpy as np

        return np.frombuffer(self._ids, "<u8")[::2].copy()

    def learn_all(self, over: Callable[[], bool]) -> None:
        """Find out all rows, in their order: one by one in the order of a plan costs more. Ends early once `over()`.
        Raises the catalog's errors."""
        manifest, refs = self._manifest, iter(self._refs)
        if manifest is not None:
            refs = (manifest.object_ref(entry) for entry in manifest.entries())
        for row, ref in enumerate(refs):
            if self._sizes[row] == _UNKNOWN:
                self._learn(row, ref)
            if row % 1000 == 0 and over():
                return
        self.complete.set()

    def _learn(self, row: int, ref: ObjectRef) -> int:
        self._ids[16 * row : 16 * row + 16] = object_id(ref)
        self._sizes[row] = ref.size_bytes  # last: who sees the size finds the id
        return ref.size_bytes


class Plan:
    """One order, its publisher's position in it, and the window ahead of it."""

    def __init__(self, header: PlanHeader, items: NDArray[np.uint32], objects: PlanObjects, file: PlanFile) -> None:
        """`items` has the epoch's rows and then those of the next one. `UsageError` if they lead nowhere."""
        if len(items) and int(items[:, 0].max()) >= objects.rows:
            raise UsageError("a plan has rows that its snapshot does not have")
        self.id, self.dataset, self.snapshot = header.id, header.dataset, header.snapshot
        self.items, self.length = items, header.items
        self.objects = objects
        self.publisher = (header.pid, header.started)
        self._moved_to, self._moved_at_s = -1, 0.0
        self.file = file
        self.window_bytes = 0
        """The bytes of absent blocks that may be fetched ahead of the position."""
        self.ready: deque[Wanted] = deque()
        """The blocks to fetch, in the plan's order."""
        self.fetching = 0
        self.fetched = self.fetched_bytes = self.errors = 0
        self.paused_until_s = 0.0
        self.pause_s = 0.0
        self._ahead: deque[tuple[int, BlockId, int, bool]] = deque()  # item, block, bytes, fetched for this plan
        self._held: dict[BlockId, int] = {}  # how often a block is in _ahead
        self._passed: deque[tuple[int, int]] = deque()  # items and bytes right behind the position
        self._passed_bytes = 0
        self.ahead_bytes = self.wanted_bytes = 0  # of the blocks in _held; of those that were not here
        self._walk = self._blocks()
        self._at = self.position  # the next item to look at
        self._pending: tuple[int, int, int, int] | None = None  # a block that was over the window

    @property
    def position(self) -> int:
        """The number of samples that its publisher has asked for, in the epoch and the one after it."""
        return max(0, min(self.file.position, len(self.items)))

    @property
    def seen(self) -> int:
        """The end of the window: items that were looked at."""
        return self._at

    def behind(self) -> int:
        """Return the first item that may not be read yet: a sampler is asked for its samples before workers read them,
        so half a window behind the position still counts as to be read."""
        position = self.position
        first = next(iter(self._passed.copy()), None)  # the thread that follows plans may change it
        return position if first is None else min(first[0], position)

    def stands_since_s(self, now_s: float) -> float:
        """Return since when its position has not moved, as far as it was asked (at `now_s`, monotonic seconds)."""
        position = self.position
        if position != self._moved_to:
            self._moved_to, self._moved_at_s = position, now_s
        return self._moved_at_s

    def over(self) -> bool:
        """Tell whether the position is at the epoch's end, or behind."""
        return self.position >= self.length

    def look_ahead(self, missing: Callable[[Sequence[BlockId]], list[int]]) -> bool:
        """Let go of what the position has passed, and look at what came into the window: `missing` returns the
        positions of blocks that are not on this node. Tell whether anything moved. Raises the catalog's errors."""
        moved = self._pass(self.position)
        batch: list[tuple[int, int, int, int]] = []
        ids: list[BlockId] = []
        more_bytes = 0
        while len(batch) < 1024:
            block = self._pending or next(self._walk, None)
            self._pending = None
            if block is None:
                break
            item, row, number, length = block
            id = BlockId(self.objects.id(row) + number.to_bytes(4, "big"))
            if not self._fits(length, len(batch), more_bytes):
                self._pending = block
                break
            batch.append(block)
            ids.append(id)
            more_bytes += length
        if not batch:
            return moved
        gone = set(missing(ids))
        for at, (id, (item, row, number, length)) in enumerate(zip(ids, batch, strict=True)):
            times = self._held.get(id, 0)
            wanted = at in gone and not times
            self._held[id] = times + 1
            self._ahead.append((item, id, length, wanted))
            if not times:
                self.ahead_bytes += length
            if wanted:
                self.wanted_bytes += length
                self.ready.append(Wanted(item, id, row, number, length))
        return True

    def drop_passed(self) -> None:
        """Take what the position has passed from `ready`: its reader has fetched it."""
        position = self.position
        while self.ready and self.ready[0].item < position:
            self.ready.popleft()

    def state(self) -> dict[str, object]:
        """Return the plan for the operation `cache`."""
        same = ("id", "dataset", "snapshot", "position", "fetched", "fetched_bytes", "errors", "window_bytes")
        return {name: getattr(self, name) for name in same} | {
            "items": self.length,
            "next_items": len(self.items) - self.length,
            "ahead": self._at - self.position,
            "ahead_bytes": self.wanted_bytes,
        }

    def _fits(self, length: int, more: int, more_bytes: int) -> bool:
        """Tell whether another block may come into the window. Nothing is known of it yet, so it counts as one to
        fetch."""
        if len(self._ahead) + more < _MIN_BLOCKS_AHEAD:
            return True
        return (
            len(self._ahead) + more < _MAX_BLOCKS_AHEAD
            and self.wanted_bytes + more_bytes + length <= self.window_bytes
            and self.ahead_bytes + more_bytes + length <= 2 * self.window_bytes
        )

    def _pass(self, position: int) -> bool:
        moved = False
        ahead, held, passed = self._ahead, self._held, self._passed
        while ahead and ahead[0][0] < position:
            item, id, length, wanted = ahead.popleft()
            moved = True
            passed.append((item, length))
            self._passed_bytes += length
            if held[id] == 1:
                del held[id]
                self.ahead_bytes -= length
            else:
                held[id] -= 1
            if wanted:
                self.wanted_bytes -= length
        while passed and (self._passed_bytes > self.window_bytes // 2 or len(passed) > _MAX_BLOCKS_BEHIND):
            self._passed_bytes -= passed.popleft()[1]
        if self._at < position:
            self._at, self._pending = position, None
        return moved

    def _blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield item, row, number and length of the blocks from `_at` on, which it moves."""
        objects = self.objects
        while self._at < len(self.items):
            item = self._at
            values = self.items[item].tolist()
            row = values[0]
            try:
                size = objects.size(row)
            except DatacacheError:
                self._walk = self._blocks()  # a generator that raised has ended
                raise
            first, stop = 0, block_count(size)
            if len(values) == 3:
                first, stop = values[1], min(values[1] + values[2], stop)
            for number in range(first, stop):
                yield item, row, number, block_length(size, number)
                if self._at != item:  # the position went past it
                    break
            else:
                self._at += 1
