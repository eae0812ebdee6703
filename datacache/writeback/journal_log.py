"""The end of the journal that is written to: groups become frames of the newest segment. Used by `journal`.

One thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from datacache.core.disk import write_all
from datacache.writeback import journal_format as fmt
from datacache.writeback.journal_segments import FULL, Segment, make_segment


class Group(NamedTuple):
    """A group that is not durable yet. Its frame says the same wherever and however often it is written."""

    sequence: int
    synced: int
    first: int
    keys: list[str]
    records: list[bytes]
    size_bytes: int
    has_drop: bool


class Log:
    """Where the next frame goes."""

    def __init__(self, folder: Path, segment_bytes: int, active: Segment | None) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._active = active

    @property
    def needs_segment(self) -> bool:
        """Whether `rotate` comes before `write`: after a start, a failure, or when the segment is large enough."""
        return self._active is None or self._active.size_bytes >= self._segment_bytes

    def rotate(self, previous: Segment, *, first: int, sequence: int) -> Segment:
        """Go on in a new segment, durable. `first` and all that is said to be needed by it must be durable, too."""
        self._active = None
        self._active = make_segment(self._folder, previous, first=first, sequence=sequence)
        return self._active

    def write(self, groups: Sequence[Group]) -> tuple[Segment, list[int], int]:
        """Make groups durable; return segment, offsets of the frames, bytes. The caller moves the segment's end. After
        an OSError the same groups must be written before all others: in a new segment unless only room was missing."""
        segment = self._active
        assert segment is not None
        start = at = segment.size_bytes
        offsets, parts = [], []
        for group in groups:
            head = fmt.FrameHead(group.size_bytes, len(group.records), group.first, group.sequence, group.synced)
            parts.append(fmt.encode_frame(head, group.records, segment.header.nonce + at))
            parts += group.records
            offsets.append(at)
            at += fmt.FRAME_BYTES + group.size_bytes
        self._active = None  # whatever fails now: never write to it again
        try:
            write_all(segment.fd, b"".join(parts), start)
        except OSError as exc:
            if exc.errno in FULL:  # no page was lost: what was written goes, and the same frames may come there again
                os.ftruncate(segment.fd, start)
                self._active = segment
            raise
        os.fdatasync(segment.fd)
        self._active = segment
        return segment, offsets, at - start

    def close(self) -> None:
        """Let go of the segment."""
        self._active = None
