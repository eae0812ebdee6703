"""Which record is the newest of each key, and where it is. Used by `journal`, which holds its lock over every call.

A place is one int, a third of a tuple's size: number of the segment << 64 | offset << 32 | length. A record that is not
durable yet is there itself. 100,000 keys of 60 characters take some 20 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

from datacache.writeback.journal import format as fmt
from datacache.writeback.journal.segments import Segment, damaged, replay

_PLACE_BITS = 96
_MASK = (1 << 32) - 1


def place_of(segment: Segment, offset: int, size: int) -> int:
    """A place as one int."""
    return segment.number << 64 | offset << 32 | size


def split_place(place: int) -> tuple[int, int, int]:
    """(number of the segment, offset, length)."""
    return place >> 64 & _MASK, place >> 32 & _MASK, place & _MASK


class Index:
    """The live records and the segments they are in."""

    def __init__(self) -> None:
        self.live: dict[str, int | bytes] = {}
        """Place or record by key, in the order of the last writes."""
        self.live_bytes = 0
        self.segments: dict[int, Segment] = {}
        """By number, oldest first."""
        self.serial = 0
        """Of the last change."""

    @property
    def oldest(self) -> Segment:
        """The segment that is cleaned first."""
        return next(iter(self.segments.values()))

    @property
    def newest(self) -> Segment:
        """The segment that was made last."""
        return next(reversed(self.segments.values()))

    def replay(self, segments: list[Segment]) -> int:
        """Take in what the segments say; return the last group's sequence number."""
        self.segments = {segment.number: segment for segment in segments}
        sequence = segments[-1].header.sequence - 1
        in_order = True
        for segment, offset, head, payload in replay(segments):
            sequence = head.sequence
            try:
                records = list(fmt.split_records(payload, head.records))
            except ValueError as exc:
                raise damaged(segment.path, offset, str(exc)) from exc
            for at, record in records:
                key = fmt.decode_key(payload[at + fmt.RECORD_BYTES : at + record.header_at])
                self.remove(key)
                if not record.is_drop:
                    self.live[key] = record.serial << _PLACE_BITS | place_of(segment, offset + at, record.size_bytes)
                    self._count(segment, record.size_bytes)
                in_order = in_order and record.serial > self.serial
                self.serial = max(self.serial, record.serial)
        live = self.live
        # Copies that cleaning made are at the end of the log, but keep the order in which their keys were written.
        keys = list(live) if in_order else sorted(live, key=live.__getitem__)
        for key in keys:
            place = live[key] if in_order else live.pop(key)
            assert isinstance(place, int)
            live[key] = place & ((1 << _PLACE_BITS) - 1)
        return sequence

    def _count(self, segment: Segment, size: int) -> None:
        segment.live_bytes += size
        self.live_bytes += size

    def remove(self, key: str) -> None:
        """The key has no live record any more."""
        was = self.live.pop(key, None)
        if isinstance(was, int):
            number, _, size = split_place(was)
            self._count(self.segments[number], -size)
        elif was is not None:
            self.live_bytes -= len(was)

    def put(self, key: str, record: bytes) -> None:
        """A record that is not durable yet is the key's newest."""
        self.remove(key)
        self.live[key] = record
        self.live_bytes += len(record)

    def move(self, key: str, place: int, copy: bytes) -> bool:
        """A copy that is not durable yet takes the place of the same record; False if that is live no more."""
        if self.live.get(key) != place:
            return False
        number, _, size = split_place(place)
        self.segments[number].live_bytes -= size
        self.live[key] = copy
        return True

    def settle(self, segment: Segment, offset: int, keys: Sequence[str], records: Sequence[bytes]) -> None:
        """Records are durable, from this offset on. Those that were replaced meanwhile do not count."""
        for key, record in zip(keys, records, strict=True):
            size = len(record)
            if self.live.get(key) is record:
                self.live[key] = place_of(segment, offset, size)
                segment.live_bytes += size
            offset += size
