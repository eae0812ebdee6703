"""The journal's cleaner: finds the live records of the oldest segment, a bounded piece at a time. Used by `journal`.

How much it reads follows from how much is written, so that the log stays within about three times its live bytes: while
it is larger than twice these (and a segment), each byte written lets it scan four. At least half of a log that large is
dead, so a round over it gives back more than its copies take.

One thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from datacache.writeback import journal_format as fmt
from datacache.writeback.journal_index import place_of
from datacache.writeback.journal_segments import Segment, damaged

_SCAN_PER_WRITTEN = 4
_MIN_STEP_BYTES = 64 << 10
_MAX_STEP_BYTES = 4 << 20
_MAX_DEBT_BYTES = 64 << 20
_WINDOW_BYTES = 256 << 10
_SEGMENT_COST_BYTES = 4 << 10


class Cleaner:
    """Where cleaning is, and how much of it is due."""

    def __init__(self, find: Callable[[str], int | bytes | None]) -> None:
        """`find` says where the live record of a key is."""
        self._find = find
        self._debt_bytes = 0
        self._number = 0  # of the segment that is being scanned
        self._offset = 0
        self._left = 0  # records of the frame at the offset that are still to come

    @property
    def is_due(self) -> bool:
        """Whether some steps are worth their while."""
        return self._debt_bytes >= _MIN_STEP_BYTES

    def begin(self, ballast_bytes: int) -> int:
        """How many bytes may be scanned now: half of the ballast, where there is one. Copies that wait for room do not
        eat up what drops need."""
        budget = min(self._debt_bytes, ballast_bytes // 2 or _MAX_STEP_BYTES, _MAX_STEP_BYTES)
        self._debt_bytes -= budget
        return budget

    def owe(self, written_bytes: int, size_bytes: int, live_bytes: int, segments: int, segment_bytes: int) -> None:
        """Take into account what was written. Many small segments (one for each start) count as waste, too."""
        if size_bytes > 2 * live_bytes + segment_bytes or segments > 8 + 2 * size_bytes // segment_bytes:
            owed = _SCAN_PER_WRITTEN * written_bytes + _SEGMENT_COST_BYTES
            self._debt_bytes = min(self._debt_bytes + owed, _MAX_DEBT_BYTES)
        else:
            self._debt_bytes = 0

    def step(self, segment: Segment, budget: int) -> tuple[list[tuple[str, int, bytes]], int]:
        """(key, place, record) of records that are live now, from where the last step ended, and what of the budget is
        left. StagingError if a record is damaged; the segment stays then, and the next start says so."""
        if self._number != segment.number or self._offset >= segment.size_bytes:
            self._number, self._offset, self._left = segment.number, fmt.HEADER_BYTES, 0
        found: list[tuple[str, int, bytes]] = []
        window = _Window(segment)
        offset, left = self._offset, self._left
        stop = min(offset + budget, segment.size_bytes)
        while offset < stop:
            if not left:
                head = fmt.decode_frame(window.get(offset, fmt.FRAME_BYTES))
                if head is None:
                    raise damaged(segment.path, offset, "no frame where one was written")
                offset += fmt.FRAME_BYTES
                left = head.records
                continue
            record = fmt.decode_record(window.get(offset, fmt.RECORD_BYTES))
            size = record.size_bytes
            key = fmt.decode_key(window.get(offset + fmt.RECORD_BYTES, record.key_bytes))
            place = place_of(segment, offset, size)
            if self._find(key) == place:
                data = window.get(offset, size)
                if not fmt.record_is_whole(data, fmt.encode_key(key)):
                    raise damaged(segment.path, offset, "not the record that was written here")
                found.append((key, place, data))
            offset += size
            left -= 1
        spent = offset - self._offset + _SEGMENT_COST_BYTES
        self._offset, self._left = offset, left
        return found, budget - spent


class _Window:
    """A piece of a segment, read ahead."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._start = 0
        self._data = b""

    def get(self, offset: int, size: int) -> bytes:
        """Bytes of the segment. StagingError if it is shorter."""
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            wanted = min(max(size, _WINDOW_BYTES), self._segment.size_bytes - offset)
            self._data = os.pread(self._segment.fd, wanted, offset)
            self._start, at = offset, 0
            if len(self._data) < size:
                raise damaged(self._segment.path, offset, "cut off")
        return self._data[at : at + size]
