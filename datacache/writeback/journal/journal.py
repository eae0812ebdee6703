"""The journal of a staging area: keyed records that are durable when `commit` returns, and replayed at the next start.

An append-only log in the manner of Bitcask (Sheehy and Smith, 2010: the newest record of each key is found through an
index in memory) in segments that are cleaned from the oldest on (Rosenblum and Ousterhout, "The Design and
Implementation of a Log-Structured File System", 1991): live records are written again at the end, then the file is
removed. As only the oldest segment is ever removed, a drop is forgotten no earlier than every record it hides. The
bytes are in `format.py`, the files in `segments.py`.

In memory: key and place of each live record, and what is not durable yet; headers and blobs are read from the files.
Threads may call anything at any time. One process only: the lock of the staging area sees to that.

What a crash leaves is a prefix of the groups in the order of `append`, at least up to the last one whose `commit`
returned. A segment whose fsync failed is never written to again: its unsynced frames go to a new one, since the page
cache does not tell what of them is on the disk (Rebello et al., "Can Applications Recover from fsync Failures?", 2020).
Not noticed: that the newest segment file as a whole was taken away, or damage to the very last group that was written.

In memory a place is one int, a third of a tuple's size: number of the segment << 64 | offset << 32 | length. A record
that is not durable yet is there itself. 100,000 keys of 60 characters take some 20 MB.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from datacache.core.disk import sync_folder
from datacache.core.errors import StagingError
from datacache.writeback.journal import format as fmt
from datacache.writeback.journal.segments import (
    BALLAST,
    FULL,
    Ballast,
    Group,
    Log,
    Segment,
    damaged,
    failed,
    make_segment,
    open_segments,
    replay,
)

_log = logging.getLogger(__name__)

_BATCH_BYTES = 2 << 20  # written and synced at a time
_MAX_UNWRITTEN_BYTES = 32 << 20  # kept in memory while the disk refuses
_BALLAST_EVERY_S = 5.0
_HEADER_GUESS_BYTES = 1024


class Change(NamedTuple):
    """The change of one key."""

    key: str
    header: bytes | None
    """None: the key's record is dropped."""
    blob: bytes | memoryview = b""
    """Small content: files up to 256 KiB lie here."""


class Journal:
    """The journal of one folder (see the module), to be closed by its maker."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = 32 << 20,
        ballast_bytes: int = 8 << 20,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        """Make or replay the journal in a folder. StagingError if it is damaged anywhere but at its torn tail.
        `before_write` is called before changes are made durable, after they were appended, in the thread that does it,
        without a lock."""
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._changed = threading.Condition(threading.Lock())  # guards all that follows; never held during I/O
        self._index = Index()
        self._size_bytes = 0
        self._unwritten: deque[Group] = deque()
        self._unwritten_bytes = 0
        self._appended = 0  # sequence number of the last group
        self._unsealed = 0  # sequence number of the first group that may not be written yet; 0 for none
        self._durable = 0
        self._first = 1  # the oldest segment that is needed, as of the last group
        self._durable_first = 1
        self._refused: StagingError | None = None  # why the last write failed
        self._syncing = False  # one thread writes; it alone uses _log
        self._tidying = False
        self._closed = False
        self._ballast_at = 0.0
        self._warned = ""
        self._before_write = before_write
        try:
            self._open()
            self._ballast = Ballast(folder / BALLAST, ballast_bytes)
            self._ballast.make()
        except StagingError:
            raise
        except OSError as exc:
            raise failed(folder, exc) from exc
        self._cleaner = Cleaner(self._index.live.get)

    def _open(self) -> None:
        if not self._folder.is_dir():
            self._folder.mkdir(mode=0o700, parents=True)
            sync_folder(self._folder.parent)
        segments = open_segments(self._folder)
        made = None
        if not segments:
            made = make_segment(self._folder, None, first=1, sequence=1)
            segments = [made]
        # Never go on in a segment that was there: its blocks may hold frames that were valid in it once.
        self._log = Log(self._folder, self._segment_bytes, made)
        self._appended = self._durable = self._index.replay(segments)
        self._size_bytes = sum(segment.size_bytes for segment in segments)
        self._first = self._durable_first = segments[0].number

    # --- reading ---------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the segments, without the ballast and what is not written yet."""
        return self._size_bytes

    @property
    def live_bytes(self) -> int:
        """Return the bytes of records that are the newest of their keys, written yet or not."""
        return self._index.live_bytes

    def records(self) -> Iterator[tuple[str, bytes, int]]:
        """Yield key, header and blob's length of all live records, in the order they were last written. Changes
        meanwhile may or may not be seen. Headers are read from the files, which replay has checked: meant for the
        start."""
        with self._changed:
            keys = list(self._index.live)
        for key in keys:
            try:
                data, where = self._load(key, _HEADER_GUESS_BYTES)
                if fmt.RECORD_BYTES <= len(data) < fmt.decode_record(data).blob_at:
                    data, where = self._load(key, None)
            except KeyError:
                continue
            if where is not None and not fmt.record_is_of(data, fmt.encode_key(key)):
                raise _wrong(*where)
            record = fmt.decode_record(data)
            yield key, data[record.header_at : record.blob_at], record.blob_bytes

    def __contains__(self, key: str) -> bool:
        """Return whether a key has a live record, durable or not."""
        with self._changed:
            return key in self._index.live

    def live_keys(self) -> list[str]:
        """Return the keys of all live records, in the order they were last written."""
        with self._changed:
            return list(self._index.live)

    def record(self, key: str) -> tuple[bytes, bytes] | None:
        """Return the live record's header and blob, durable or not; None if there is none. StagingError if it is
        damaged."""
        try:
            data = self._whole(key)
        except KeyError:
            return None
        record = fmt.decode_record(data)
        return data[record.header_at : record.blob_at], data[record.blob_at :]

    def read(self, key: str) -> bytes:
        """Return the live record's blob, durable or not. KeyError if there is none, StagingError if it is damaged."""
        data = self._whole(key)
        return data[fmt.decode_record(data).blob_at :]

    def _whole(self, key: str) -> bytes:
        data, where = self._load(key, None)
        if where is not None and not fmt.record_is_whole(data, fmt.encode_key(key)):
            raise _wrong(*where)
        return data

    def _load(self, key: str, limit: int | None) -> tuple[bytes, tuple[Segment, int] | None]:
        """Return a live record's first bytes, and where they are from."""
        with self._changed:
            if self._closed:
                raise self._is_closed()
            place = self._index.live[key]
            if isinstance(place, bytes):
                return place, None
            number, offset, size = split_place(place)
            segment = self._index.segments[number]
        try:
            return os.pread(segment.fd, size if limit is None else min(size, limit), offset), (segment, offset)
        except OSError as exc:
            raise failed(segment.path, exc) from exc

    # --- writing ---------------------------------------------------------------------------------------------------

    def append(self, changes: Sequence[Change], *, sealed: bool = True) -> int:
        """Take one atomic group: all or none of it survive a crash. Seen by `read` at once, durable after `commit` with
        the ticket that this returns. If it is not `sealed`, nothing of it gets to the disk before `seal`. No I/O. If it
        raises nothing was taken: ValueError for a group beyond 1 GiB, StagingFullError (StagingError) when too much
        waits for a disk that is full (fails); drops are always taken."""
        with self._changed:
            if self._closed:
                raise self._is_closed()
            if not changes:
                return self._appended
            has_drop = any(change.header is None for change in changes)
            has_value = any(change.header is not None for change in changes)
            if has_value and self._refused and self._unwritten_bytes > _MAX_UNWRITTEN_BYTES:
                raise _again(self._refused)
            records = [
                fmt.encode_record(serial, fmt.encode_key(change.key), change.header, change.blob)
                for serial, change in enumerate(changes, self._index.serial + 1)
            ]
            self._push([change.key for change in changes], records, has_drop=has_drop)
            self._index.serial += len(records)
            for change, record in zip(changes, records, strict=True):
                if change.header is None:
                    self._index.remove(change.key)
                else:
                    self._index.put(change.key, record)
            if not sealed and not self._unsealed:
                self._unsealed = self._appended
            return self._appended

    def seal(self) -> None:
        """Let all groups so far be written."""
        if self._unsealed:
            with self._changed:
                self._unsealed = 0

    def _push(self, keys: list[str], records: list[bytes], *, has_drop: bool = False) -> None:
        size = sum(map(len, records))
        if size > fmt.MAX_GROUP_BYTES:
            raise ValueError(
                f"a group of {size} bytes is too large for the journal, {fmt.MAX_GROUP_BYTES} is the limit"
            )
        self._appended += 1
        self._unwritten.append(Group(self._appended, self._durable, self._first, keys, records, size, has_drop))
        self._unwritten_bytes += size

    def _is_closed(self) -> StagingError:
        return StagingError(f"the staging journal in {self._folder} is closed")

    def commit(self, ticket: int | None = None) -> int:
        """Return when everything up to the ticket (None: everything) is durable that may be written: up to which
        ticket all is by now. StagingFullError or StagingError if the disk refuses: nothing is lost then, and the next
        call tries again. While one thread writes and syncs, others' groups gather for the next sync."""
        target = self._appended if ticket is None else min(ticket, self._appended)
        unsealed = self._unsealed
        if unsealed:
            target = min(target, unsealed - 1)
        while self._durable < target:
            with self._changed:
                while self._syncing and self._durable < target:
                    self._changed.wait()
                if self._durable >= target:
                    break
                self._syncing = True
                batch = self._batch()
            tidy = False
            try:
                tidy = self._write(batch)
            finally:
                with self._changed:
                    self._syncing = False
                    self._changed.notify_all()
            if tidy:
                self._tidy()
        return self._durable

    def _batch(self) -> list[Group]:
        batch: list[Group] = []
        size = 0
        for group in self._unwritten:
            if self._unsealed and group.sequence >= self._unsealed:
                break
            if batch and size + group.size_bytes > _BATCH_BYTES:
                break
            batch.append(group)
            size += group.size_bytes
        return batch

    def _write(self, batch: list[Group]) -> bool:
        """Make a batch durable; return whether there is something to tidy up. One thread at a time."""
        self._before_write()
        try:
            try:
                segment, offsets, size = self._try_write(batch)
            except OSError as exc:
                if (
                    exc.errno not in FULL
                    or not any(g.has_drop for g in list(self._unwritten))
                    or not self._ballast.give_up()
                ):
                    raise
                segment, offsets, size = self._try_write(batch)
        except OSError as exc:
            self._refused = failed(self._folder, exc)
            raise _again(self._refused) from exc
        with self._changed:
            self._refused = None
            self._durable = batch[-1].sequence
            self._durable_first = batch[-1].first
            for group, at in zip(batch, offsets, strict=True):
                self._unwritten.popleft()
                self._unwritten_bytes -= group.size_bytes
                self._index.settle(segment, at + fmt.FRAME_BYTES, group.keys, group.records)
            segment.size_bytes += size
            self._size_bytes += size
            self._cleaner.owe(
                size, self._size_bytes, self._index.live_bytes, len(self._index.segments), self._segment_bytes
            )
            return self._index.oldest_is_dead or self._cleaner.is_due or self._ballast_is_due()

    def _try_write(self, batch: list[Group]) -> tuple[Segment, list[int], int]:
        if self._log.needs_segment:
            segment = self._log.rotate(self._index.newest, first=self._durable_first, sequence=batch[0].sequence)
            with self._changed:
                self._index.segments[segment.number] = segment
                self._size_bytes += segment.size_bytes
        return self._log.write(batch)

    # --- cleaning --------------------------------------------------------------------------------------------------

    def _ballast_is_due(self) -> bool:
        return self._ballast.is_small and time.monotonic() > self._ballast_at

    def _tidy(self) -> None:
        """Remove old segments that nothing lives in any more, clean a little, make the ballast again. In the thread
        that has just committed, after it let others write; bounded. A failure is no failure of the commit."""
        with self._changed:
            if self._tidying:
                return
            self._tidying = True
        try:
            self._retire()
            if self._cleaner.is_due:
                self._clean()
            if self._ballast_is_due():
                self._ballast_at = time.monotonic() + _BALLAST_EVERY_S
                self._ballast.make()
        except (OSError, StagingError) as exc:
            if str(exc) != self._warned:
                self._warned = str(exc)
                _log.warning("old segments of the staging journal in %s are kept: %s", self._folder, exc)
        finally:
            with self._changed:
                self._tidying = False

    def _retire(self) -> None:
        with self._changed:
            first = self._first
            while first < self._index.newest.number and not self._index.segments[first].live_bytes:
                first += 1
            if first > self._first:
                # What replaced the old records may not be durable yet. This group comes after all of it and says so.
                self._first = first
                self._push([], [])
            target = self._appended
        if self._durable_first < self._first:
            self.commit(target)
        with self._changed:
            segments = self._index.segments
            gone = [segments.pop(number) for number in list(segments) if number < self._durable_first]
            self._size_bytes -= sum(segment.size_bytes for segment in gone)
        for segment in gone:
            segment.path.unlink(missing_ok=True)

    def _clean(self) -> None:
        """Write a few live records of the oldest segments again."""
        budget = self._cleaner.begin(self._ballast.size_bytes)
        while budget > 0:
            with self._changed:
                oldest = next((segment for segment in self._index.segments.values() if segment.live_bytes), None)
                if oldest is None or oldest is self._index.newest:
                    return
            found, budget = self._cleaner.step(oldest, budget)
            with self._changed:
                moved = [(key, record) for key, place, record in found if self._index.move(key, place, record)]
                if moved:
                    self._push([key for key, _ in moved], [record for _, record in moved])

    def close(self) -> None:
        """Commit everything. Raises as `commit` does; it is closed all the same, and what was not durable is lost."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._unsealed = 0
        try:
            self.commit()
            if not self._index.live:  # one area for each bucket that was ever mounted would keep its ballast
                self._ballast.give_up()
        finally:
            with self._changed:  # the files are closed as soon as nobody reads them any more
                self._index.segments.clear()
                self._log.close()


def _again(error: StagingError) -> StagingError:
    """Return the same error, to be raised once more without the other one's traceback."""
    again = type(error)(error.message, hint=error.hint)
    again.errno = error.errno
    return again


_SCAN_PER_WRITTEN = 4
_MIN_STEP_BYTES = 64 << 10
_MAX_STEP_BYTES = 4 << 20
_MAX_DEBT_BYTES = 64 << 20
_WINDOW_BYTES = 256 << 10
_SEGMENT_COST_BYTES = 4 << 10


def _wrong(segment: Segment, offset: int) -> StagingError:
    return damaged(segment.path, offset, "not the record that was written here")


class Cleaner:
    """Finds the live records of the oldest segment, a bounded piece at a time. One thread at a time.

    How much it reads follows from how much is written, so that the log stays within about three times its live bytes:
    while it is larger than twice these (and a segment), each byte written lets it scan four. At least half of a log
    that large is dead, so a round over it gives back more than its copies take.
    """

    def __init__(self, find: Callable[[str], int | bytes | None]) -> None:
        """`find` says where the live record of a key is."""
        self._find = find
        self._debt_bytes = 0
        self._number = 0  # of the segment that is being scanned
        self._offset = 0
        self._left = 0  # records of the frame at the offset that are still to come

    @property
    def is_due(self) -> bool:
        """Return whether some steps are worth their while."""
        return self._debt_bytes >= _MIN_STEP_BYTES

    def begin(self, ballast_bytes: int) -> int:
        """Return how many bytes may be scanned now: half of the ballast, where there is one. Copies that wait for room
        do not eat up what drops need."""
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
        """Return key, place and record of those that are live now, from where the last step ended, and what of the
        budget is left. StagingError if a record is damaged; the segment stays then, and the next start says so."""
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
                    raise _wrong(segment, offset)
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
        """Return bytes of the segment. StagingError if it is shorter."""
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            wanted = min(max(size, _WINDOW_BYTES), self._segment.size_bytes - offset)
            self._data = os.pread(self._segment.fd, wanted, offset)
            self._start, at = offset, 0
            if len(self._data) < size:
                raise damaged(self._segment.path, offset, "cut off")
        return self._data[at : at + size]


_PLACE_BITS = 96
_MASK = (1 << 32) - 1


def place_of(segment: Segment, offset: int, size: int) -> int:
    """Return a place as one int."""
    return segment.number << 64 | offset << 32 | size


def split_place(place: int) -> tuple[int, int, int]:
    """Return number of the segment, offset, length."""
    return place >> 64 & _MASK, place >> 32 & _MASK, place & _MASK


class Index:
    """The newest record of each key, and the segments they are in. The journal's lock is held over every call."""

    def __init__(self) -> None:
        self.live: dict[str, int | bytes] = {}
        """Place or record by key, in the order of the last writes."""
        self.live_bytes = 0
        self.segments: dict[int, Segment] = {}
        """By number, oldest first."""
        self.serial = 0
        """Of the last change."""

    @property
    def oldest_is_dead(self) -> bool:
        """Return whether the oldest segment has no live record, and is not the only one."""
        return len(self.segments) > 1 and not next(iter(self.segments.values())).live_bytes

    @property
    def newest(self) -> Segment:
        """Return the segment that was made last."""
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
        """Note that a key has no live record any more."""
        was = self.live.pop(key, None)
        if isinstance(was, int):
            number, _, size = split_place(was)
            self._count(self.segments[number], -size)
        elif was is not None:
            self.live_bytes -= len(was)

    def put(self, key: str, record: bytes) -> None:
        """Note a key's newest record, which is not durable yet."""
        self.remove(key)
        self.live[key] = record
        self.live_bytes += len(record)

    def move(self, key: str, place: int, copy: bytes) -> bool:
        """Put a copy that is not durable yet in a record's place; False if that is live no more."""
        if self.live.get(key) != place:
            return False
        number, _, size = split_place(place)
        self.segments[number].live_bytes -= size
        self.live[key] = copy
        return True

    def settle(self, segment: Segment, offset: int, keys: Sequence[str], records: Sequence[bytes]) -> None:
        """Note that records are durable, from this offset on. Those that were replaced meanwhile do not count."""
        for key, record in zip(keys, records, strict=True):
            size = len(record)
            if self.live.get(key) is record:
                self.live[key] = place_of(segment, offset, size)
                segment.live_bytes += size
            offset += size
